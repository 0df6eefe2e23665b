"""Options about prompts, and about the lengths of prompts and answers."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from moesaic.cli.terminal.options import option
from moesaic.cli.terminal.outcome import CommandError, Exit

PANEL, TIMED = "Prompts", "Timed traces"
Dataset = Literal["random", "sharegpt", "custom", "prefix_repetition", "timed_trace"]
DRAWN = ("random", "prefix_repetition")


def _of(text: str, **more: Any) -> Any:
    return option(text, panel=PANEL, **more)


def _column(what: str, default: str) -> Any:
    return option(f"Column or key of {what} (default: {default}).", panel=TIMED)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompts that are sent.

    Raises:
        CommandError: a file is missing or must not be given, or a length is wrong.
    """

    dataset_name: Annotated[
        Dataset,
        _of("Source of prompts. Unlike in vLLM, those of custom get no chat template here."),
    ] = "random"
    dataset_path: Annotated[Path | None, _of("File of sharegpt, custom or timed_trace.")] = None
    num_prompts: Annotated[int, _of("Number of requests.", min=1)] = 1000
    no_oversample: Annotated[
        bool, _of("Do not use prompts of a file again.", switch="--no-oversample")
    ] = False
    disable_shuffle: Annotated[
        bool, _of("Keep the order of a file.", switch="--disable-shuffle")
    ] = False
    seed: Annotated[int, _of("Seed of all that is drawn.")] = 0
    input_len: Annotated[int | None, _of("The same as --random-input-len.", min=1)] = None
    output_len: Annotated[
        int | None, _of("Tokens of every answer, whatever the dataset but timed_trace.", min=1)
    ] = None
    random_input_len: Annotated[int, _of("Tokens of a random prompt.", min=1)] = 1024
    random_output_len: Annotated[int, _of("Tokens of its answer.", min=1)] = 128
    random_range_ratio: Annotated[
        str,
        _of(
            "Lengths are drawn from [length * (1 - ratio), length * (1 + ratio)]; also "
            '{"input": R, "output": R}.'
        ),
    ] = "0.0"
    random_prefix_len: Annotated[
        int, _of("Further tokens before a random prompt, the same for all.", min=0)
    ] = 0
    random_batch_size: Annotated[int, _of("Prompts of one request, of embeddings.", min=1)] = 1
    sharegpt_output_len: Annotated[
        int | None, _of("Tokens of every answer (default: as in the file).", min=1)
    ] = None
    custom_output_len: Annotated[
        int, _of("Tokens of every answer; -1: output_tokens of the file.", min=-1)
    ] = 256
    prefix_repetition_prefix_len: Annotated[int, _of("Tokens of a shared prefix.", min=1)] = 256
    prefix_repetition_suffix_len: Annotated[int, _of("Tokens after it.", min=1)] = 256
    prefix_repetition_num_prefixes: Annotated[int, _of("Number of prefixes.", min=1)] = 10
    prefix_repetition_output_len: Annotated[int, _of("Tokens of every answer.", min=1)] = 128
    timed_trace_chunk_hash_size: Annotated[
        int, option("Tokens that each of hash_ids stands for.", min=1, panel=TIMED)
    ] = 16
    timed_trace_sec_multiplier: Annotated[
        float, option("Seconds of one unit of time; 0.001: milliseconds.", panel=TIMED)
    ] = 1.0
    timed_trace_label_timestamp: Annotated[str, _column("times", "timestamp or timestamp_s")] = ""
    timed_trace_label_input_length: Annotated[
        str, _column("the prompt's tokens", "input_length or input_tokens")
    ] = ""
    timed_trace_label_output_length: Annotated[
        str, _column("the answer's tokens", "output_length or output_tokens")
    ] = ""
    timed_trace_label_hash_ids: Annotated[
        str, _column("names of the prompt's parts", "hash_ids")
    ] = ""
    timed_trace_max_len: Annotated[
        int | None,
        option(
            "Most tokens of a prompt and its answer together; longer ones are cut. vLLM has no "
            "such option.",
            min=2,
            panel=TIMED,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.dataset_name in DRAWN and self.dataset_path is not None:
            text = f"--dataset-path: --dataset-name {self.dataset_name} reads no file"
            raise CommandError(text, Exit.USAGE)
        if self.dataset_name not in DRAWN and self.dataset_path is None:
            text = f"--dataset-path: --dataset-name {self.dataset_name} needs a file"
            raise CommandError(text, Exit.USAGE)
        if self.custom_output_len == 0:
            raise CommandError("--custom-output-len: must be -1, or 1 or more", Exit.USAGE)
        if not 0 < self.timed_trace_sec_multiplier < math.inf:
            text = "--timed-trace-sec-multiplier: must be above 0, and finite"
            raise CommandError(text, Exit.USAGE)
        shared = self.prefix_repetition_num_prefixes
        if self.dataset_name == "prefix_repetition" and shared > self.num_prompts:
            text = f"--prefix-repetition-num-prefixes: must be {self.num_prompts} at most, got {shared}"
            raise CommandError(text, Exit.USAGE)
        # Read to refuse what is wrong.
        _ = self.range_ratios

    @property
    def range_ratios(self) -> tuple[float, float]:
        """Spread of the lengths of random prompts, and of their answers."""
        try:
            found = json.loads(self.random_range_ratio)
            ratios = (
                (float(found["input"]), float(found["output"]))
                if isinstance(found, dict)
                else (float(found), float(found))
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            ratios = (-1.0, -1.0)
        if not all(0 <= each < 1 for each in ratios):
            text = '--random-range-ratio: write a number from 0 to below 1, or {"input": 0.3, "output": 0.5}'
            raise CommandError(text, Exit.USAGE)
        return ratios
