"""Runs of a generating request: what workers are asked for, ``n`` answers to each prompt."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moesaic.errors import InvalidInput
from moesaic.services.gateway.admission import Admitted
from moesaic.services.gateway.fields.generating import MAX_ANSWERS, GenerationWire
from moesaic.services.gateway.fields.sampling import wrapped
from moesaic.services.gateway.workers.run import Run
from moesaic.v1.attention_pb2 import Generation, Grammar, Word

# Where the answer goes out as a whole and its text decides nothing, a worker need not tell each token.
WHOLE_ANSWER_PATIENCE_MS = 250


@dataclass(frozen=True)
class AnswerLimits:
    """Bounds of an answer's length."""

    max_model_tokens: int  # prompt and answer together
    max_tokens: int | None  # as asked for
    default_max_tokens: int | None  # None: all that fit
    field: str = "max_tokens"  # where the caller asked

    @property
    def bound(self) -> int:
        """Most tokens of an answer if they do not depend on the prompt, else 0."""
        return self.max_tokens if self.max_tokens is not None else self.default_max_tokens or 0

    def of(self, prompt: Sequence[int], field: str) -> int:
        """Find the most tokens of the answer to a prompt.

        Raises:
            InvalidInput: the prompt is empty, or leaves no room.
        """
        if not prompt:
            raise InvalidInput(field, "must not be empty")
        room = self.max_model_tokens - len(prompt)
        fits = f"prompt and answer together may have {self.max_model_tokens} tokens"
        if room < (1 if self.max_tokens is None else min(1, self.max_tokens)):
            fix = f"{fits}; the prompt has {len(prompt)}: shorten it"
            raise InvalidInput(field, fix, code="context_length_exceeded")
        if self.max_tokens is None:
            return min(room, self.default_max_tokens or room)
        if self.max_tokens > room:
            fix = f"must be at most {room}, got {self.max_tokens}: {fits}, and the prompt has {len(prompt)}"
            raise InvalidInput(self.field, fix, code="context_length_exceeded")
        return self.max_tokens


class LogprobCounts(NamedTuple):
    """Likeliest tokens to tell beside each token; None: nothing is told, not even of the token itself."""

    of_answer: int | None
    of_prompt: int | None


def runs_of(
    admitted: Admitted[GenerationWire],
    prompts: Sequence[Sequence[int]],
    field: str,
    limits: AnswerLimits,
    logprobs: LogprobCounts,
    bad_words: Sequence[Word],
    grammar: Grammar | None,
) -> list[Run]:
    """Make the runs of a request, prompt by prompt, ``n`` each.

    Args:
        admitted: the request.
        prompts: token ids of each prompt.
        field: field of the body that the prompts are from.
        limits: bounds of each answer's length.
        logprobs: counts of log-probabilities to tell.
        bad_words: tokens of the words that no answer may have.
        grammar: of the answers.

    Raises:
        InvalidInput: a prompt does not fit, or the fields contradict each other.
    """
    body, terms = admitted.body, admitted.terms
    _check_grammar(body, grammar)
    # A seed of the gateway's own, where the caller gave none, lets another worker go on where one was lost.
    drawn = body.seed is None
    seed = secrets.randbits(63) if body.seed is None else body.seed
    if len(prompts) * body.n > MAX_ANSWERS:
        fix = f"{len(prompts)} prompts with {body.n} answers each are over {MAX_ANSWERS}"
        raise InvalidInput("n", f"{fix}: ask for fewer at once")
    work = Generation(  # one for all: there may be thousands of runs, and it may name a whole vocabulary
        min_tokens=body.min_tokens,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        sampling=body.sampling(seed, bad_words, admitted.gateway.defaults),
        top_logprobs=logprobs.of_answer,
        prompt_logprobs=logprobs.of_prompt,
        grammar=grammar,
        patience_ms=0 if body.stream or body.stops else WHOLE_ANSWER_PATIENCE_MS,
    )
    runs: list[Run] = []
    for i, prompt in enumerate(prompts):
        max_tokens = limits.of(prompt, field if len(prompts) == 1 else f"{field}[{i}]")
        if body.min_tokens > max_tokens:
            fix = f"must be at most max_tokens ({max_tokens}), got {body.min_tokens}"
            raise InvalidInput("min_tokens", fix)
        # With a caller's seed, equal prompts have equal answers. Without one, every answer is an independent draw.
        first = seed + (len(runs) if drawn else 0)
        runs += [
            Run(prompt, work, terms, max_tokens=max_tokens, seed=wrapped(first + k))
            for k in range(body.n)
        ]
    return runs


def _check_grammar(body: GenerationWire, grammar: Grammar | None) -> None:
    if grammar is not None and body.min_tokens:
        raise InvalidInput("min_tokens", f"cannot be combined with {grammar.field}")
    if grammar is not None and body.allowed_token_ids:
        raise InvalidInput("allowed_token_ids", f"cannot be combined with {grammar.field}")
