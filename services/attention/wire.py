"""Messages of ``Execute`` into requests of the engine, and its events into messages."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal

import numpy as np

from moesaic.engine.brownout import BrownoutLoad
from moesaic.engine.sequences.grammar import Grammar, GrammarCompiler
from moesaic.engine.sequences.requests import (
    Degradation,
    Event,
    FailureEvent,
    FinishEvent,
    GenerationTask,
    PooledEvent,
    Pooling,
    ProgressEvent,
    PromptEvent,
    Request,
    RequestKey,
    Sampling,
    ScoreEvent,
    ScoringTask,
    TokenEvent,
    TokenLogprob,
)
from moesaic.errors import InvalidInput
from moesaic.fairness import Claim
from moesaic.v1 import attention_pb2 as pb

_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
_POOLINGS: dict[int, Pooling] = {pb.POOLING_LAST: "last", pb.POOLING_MEAN: "mean"}
MAX_TOP_LOGPROBS = 20


def decode_submit(
    submit: pb.Submit, stream: int, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Request:
    """Read a request of the engine from its wire form.

    Raises:
        InvalidInput: a token id is outside the vocabulary, or a parameter is out of range.
    """
    tokens = tuple(submit.token_ids)
    if any(token >= vocab_size for token in tokens):
        raise InvalidInput("prompt", f"token ids must be below {vocab_size}, got {max(tokens)}")
    deadline_s = time.monotonic() + submit.deadline_ms / 1000 if submit.deadline_ms else None
    task: GenerationTask | ScoringTask
    if submit.WhichOneof("work") == "scoring":
        candidates = tuple(tuple(c.token_ids) for c in submit.scoring.candidates)
        if any(token >= vocab_size for candidate in candidates for token in candidate):
            raise InvalidInput("labels", f"token ids must be below {vocab_size}")
        stored = submit.scoring.store_kv if submit.scoring.HasField("store_kv") else None
        task = ScoringTask(candidates, stored)
    elif submit.WhichOneof("work") == "embedding":
        pooling = _POOLINGS.get(submit.embedding.pooling)
        if pooling is None:
            raise InvalidInput("pooling", f"must be one of {', '.join(_POOLINGS.values())}")
        stored = submit.embedding.store_kv if submit.embedding.HasField("store_kv") else None
        task = ScoringTask((), stored, pooling)
    elif submit.WhichOneof("work") == "generation":
        named = {
            "stop_token_ids": submit.generation.stop_token_ids,
            "logit_bias": submit.generation.sampling.logit_bias,
            "allowed_token_ids": submit.generation.sampling.allowed_token_ids,
            "bad_words": [
                token for word in submit.generation.sampling.bad_words for token in word.token_ids
            ],
        }
        for field, token_ids in named.items():
            if any(token >= vocab_size for token in token_ids):
                raise InvalidInput(field, f"token ids must be below {vocab_size}")
        task = _decode_generation(submit.generation, len(tokens), eos_token_ids)
    else:
        raise InvalidInput("work", "must be generation, scoring or embedding")
    key = RequestKey(submit.request_id, submit.attempt, stream)
    return Request(
        key,
        tokens,
        task,
        deadline_s,
        float(submit.deadline_ms),
        submit.priority,
        submit.cache_salt,
        _min_threshold(submit.min_threshold),
        submit.tenant,
        submit.part_of,
        submit.traceparent,
    )


def _min_threshold(threshold: float) -> float:
    if not 0 <= threshold <= 1:
        raise InvalidInput("min_threshold", f"must be in 0..1, got {threshold}")
    return threshold


def _decode_generation(
    generation: pb.Generation, num_tokens: int, eos_token_ids: tuple[int, ...]
) -> GenerationTask:
    if generation.num_resumed_tokens > num_tokens:
        raise InvalidInput("num_resumed_tokens", f"must be at most {num_tokens}")
    structured = generation.HasField("grammar")
    if structured and generation.min_tokens:
        raise InvalidInput("min_tokens", f"cannot be combined with {generation.grammar.field}")
    ends = () if generation.ignore_eos and not structured else eos_token_ids
    stop_token_ids = frozenset((*generation.stop_token_ids, *ends))
    if allowed := set(generation.sampling.allowed_token_ids):
        if structured:
            fix = f"cannot be combined with {generation.grammar.field}"
            raise InvalidInput("allowed_token_ids", fix)
        if generation.min_tokens and allowed <= stop_token_ids:
            raise InvalidInput("min_tokens", "allowed_token_ids has none but end tokens")
    return GenerationTask(
        max_tokens=generation.max_tokens,
        min_tokens=generation.min_tokens,
        stop_token_ids=stop_token_ids,
        num_resumed=generation.num_resumed_tokens,
        patience_s=generation.patience_ms / 1000,
        sampling=_decode_sampling(generation.sampling),
        top_logprobs=_num_logprobs(generation, "top_logprobs"),
        prompt_logprobs=_num_logprobs(generation, "prompt_logprobs"),
    )


async def compile_grammar(
    compiler: GrammarCompiler, grammar: pb.Grammar, request: Request
) -> Grammar:
    """Compile the form of a generation's answer, which takes up to some seconds.

    Raises:
        InvalidInput: there is no such grammar, or the worker cannot use any.
        Overloaded: too many wait to be compiled.
        NotReady: it could not be tried now.
    """
    field = grammar.field or "grammar"
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidInput(field, "is of an unknown kind")
    claim = Claim(request.tenant, request.part_of or request.key.request_id, request.priority)
    return await compiler.compile_beside(kind, getattr(grammar, kind), field, claim)


def _num_logprobs(
    generation: pb.Generation, field: Literal["top_logprobs", "prompt_logprobs"]
) -> int | None:
    count: int = getattr(generation, field)
    if count > MAX_TOP_LOGPROBS:
        raise InvalidInput(field, f"must be at most {MAX_TOP_LOGPROBS}, got {count}")
    return count if generation.HasField(field) else None


def _decode_sampling(how: pb.Sampling) -> Sampling:
    # Written so that what is not a number fails too.
    if not (how.temperature >= 0 and 0 <= how.top_p <= 1 and 0 <= how.min_p <= 1):
        raise InvalidInput(
            "sampling", "temperature must not be negative, top_p and min_p must be in 0..1"
        )
    if not 0 <= how.repetition_penalty < math.inf:
        raise InvalidInput("repetition_penalty", "must be a positive number")
    added = (how.presence_penalty, how.frequency_penalty, *how.logit_bias.values())
    if not all(map(math.isfinite, added)):
        raise InvalidInput("sampling", "penalties and biases must be finite")
    return Sampling(
        temperature=how.temperature,
        top_p=how.top_p or 1.0,
        top_k=how.top_k,
        min_p=how.min_p,
        seed=how.seed,
        repetition_penalty=how.repetition_penalty or 1.0,
        presence_penalty=how.presence_penalty,
        frequency_penalty=how.frequency_penalty,
        logit_bias=tuple(sorted(how.logit_bias.items())),
        allowed_token_ids=tuple(sorted(set(how.allowed_token_ids))),
        bad_words=tuple(tuple(word.token_ids) for word in how.bad_words if word.token_ids),
    )


def encode_events(events: Iterable[Event]) -> Iterator[tuple[Event, pb.ExecuteResponse]]:
    """Encode events, tokens of a request that follow each other in one message; each comes with its last event."""
    for (_, are_tokens), alike in groupby(events, lambda e: (e.key, isinstance(e, TokenEvent))):
        if are_tokens:
            yield _encode_tokens([event for event in alike if isinstance(event, TokenEvent)])
        else:
            yield from ((event, encode_event(event)) for event in alike)


def _encode_tokens(events: Sequence[TokenEvent]) -> tuple[TokenEvent, pb.ExecuteResponse]:
    first, last = events[0], events[-1]
    response = pb.ExecuteResponse(request_id=first.key.request_id, attempt=first.key.attempt)
    response.tokens.token_index = first.index
    response.tokens.token_ids.extend([event.token_id for event in events])
    response.tokens.logprobs.extend(
        _encode_logprob(event.logprob) for event in events if event.logprob is not None
    )
    told = [event.degradation for event in events if event.degradation is not None]
    if told:
        response.tokens.degradation.CopyFrom(_encode_degradation(told[-1]))
    return last, response


def encode_event(event: Event) -> pb.ExecuteResponse:
    """Encode one event."""
    if isinstance(event, TokenEvent):
        return _encode_tokens([event])[1]
    key = event.key
    response = pb.ExecuteResponse(request_id=key.request_id, attempt=key.attempt)
    if isinstance(event, PromptEvent):
        response.prompt_logprobs.first_position = event.first_position
        response.prompt_logprobs.logprobs.extend(map(_encode_logprob, event.logprobs))
        response.prompt_logprobs.degradation.CopyFrom(_encode_degradation(event.degradation))
    elif isinstance(event, ProgressEvent):
        response.progress.computed_tokens = event.computed_tokens
    elif isinstance(event, ScoreEvent):
        response.scores.logprobs.extend(event.logprobs)
    elif isinstance(event, PooledEvent):
        response.pooled.values = np.asarray(event.values, "<f4").tobytes()
    elif isinstance(event, FinishEvent):
        response.finished.CopyFrom(
            pb.Finished(
                reason=_REASONS[event.reason],
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.completion_tokens,
                cached_tokens=event.cached_tokens,
                epochs=[pb.EpochSpan(epoch=epoch, tokens=tokens) for epoch, tokens in event.epochs],
                stop_token_id=event.stop_token_id,
                stop_logprob=_encode_logprob(event.stop_logprob) if event.stop_logprob else None,
                degradation=_encode_degradation(event.degradation),
            )
        )
    elif isinstance(event, FailureEvent):
        error = event.error
        response.failure.CopyFrom(
            pb.Failure(
                code=error.code,
                message=str(error),
                field=getattr(error, "field", ""),
                retryable=error.retryable,
                retry_after_s=getattr(error, "retry_after_s", 0.0),
                http_status=error.http_status,
            )
        )
    return response


def _encode_degradation(told: Degradation) -> pb.Degradation:
    return pb.Degradation(mean_threshold=told.mean_threshold, share=told.share, rows=told.rows)


def encode_brownout(load: BrownoutLoad) -> pb.BrownoutLoad:
    """Encode the state of brownout; what was not measured is absent."""
    return pb.BrownoutLoad(**vars(load))


def _encode_logprob(told: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        logprob=told.logprob,
        rank=told.rank,
        top_token_ids=[token for token, _ in told.top],
        top_logprobs=[logprob for _, logprob in told.top],
    )
