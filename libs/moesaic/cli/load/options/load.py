"""All options of a load."""

import math
from dataclasses import dataclass

from moesaic.cli.load.options.prompts import PromptOptions
from moesaic.cli.load.options.result import ResultOptions
from moesaic.cli.load.options.server import ServerOptions
from moesaic.cli.load.options.traffic import TrafficOptions
from moesaic.cli.terminal.outcome import CommandError, Exit


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ResultOptions, TrafficOptions, PromptOptions, ServerOptions):
    """The load that the user asked for.

    Raises:
        CommandError: options are wrong, or do not go together.
    """

    def __post_init__(self) -> None:
        for part in (ServerOptions, PromptOptions, TrafficOptions, ResultOptions):
            part.__post_init__(self)
        if self.self_timed is not None and self.dataset_name != "timed_trace":
            raise CommandError("--self-timed: is only for --dataset-name timed_trace", Exit.USAGE)
        if self.is_self_timed and (self.ramp_up or self.request_rate != math.inf):
            text = "--request-rate: a timed_trace has its own times; add --no-self-timed"
            raise CommandError(text, Exit.USAGE)
        if self.is_pooling and self.goodput:
            raise CommandError("--goodput: embeddings have no tokens to wait for", Exit.USAGE)
        if self.random_batch_size > 1 and not (self.is_pooling and self.dataset_name == "random"):
            text = "--random-batch-size: is only for random prompts of openai-embeddings"
            raise CommandError(text, Exit.USAGE)

    @property
    def is_self_timed(self) -> bool:
        """Requests are sent when the file says."""
        return self.dataset_name == "timed_trace" and self.self_timed is not False

    @property
    def has_full_answers(self) -> bool:
        """Answers are not ended early."""
        return not self.is_pooling and (
            self.ignore_eos or self.dataset_name in ("random", "timed_trace")
        )
