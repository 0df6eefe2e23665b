"""Questions that are answered by reads: admitted, computed and reported together.

Each read is one prefill (``moesaic.classification.candidates.Read``). Those that ask about the same thing are siblings
and a family: they begin alike, go to one worker one behind the other, and what they share is computed once.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from moesaic.classification.candidates import Candidates, Read
from moesaic.errors import InvalidInput, MoesaicError
from moesaic.v1.attention_pb2 import Candidate, Finished, Generation, Scores, Scoring
from services.gateway.exchange import Exchange
from services.gateway.execution import Deadline, Run, Terms, WorkFailed
from services.gateway.fields import InferenceWire
from services.gateway.gateway import Gateway, terms_of
from services.gateway.replies import EpochTokens, Provenance, Usage, usage_of

MAX_READS = 4096  # of one request
MAX_TOKENS = (
    1 << 23
)  # of all its prompts; siblings repeat what they share, so a small body can ask for many

Family = Sequence[Read]


@dataclass(frozen=True)
class Readout:
    """What came of all reads of a request.

    Attributes:
        logprobs: by family, then by read, then by candidate; natural log.
        usage: the prompts of all reads, what siblings share counted for each of them; ``cached_tokens`` says how much
            of that was not computed.
        provenance: of all of them together.
    """

    logprobs: list[list[list[float]]]
    usage: Usage
    provenance: Provenance


async def read_out(
    gateway: Gateway,
    exchange: Exchange,
    body: InferenceWire,
    answer_id: str,
    families: Sequence[Family],
    deadline: Deadline,
    field: str,
) -> Readout:
    """Have every read done, or none: the first that fails fails the request, and ends the others.

    Args:
        gateway, exchange, body, answer_id, deadline: of the request.
        families: what to read; those of a family are siblings.
        field: of the request that the prompts are made of; workers call them ``prompt``.

    Raises:
        TenantLimited: the tenant may not have so many tokens now.
        MoesaicError: a read cannot be done.
    """
    runs = _runs(families, terms_of(body, exchange.tenant))
    exchange.prompt_tokens = sum(len(run.prompt) for run in runs)
    exchange.take_tokens(0)
    scores: dict[int, list[float]] = {}
    finished: list[Finished] = []
    async with gateway.execution(answer_id, runs, deadline, exchange) as execution:
        try:
            while events := await execution.next_events():
                for i, event in events:
                    if isinstance(event, Scores):
                        scores[i] = list(event.logprobs)
                    elif isinstance(event, Finished):
                        finished.append(event)
                exchange.note_tokens(0)
        except WorkFailed as failed:
            failed.field = field if failed.field == "prompt" else failed.field
            raise
        finally:
            exchange.attempts = sum(run.attempt for run in runs)
    exchange.cached_tokens = sum(done.cached_tokens for done in finished)
    told = (_checked(scores.get(i, []), run.work) for i, run in enumerate(runs))
    return Readout(
        [[next(told) for _ in family] for family in families],
        usage_of(exchange.prompt_tokens, 0, exchange.cached_tokens),
        _provenance(body, runs, finished, exchange.cached_tokens),
    )


def _checked(logprobs: list[float], work: Generation | Scoring) -> list[float]:
    """What a worker told of one read.

    Raises:
        MoesaicError: it is not a number for each candidate.
    """
    assert isinstance(work, Scoring)
    if len(logprobs) != len(work.candidates) or any(map(math.isnan, logprobs)):
        wanted = f"expected {len(work.candidates)} log-probabilities of an attention worker"
        raise MoesaicError(f"{wanted}, got {len(logprobs)}, or some that are no numbers")
    return logprobs


class Bounds:
    """What the reads of one request may take: each the model's context, all together what a gateway can hold."""

    def __init__(self, gateway: Gateway) -> None:
        self._language = gateway.language
        self._context = gateway.language.max_tokens
        self._num_tokens = 0

    def read(self, make: Callable[[], Read], field: str, beside: str = "") -> Read:
        """A read, made and packed; its prompt is made of ``field`` and what is ``beside``.

        Raises:
            InvalidInput: naming ``field``.
        """
        with self._language.naming(field, beside):
            read = make()
        num_tokens = len(read.prompt)
        room = max(0, self._context - max(map(len, read.candidates)))
        if num_tokens > room:
            fix = (
                f"this model's context is {self._context} tokens; the prompt made of it"
                f"{f' and {beside}' if beside else ''} takes {num_tokens}, at most {room} leave "
                "room for the answer"
            )
            raise InvalidInput(field, fix, code="context_length_exceeded")
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_TOKENS:
            fix = (
                f"all prompts of a request may take {MAX_TOKENS} tokens, each with what it shares "
                f"with others; with {beside or 'this one'} they take more: ask less at once"
            )
            raise InvalidInput(field, fix)
        return Read(array("I", read.prompt), read.candidates)


def _runs(families: Iterable[Family], terms: Terms) -> list[Run]:
    work: dict[int, Scoring] = {}  # by the candidates' identity: they are many, and mostly the same

    def scoring(candidates: Candidates) -> Scoring:
        if (known := work.get(id(candidates))) is None:
            asked = [Candidate(token_ids=candidate) for candidate in candidates]
            known = work[id(candidates)] = Scoring(candidates=asked)
        return known

    return [
        Run(read.prompt, scoring(read.candidates), terms, number if len(family) > 1 else None)
        for number, family in enumerate(families)
        for read in family
    ]


def _provenance(
    body: InferenceWire, runs: Sequence[Run], finished: Sequence[Finished], cached_tokens: int
) -> Provenance:
    tokens: dict[int, int] = {}
    for done in finished:
        for span in done.epochs:
            tokens[span.epoch] = tokens.get(span.epoch, 0) + span.tokens
    workers = sorted({worker_id for run in runs for worker_id in run.worker_ids})
    return Provenance(
        epochs=[EpochTokens(epoch, count) for epoch, count in sorted(tokens.items())],
        cached_tokens=cached_tokens,
        workers=workers if body.moesaic.provenance else None,
    )
