"""``/v1/score``, ``/v1/rerank``, ``/generative_scoring``: one prefill a pair of texts."""

import math
from collections.abc import Iterator
from functools import partial

from fastapi import APIRouter, Request, Response

from moesaic.classification.candidates import Read, odds
from moesaic.classification.relevance import Relevance, relevance_of
from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.scoring import (
    GenerativeScoringWire,
    Pairs,
    RerankWire,
    ScoreWire,
)
from moesaic.services.gateway.fields.truncating import kept_tokens
from moesaic.services.gateway.gateway import Admitted, Gateway, admit
from moesaic.services.gateway.http.openapi import INFERENCE, answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.http.request_record import while_connected
from moesaic.services.gateway.language import PER_MESSAGE_CHARS, Language
from moesaic.services.gateway.replies.scoring import (
    ItemScore,
    ItemScores,
    PairScore,
    PairScores,
    Ranked,
    RankedText,
    Ranking,
)
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.score.reading import (
    Bounds,
    Readout,
    list_reply,
    read_answers,
    read_out,
)

router = APIRouter(route_class=JsonRoute)
Judged = ScoreWire | RerankWire


@router.post("/score", responses=answers(PairScores, errors=INFERENCE))
@router.post("/v1/score", responses=answers(PairScores, errors=INFERENCE))
async def score(body: ScoreWire, request: Request) -> Response:
    """Say how relevant texts are to others, pair by pair."""
    pairs = body.pairs()
    admitted = admit(request, body, "score")
    told = await _judge(admitted, request, pairs)
    scores = [
        PairScore(index=i, score=relevance, label_mass=mass)
        for i, (relevance, mass) in enumerate(_relevances(told))
    ]
    return list_reply(PairScores, admitted, told, scores)


@router.post("/rerank", responses=answers(Ranking, errors=INFERENCE))
@router.post("/v1/rerank", responses=answers(Ranking, errors=INFERENCE))
@router.post("/v2/rerank", responses=answers(Ranking, errors=INFERENCE))
async def rerank(body: RerankWire, request: Request) -> Response:
    """Order documents by how relevant they are to a query."""
    pairs = body.pairs()
    admitted = admit(request, body, "rerank")
    told = await _judge(admitted, request, pairs)
    results = [
        Ranked(index=i, relevance_score=relevance, label_mass=mass)
        for i, (relevance, mass) in enumerate(_relevances(told))
    ]
    # stable: the earlier document first.
    results.sort(key=lambda result: -result.relevance_score)
    results = results[: body.top_n or None]
    if body.return_documents is not False:
        for result in results:
            result.document = RankedText(pairs.documents[result.index])
    return reply(
        Ranking(
            id=admitted.answer_id,
            model=admitted.gateway.model_name,
            results=results,
            usage=told.usage,
            moesaic=told.provenance,
        )
    )


@router.post("/generative_scoring", responses=answers(ItemScores, errors=INFERENCE))
async def score_items(body: GenerativeScoringWire, request: Request) -> Response:
    """Say how likely given tokens come next behind each item."""
    admitted = admit(request, body, "generative-scoring")
    language = admitted.gateway.language
    num_chars = len(body.query) + sum(map(len, body.items))
    reads = await language.work(num_chars, _put_together, admitted.gateway, body)
    families = [[read] for read in reads] if body.item_first else [reads]
    told = await while_connected(request.receive, read_out(admitted, families, "items"))

    def answer() -> Response:
        data = [_item(body, i, found) for i, found in enumerate(_in_order(told))]
        return list_reply(ItemScores, admitted, told, data)

    return await language.work(len(body.items) * len(body.label_token_ids), answer)


async def _judge(admitted: Admitted[Judged], request: Request, pairs: Pairs) -> Readout:
    """Have the relevance of each document judged; those of one query are a family."""
    gateway, instruction = admitted.gateway, admitted.body.instruction
    queries = pairs.queries * (len(pairs.documents) if len(pairs.queries) == 1 else 1)

    def ask() -> tuple[list[list[Read]], list[str]]:
        bounds = Bounds(gateway)
        dialogue, unknown = gateway.language.dialogue_with(admitted.body.chat_template_kwargs or {})
        relevance = Relevance(dialogue, instruction)
        reads = [
            bounds.read(partial(relevance.read, query, document), field)
            for query, document, field in zip(queries, pairs.documents, pairs.fields, strict=True)
        ]
        return ([reads] if len(pairs.queries) == 1 else [[read] for read in reads]), unknown

    num_chars = sum(map(len, queries)) + sum(map(len, pairs.documents))
    num_chars += len(queries) * PER_MESSAGE_CHARS
    families, unknown = await gateway.language.work_waiting(num_chars, ask)
    field, _, _ = pairs.fields[0].partition("[")
    return await read_answers(admitted, request, families, field, unknown)


def _item(body: GenerativeScoringWire, index: int, logprobs: list[float]) -> ItemScore:
    shares, mass = odds(logprobs)
    probs = shares if body.apply_softmax else [min(1.0, math.exp(value)) for value in logprobs]
    return ItemScore(index=index, score=probs[0], probs=probs, label_mass=mass)


def _put_together(gateway: Gateway, body: GenerativeScoringWire) -> list[Read]:
    language, vocab_size = gateway.language, gateway.language.config.vocab_size
    seen: set[int] = set()
    for i, token_id in enumerate(body.label_token_ids):
        if token_id >= vocab_size:
            raise InvalidInput(f"label_token_ids[{i}]", f"must be in 0..{vocab_size - 1}")
        if token_id in seen:
            fix = f"must be unique; {token_id} appears twice"
            raise InvalidInput(f"label_token_ids[{i}]", fix)
        seen.add(token_id)
    kept = kept_tokens(body.truncate_prompt_tokens, gateway.max_tokens, answer_tokens=1)
    most = None if kept is None else language.max_listed
    candidates = tuple((token_id,) for token_id in body.label_token_ids)
    query = _tokens(language, body.query, "query", body.add_special_tokens, most)
    reads, bounds = [], Bounds(gateway)
    for i, given in enumerate(body.items):
        item = _tokens(language, given, f"items[{i}]", False, most)
        prompt = [*item, *query] if body.item_first else [*query, *item]
        prompt = prompt[-(kept or 0) :]
        if not prompt:
            raise InvalidInput(f"items[{i}]", "query and item have no tokens")
        reads.append(bounds.read(partial(Read, prompt, candidates), f"items[{i}]"))
    return reads


def _tokens(
    language: Language, given: str | list[int], field: str, special: bool, most: int | None
) -> list[int]:
    if isinstance(given, str):
        return language.encode_prompt(given, field, add_special_tokens=special, most=most)
    return language.checked(given, field)


def _in_order(told: Readout) -> Iterator[list[float]]:
    return (logprobs for family in told.logprobs for logprobs in family)


def _relevances(told: Readout) -> Iterator[tuple[float, float]]:
    return (relevance_of(logprobs) for logprobs in _in_order(told))
