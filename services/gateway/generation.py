"""A generation of one REST request: n answers to each of its prompts, as text."""

import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass

from moesaic.errors import InvalidInput
from moesaic.v1.attention_pb2 import Finished, Generation, Sampling, Tokens, Word
from services.gateway.choices import Choice, Ending, Piece
from services.gateway.exchange import Exchange
from services.gateway.execution import Deadline, Run, Terms
from services.gateway.fields import INT64, MAX_ANSWERS, GenerationWire
from services.gateway.gateway import Gateway
from services.gateway.replies import EpochTokens, Provenance, Usage, usage_of
from services.gateway.structure import grammar_of

# Where the answer goes out as a whole and its text decides nothing, a worker need not tell each token.
WHOLE_ANSWER_PATIENCE_MS = 250


@dataclass(frozen=True)
class Limits:
    """What bounds the length of an answer."""

    max_model_tokens: int  # prompt and answer together
    max_tokens: int | None  # as asked for
    default_max_tokens: int | None  # None: whatever fits
    field: str = "max_tokens"  # where the caller asked

    @property
    def bound(self) -> int:
        """The most that an answer may have if that does not depend on the prompt, else 0."""
        return self.max_tokens if self.max_tokens is not None else self.default_max_tokens or 0

    def of(self, prompt: Sequence[int], field: str) -> int:
        """Tokens that the answer to a prompt may have.

        Raises:
            InvalidInput: the prompt is empty, or does not leave room.
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


def runs_of(
    body: GenerationWire,
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    field: str,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
    terms: Terms,
    bad_words: Sequence[Word] = (),
) -> list[Run]:
    """The runs of a request, prompt by prompt, ``n`` each.

    Raises:
        InvalidInput: a prompt does not fit, or the fields contradict each other.
    """
    grammar = grammar_of(body)
    if grammar is not None and body.min_tokens:
        raise InvalidInput("min_tokens", f"cannot be combined with {grammar.field}")
    if grammar is not None and body.allowed_token_ids:
        raise InvalidInput("allowed_token_ids", f"cannot be combined with {grammar.field}")
    # Without a seed of the caller's we pick one: it lets another worker go on where one was lost.
    seed = body.seed if body.seed is not None else secrets.randbits(63)
    if len(prompts) * body.n > MAX_ANSWERS:
        fix = f"{len(prompts)} prompts with {body.n} answers each are over {MAX_ANSWERS}"
        raise InvalidInput("n", f"{fix}: ask for fewer at once")
    runs = []
    for i, prompt in enumerate(prompts):
        max_tokens = limits.of(prompt, field if len(prompts) == 1 else f"{field}[{i}]")
        if body.min_tokens > max_tokens:
            fix = f"must be at most max_tokens ({max_tokens}), got {body.min_tokens}"
            raise InvalidInput("min_tokens", fix)
        for k in range(body.n):
            work = Generation(
                max_tokens=max_tokens,
                min_tokens=body.min_tokens,
                stop_token_ids=body.stop_token_ids,
                ignore_eos=body.ignore_eos,
                sampling=_sampling_of(body, seed + k, bad_words),
                top_logprobs=top_logprobs,
                prompt_logprobs=prompt_logprobs,
                grammar=grammar,
                patience_ms=0 if body.stream or body.stops else WHOLE_ANSWER_PATIENCE_MS,
            )
            runs.append(Run(prompt, work, terms))
    return runs


def _sampling_of(body: GenerationWire, seed: int, bad_words: Sequence[Word]) -> Sampling:
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=(seed + INT64) % (2 * INT64) - INT64,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=body.allowed_token_ids or (),
        bad_words=bad_words,
    )


class Answers:
    """The answers to one request, growing."""

    def __init__(
        self, gateway: Gateway, exchange: Exchange, body: GenerationWire, runs: Sequence[Run]
    ) -> None:
        self.runs = runs
        ending = Ending(
            body.stops,
            frozenset(body.stop_token_ids),
            body.include_stop_str_in_output,
            body.min_tokens,
        )
        self.choices = [
            Choice(
                i, gateway.language.decoder(skip_special_tokens=body.skip_special_tokens), ending
            )
            for i in range(len(runs))
        ]
        self._gateway, self._exchange, self._n = gateway, exchange, body.n
        self._wants_workers = body.moesaic.provenance
        self._finished: dict[int, Finished] = {}  # by run
        self.prompt_tokens = exchange.prompt_tokens = sum(
            len(run.prompt) for run in runs[:: body.n]
        )

    async def pieces(self, answer_id: str, deadline: Deadline) -> AsyncGenerator[list[Piece], None]:
        """Carry the request out and give what is new, until every choice has its finish reason."""
        async with self._gateway.execution(
            answer_id, self.runs, deadline, self._exchange
        ) as execution:
            try:
                while events := await execution.next_events():
                    pieces = []
                    for i, event in events:
                        choice = self.choices[i]
                        if choice.finished:
                            continue  # a stop string was found earlier in this batch
                        if isinstance(event, Tokens):
                            pieces.append(choice.feed(event))
                            if choice.finished:
                                execution.cancel(self.runs[i])
                        elif isinstance(event, Finished):
                            self._finished[i] = event
                            pieces.append(choice.finish(event))
                    if pieces:  # not if only the prompts' log-probabilities came
                        together = list(joined(pieces))
                        counts = [len(piece.token_ids) for piece in together]
                        self._exchange.note_tokens(sum(counts), max(counts))
                        yield together
            finally:
                self._exchange.attempts = sum(run.attempt for run in self.runs)
                self._exchange.cached_tokens = self._cached_tokens
                self._exchange.completion_tokens = self.usage.completion_tokens  # end tokens too

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return usage_of(self.prompt_tokens, completion_tokens, self._cached_tokens)

    @property
    def provenance(self) -> Provenance:
        """Where it was computed, as far as workers told: one that was stopped at a stop string does not."""
        tokens: dict[int, int] = {}
        for finished in self._finished.values():
            for span in finished.epochs:
                tokens[span.epoch] = tokens.get(span.epoch, 0) + span.tokens
        workers = sorted({worker_id for run in self.runs for worker_id in run.worker_ids})
        return Provenance(
            epochs=[EpochTokens(epoch, count) for epoch, count in sorted(tokens.items())],
            cached_tokens=self._cached_tokens,
            workers=workers if self._wants_workers else None,
        )

    @property
    def _cached_tokens(self) -> int:
        """A prompt with several answers counts once, as the answer that found the least of it."""
        cached = 0
        for first in range(0, len(self.runs), self._n):
            told = [self._finished.get(first + k) for k in range(self._n)]
            found = min(finished.cached_tokens if finished else 0 for finished in told)
            cached += min(found, len(self.runs[first].prompt))
        return cached


def joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Pieces of one choice that arrived together become one: a chunk each would only cost time."""
    joined: dict[int, Piece] = {}
    for piece in pieces:
        first = joined.setdefault(piece.index, piece)
        if first is not piece:
            first.text += piece.text
            first.token_ids += piece.token_ids
            first.logprobs = [*first.logprobs, *piece.logprobs]
            first.finish_reason, first.stop_reason = piece.finish_reason, piece.stop_reason
    return joined.values()
