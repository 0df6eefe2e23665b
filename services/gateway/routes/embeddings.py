"""``/v1/embeddings`` and ``/pooling``: one prefill an input, and its hidden state as a vector."""

from array import array
from collections.abc import Callable, Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from moesaic.classification.candidates import Read
from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import with_template
from moesaic.services.gateway.fields.embedding import EmbeddingWire, PoolingWire
from moesaic.services.gateway.fields.messages import turns_of
from moesaic.services.gateway.fields.truncating import kept_tokens
from moesaic.services.gateway.gateway import Admitted, admit
from moesaic.services.gateway.http.openapi import INFERENCE, answers
from moesaic.services.gateway.http.request_record import while_connected
from moesaic.services.gateway.replies.embedding import (
    Embedding,
    Embeddings,
    PooledInput,
    PooledInputs,
    Vector,
)
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.score.reading import Bounds, list_reply
from moesaic.services.gateway.score.vectors import check_dimensions, pool, written

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings", responses=answers(Embeddings, errors=INFERENCE))
async def create_embeddings(body: EmbeddingWire, request: Request) -> Response:
    """Turn texts into vectors."""

    def item(index: int, vector: Vector) -> Embedding:
        return Embedding(index=index, embedding=vector)

    return await _answer(admit(request, body, "embd"), request, Embeddings, item)


@router.post("/pooling", responses=answers(PooledInputs, errors=INFERENCE))
async def pool_inputs(body: PoolingWire, request: Request) -> Response:
    """Turn texts into vectors, in vLLM's form."""

    def item(index: int, vector: Vector) -> PooledInput:
        return PooledInput(index=index, data=vector)

    return await _answer(admit(request, body, "pool"), request, PooledInputs, item)


async def _answer(
    admitted: Admitted[EmbeddingWire],
    request: Request,
    kind: type[Embeddings] | type[PooledInputs],
    item: Callable[[int, Vector], Embedding | PooledInput],
) -> Response:
    body, language = admitted.body, admitted.gateway.language
    check_dimensions(body.dimensions, language.dimensions)
    prompts: list[Sequence[int]]
    if body.messages is None:
        num_chars = sum(map(len, body.input))
        prompts = await language.work(num_chars, _encode, admitted)
    else:
        prompts = [await _encode_chat(admitted)]
    field = "input" if body.messages is None else "messages"
    told = await while_connected(request.receive, pool(admitted, prompts, field))

    def answer() -> Response:
        data = [item(i, written(vector, body)) for i, vector in enumerate(told.vectors)]
        return list_reply(kind, admitted, told, data)

    return await language.work(len(prompts) * language.config.hidden_size, answer)


def _encode(admitted: Admitted[EmbeddingWire]) -> list[Sequence[int]]:
    """Encode the inputs, and keep the last tokens of each."""
    body, language, is_one = admitted.body, admitted.gateway.language, len(admitted.body.input) == 1
    kept, bounds = _kept(admitted), Bounds(admitted.gateway)
    most = None if kept is None else language.max_listed
    special = body.add_special_tokens is not False

    def read(given: str | list[int], field: str) -> Read:
        if isinstance(given, str):
            tokens = language.encode_prompt(given, field, add_special_tokens=special, most=most)
        else:
            tokens = language.checked(given, field)
        if not tokens:
            raise InvalidInput(field, "has no tokens")
        return Read(tokens[-(kept or 0) :], ())

    fields = ["input"] if is_one else [f"input[{i}]" for i in range(len(body.input))]
    pairs = zip(body.input, fields, strict=True)
    return [bounds.read(partial(read, given, field), field).prompt for given, field in pairs]


async def _encode_chat(admitted: Admitted[EmbeddingWire]) -> "array[int]":
    """Encode the messages, and keep their last tokens."""
    body, gateway, record = admitted.body, admitted.gateway, admitted.record
    language, words, kept = gateway.language, gateway.language.template_words, _kept(admitted)
    prompt = await language.encode_chat(
        await language.work(record.num_bytes, turns_of, body.messages or [], words),
        add_generation_prompt=body.add_generation_prompt,
        template_kwargs=body.chat_template_kwargs or {},
        control_tokens=gateway.settings.control_tokens_in_content,
        most=None if kept is None else language.max_listed,
        size=record.num_bytes,
        continues=body.continue_final_message is True,
    )
    record.ignored = with_template(record.ignored, prompt.ignored, words)
    if not prompt.token_ids:
        raise InvalidInput("messages", "have no tokens")
    return array("I", prompt.token_ids[-(kept or 0) :])


def _kept(admitted: Admitted[EmbeddingWire]) -> int | None:
    asked = admitted.body.truncate_prompt_tokens
    return kept_tokens(asked, admitted.gateway.max_tokens, answer_tokens=0)
