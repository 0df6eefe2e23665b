"""Execute's messages and the engine's requests and events, one into the other."""

import time

from moesaic.engine.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    Generation,
    Request,
    RequestKey,
    Sampling,
    ScoreEvent,
    Scoring,
    TokenEvent,
)
from moesaic.errors import InvalidInput
from moesaic.v1 import attention_pb2 as pb

_REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}
MAX_TOP_LOGPROBS = 20


def decode_submit(
    submit: pb.Submit, stream: int, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Request:
    """A request of the engine from its wire form.

    Raises:
        InvalidInput: a token id is outside the vocabulary, or a parameter is out of range.
    """
    tokens = tuple(submit.token_ids)
    if any(token >= vocab_size for token in tokens):
        raise InvalidInput("prompt", f"token ids must be below {vocab_size}, got {max(tokens)}")
    deadline_s = time.monotonic() + submit.deadline_ms / 1000 if submit.deadline_ms else None
    work: Generation | Scoring
    if submit.WhichOneof("work") == "scoring":
        candidates = tuple(tuple(c.token_ids) for c in submit.scoring.candidates)
        if any(token >= vocab_size for candidate in candidates for token in candidate):
            raise InvalidInput("labels", f"token ids must be below {vocab_size}")
        work = Scoring(candidates)
    elif submit.WhichOneof("work") == "generation":
        if any(token >= vocab_size for token in submit.generation.stop_token_ids):
            raise InvalidInput("stop_token_ids", f"token ids must be below {vocab_size}")
        work = _decode_generation(submit.generation, eos_token_ids)
    else:
        raise InvalidInput("work", "must be generation or scoring")
    key = RequestKey(submit.request_id, submit.attempt, stream)
    return Request(key, tokens, work, deadline_s, float(submit.deadline_ms))


def _decode_generation(generation: pb.Generation, eos_token_ids: tuple[int, ...]) -> Generation:
    how = generation.sampling
    if how.temperature < 0 or not 0 <= how.top_p <= 1 or not 0 <= how.min_p <= 1:
        raise InvalidInput(
            "sampling", "temperature must not be negative, top_p and min_p must be in 0..1"
        )
    top_logprobs = generation.top_logprobs if generation.HasField("top_logprobs") else None
    if top_logprobs is not None and top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidInput(
            "top_logprobs", f"must be at most {MAX_TOP_LOGPROBS}, got {top_logprobs}"
        )
    ends = () if generation.ignore_eos else eos_token_ids
    return Generation(
        max_tokens=generation.max_tokens,
        min_tokens=generation.min_tokens,
        stop_token_ids=frozenset((*generation.stop_token_ids, *ends)),
        sampling=Sampling(how.temperature, how.top_p or 1.0, how.top_k, how.min_p, how.seed),
        top_logprobs=top_logprobs,
    )


def encode_event(event: Event) -> pb.ExecuteResponse:
    """The wire form of an engine's event."""
    key = event.key
    response = pb.ExecuteResponse(request_id=key.request_id, attempt=key.attempt)
    if isinstance(event, TokenEvent):
        response.tokens.token_index = event.index
        response.tokens.token_ids.append(event.token_id)
        if event.logprob is not None:
            response.tokens.logprobs.add(
                logprob=event.logprob.logprob,
                top_token_ids=[token for token, _ in event.logprob.top],
                top_logprobs=[logprob for _, logprob in event.logprob.top],
            )
    elif isinstance(event, ScoreEvent):
        response.scores.logprobs.extend(event.logprobs)
    elif isinstance(event, FinishEvent):
        response.finished.CopyFrom(
            pb.Finished(
                reason=_REASONS[event.reason],
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.completion_tokens,
                epochs=[pb.EpochSpan(epoch=epoch, tokens=tokens) for epoch, tokens in event.epochs],
                stop_token_id=event.stop_token_id,
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
