"""Questions that are answered by reads: computed and reported together.

Each read is one prefill (``moesaic.classification.candidates.Read``). Reads that ask about the same text are siblings
and form a family: they share a prefix. They go to one worker, one after the other, so that the prefix is computed once.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from moesaic.classification.candidates import Candidates, Read
from moesaic.errors import InvalidInput, MoesaicError
from moesaic.services.gateway.fields.bodies import InferenceWire, with_template
from moesaic.services.gateway.gateway import Admitted, Gateway
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import while_connected
from moesaic.services.gateway.replies.accounts import (
    ListReply,
    Provenance,
    Usage,
    provenance_of,
    usage_of,
)
from moesaic.services.gateway.workers.run import RequestTerms, Run, Work, WorkFailed
from moesaic.v1.attention_pb2 import Candidate, Finished, Pooled, Scores, Scoring

MAX_READS = 4096  # of one request
# Of all its prompts: siblings repeat their prefix, so a small body can ask for many.
MAX_TOKENS = 1 << 23

Family = Sequence[Read]


@dataclass(frozen=True)
class Readout:
    """Result of all reads of a request.

    Attributes:
        logprobs: by family, then by read, then by candidate; natural log.
        usage: tokens of all prompts, the common prefix of siblings counted for each of them; ``cached_tokens`` are
            those that were not computed.
        provenance: of all of them together.
    """

    logprobs: list[list[list[float]]]
    usage: Usage
    provenance: Provenance


async def read_out(
    admitted: Admitted[InferenceWire], families: Sequence[Family], field: str
) -> Readout:
    """Have every read done, or none: the first that fails fails the request, and ends the others.

    Args:
        admitted: the request.
        families: reads; those of a family are siblings.
        field: field of the body that the prompts are made of; workers call them ``prompt``.

    Raises:
        TenantLimited: the tenant may not have so many tokens now.
        MoesaicError: a read cannot be done.
    """
    runs = _runs(families, admitted.terms)
    scores: dict[int, list[float]] = {}

    def take(i: int, event: Scores | Pooled) -> None:
        assert isinstance(event, Scores)
        scores[i] = _checked(list(event.logprobs), runs[i].work)

    usage, provenance = await carry_out(admitted, runs, field, take)
    told = (scores[i] if i in scores else _checked([], run.work) for i, run in enumerate(runs))
    logprobs = [[next(told) for _ in family] for family in families]
    return Readout(logprobs, usage, provenance)


async def carry_out(
    admitted: Admitted[InferenceWire],
    runs: Sequence[Run],
    field: str,
    take: Callable[[int, Scores | Pooled], None],
) -> tuple[Usage, Provenance]:
    """Have prompts read; ``take`` gets what a run gave, with its index. See ``read_out`` for the rest."""
    record, finished = admitted.record, list[Finished]()
    record.prompt_tokens = sum(len(run.prompt) for run in runs)
    record.charge_tokens(0)
    async with admitted.execution(runs) as execution:
        try:
            while events := await execution.next_events():
                for i, event in events:
                    if isinstance(event, Scores | Pooled):
                        take(i, event)
                    elif isinstance(event, Finished):
                        finished.append(event)
                record.note_tokens(0)
        except WorkFailed as failed:
            failed.field = field if failed.field == "prompt" else failed.field
            raise
        finally:
            record.attempts = sum(run.attempt for run in runs)
    record.cached_tokens = sum(done.cached_tokens for done in finished)
    return (
        usage_of(record.prompt_tokens, 0, record.cached_tokens),
        provenance_of(finished, runs, record.cached_tokens, admitted.body.moesaic.provenance),
    )


async def read_answers(
    admitted: Admitted[InferenceWire],
    request: Request,
    families: Sequence[Family],
    field: str,
    unknown: Sequence[str],
) -> Readout:
    """Read the answers to questions in this suite's words, unless the client disconnects; see ``read_out``.

    ``unknown`` names the keywords that the chat template does not read.
    """
    admitted.record.ignored = with_template(admitted.record.ignored, unknown, ())
    told = await while_connected(request.receive, read_out(admitted, families, field))
    told.provenance.prompt_version = admitted.gateway.language.wording.version
    return told


class Accounted(Protocol):
    """A result with its accounts."""

    @property
    def usage(self) -> Usage:
        """Tokens that it took."""
        ...

    @property
    def provenance(self) -> Provenance:
        """Its origin."""
        ...


def list_reply(
    kind: type[ListReply],
    admitted: Admitted[InferenceWire],
    told: Accounted,
    data: list[Any],
    **others: Any,
) -> Response:
    """Answer with a list of results; ``others`` are the fields that only this kind has."""
    return reply(
        kind(
            id=admitted.answer_id,
            created=admitted.created,
            model=admitted.gateway.model_name,
            data=data,
            usage=told.usage,
            moesaic=told.provenance,
            **others,
        )
    )


def _checked(logprobs: list[float], work: Work) -> list[float]:
    """Check a worker's answer to one read.

    Raises:
        MoesaicError: it is not a number for each candidate.
    """
    assert isinstance(work, Scoring)
    if len(logprobs) != len(work.candidates) or any(map(math.isnan, logprobs)):
        wanted = f"expected {len(work.candidates)} log-probabilities of an attention worker"
        raise MoesaicError(f"{wanted}, got {len(logprobs)}, or some that are no numbers")
    return logprobs


class Bounds:
    """Bounds of one request's reads: each by the model's context, all together by what a gateway can hold."""

    def __init__(self, gateway: Gateway) -> None:
        self._language = gateway.language
        self._context = gateway.language.max_tokens
        self._num_tokens = 0

    def read(self, make: Callable[[], Read], field: str, beside: str = "") -> Read:
        """Make and pack a read, whose prompt is made of ``field`` and the fields ``beside`` it.

        Raises:
            InvalidInput: the prompt is too long, naming ``field``.
        """
        with self._language.naming(field, beside):
            read = make()
        num_tokens = len(read.prompt)
        room = max(0, self._context - max(map(len, read.candidates), default=0))
        if num_tokens > room:
            fix = (
                f"this model's maximum context length is {self._context} tokens; the prompt made of it"
                f"{f' and {beside}' if beside else ''} takes {num_tokens}, at most {room} "
                f"{'leave room for the answer' if read.candidates else 'are possible'}"
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


def _runs(families: Iterable[Family], terms: RequestTerms) -> list[Run]:
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
