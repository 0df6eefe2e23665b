"""``/v1/score``, ``/v1/rerank``, ``/generative_scoring``: one prefill a pair of texts."""

import math
import time
from collections.abc import Iterator
from functools import partial

from fastapi import APIRouter, Request, Response

from moesaic.classification.candidates import Read, odds
from moesaic.classification.relevance import Relevance, relevance_of
from moesaic.errors import InvalidInput
from services.gateway.deliver import answer_id
from services.gateway.disconnect import while_connected
from services.gateway.fields_reading import GenerativeScoringWire, Pairs, RerankWire, ScoreWire
from services.gateway.gateway import Gateway, exchange_of, gateway_of
from services.gateway.language import PER_MESSAGE_CHARS
from services.gateway.openapi import INFERENCE, answers
from services.gateway.reading import Bounds, Readout, read_out
from services.gateway.replies import reply
from services.gateway.replies_reading import (
    ItemScore,
    ItemScores,
    PairScore,
    PairScores,
    Ranked,
    RankedText,
    Ranking,
)

router = APIRouter()


@router.post("/score", responses=answers(PairScores, errors=INFERENCE))
@router.post("/v1/score", responses=answers(PairScores, errors=INFERENCE))
async def score(body: ScoreWire, request: Request) -> Response:
    """Say how relevant texts are to others, pair by pair."""
    score_id, created = answer_id("score"), int(time.time())
    told = await _judge(body, request, score_id, body.pairs())
    scores = [
        PairScore(index=i, score=relevance, label_mass=mass)
        for i, (relevance, mass) in enumerate(_relevances(told))
    ]
    model = gateway_of(request).model_name
    return reply(
        PairScores(
            id=score_id,
            created=created,
            model=model,
            data=scores,
            usage=told.usage,
            moesaic=told.provenance,
        )
    )


@router.post("/rerank", responses=answers(Ranking, errors=INFERENCE))
@router.post("/v1/rerank", responses=answers(Ranking, errors=INFERENCE))
@router.post("/v2/rerank", responses=answers(Ranking, errors=INFERENCE))
async def rerank(body: RerankWire, request: Request) -> Response:
    """Order documents by how relevant they are to a query."""
    ranking_id, pairs = answer_id("rerank"), body.pairs()
    told = await _judge(body, request, ranking_id, pairs)
    results = [
        Ranked(index=i, relevance_score=relevance, label_mass=mass)
        for i, (relevance, mass) in enumerate(_relevances(told))
    ]
    results.sort(key=lambda result: -result.relevance_score)  # stable: the earlier document first
    results = results[: body.top_n or None]
    if body.return_documents is not False:
        for result in results:
            result.document = RankedText(pairs.documents[result.index])
    model = gateway_of(request).model_name
    return reply(
        Ranking(
            id=ranking_id,
            model=model,
            results=results,
            usage=told.usage,
            moesaic=told.provenance,
        )
    )


@router.post("/generative_scoring", responses=answers(ItemScores, errors=INFERENCE))
async def score_items(body: GenerativeScoringWire, request: Request) -> Response:
    """Say how likely given tokens come next behind each item."""
    gateway, exchange = gateway_of(request), exchange_of(request)
    gateway.check(exchange, body)
    gateway.admit(exchange)
    deadline = gateway.deadline(request, body)
    num_chars = len(body.query) + sum(map(len, body.items))
    reads = await gateway.language.work(num_chars, _put_together, gateway, body)
    families = [[read] for read in reads] if body.item_first else [reads]
    scoring_id, created = answer_id("generative-scoring"), int(time.time())
    reading = read_out(gateway, exchange, body, scoring_id, families, deadline, "items")
    told = await while_connected(request.receive, reading)
    data = []
    for i, logprobs in enumerate(_in_order(told)):
        shares, mass = odds(logprobs)
        probs = shares if body.apply_softmax else [min(1.0, math.exp(value)) for value in logprobs]
        data.append(ItemScore(index=i, score=probs[0], probs=probs, label_mass=mass))
    return reply(
        ItemScores(
            id=scoring_id,
            created=created,
            model=gateway.model_name,
            data=data,
            usage=told.usage,
            moesaic=told.provenance,
        )
    )


async def _judge(
    body: ScoreWire | RerankWire, request: Request, scoring_id: str, pairs: Pairs
) -> Readout:
    """Have the relevance of each document judged; those of one query are a family."""
    gateway, exchange = gateway_of(request), exchange_of(request)
    gateway.check(exchange, body)
    gateway.admit(exchange)
    deadline = gateway.deadline(request, body)
    queries = pairs.queries * (len(pairs.documents) if len(pairs.queries) == 1 else 1)

    def ask() -> list[list[Read]]:
        bounds = Bounds(gateway)
        relevance = Relevance(gateway.language.dialogue, body.instruction)
        reads = [
            bounds.read(partial(relevance.read, query, document), field)
            for query, document, field in zip(queries, pairs.documents, pairs.fields, strict=True)
        ]
        return [reads] if len(pairs.queries) == 1 else [[read] for read in reads]

    num_chars = sum(map(len, queries)) + sum(map(len, pairs.documents))
    num_chars += len(queries) * PER_MESSAGE_CHARS
    families = await gateway.language.work(num_chars, ask)
    field, _, _ = pairs.fields[0].partition("[")
    reading = read_out(gateway, exchange, body, scoring_id, families, deadline, field)
    told = await while_connected(request.receive, reading)
    told.provenance.prompt_version = gateway.language.dialogue.wording.version
    return told


def _put_together(gateway: Gateway, body: GenerativeScoringWire) -> list[Read]:
    vocab_size = gateway.language.config.vocab_size
    seen: set[int] = set()
    for i, token_id in enumerate(body.label_token_ids):
        if token_id >= vocab_size:
            raise InvalidInput(f"label_token_ids[{i}]", f"must be in 0..{vocab_size - 1}")
        if token_id in seen:
            fix = f"must be unique, {token_id} is there already"
            raise InvalidInput(f"label_token_ids[{i}]", fix)
        seen.add(token_id)
    candidates = tuple((token_id,) for token_id in body.label_token_ids)
    query = _tokens(gateway, body.query, "query", special=body.add_special_tokens)
    reads, bounds = [], Bounds(gateway)
    for i, given in enumerate(body.items):
        item = _tokens(gateway, given, f"items[{i}]", special=False)
        prompt = [*item, *query] if body.item_first else [*query, *item]
        if not prompt:
            raise InvalidInput(f"items[{i}]", "query and item have no tokens")
        reads.append(bounds.read(partial(Read, prompt, candidates), f"items[{i}]"))
    return reads


def _tokens(gateway: Gateway, given: str | list[int], field: str, *, special: bool) -> list[int]:
    language = gateway.language
    if isinstance(given, str):
        return language.encode_prompt(given, field, add_special_tokens=special)
    if not all(0 <= token_id < language.config.vocab_size for token_id in given):
        raise InvalidInput(field, f"token ids must be in 0..{language.config.vocab_size - 1}")
    return given


def _in_order(told: Readout) -> Iterator[list[float]]:
    return (logprobs for family in told.logprobs for logprobs in family)


def _relevances(told: Readout) -> Iterator[tuple[float, float]]:
    return (relevance_of(logprobs) for logprobs in _in_order(told))
