"""``/v1/classify``: one prefill a text, no decoding."""

import time
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from moesaic.classification.forms import Classification, Form, Label, assemble, plan
from moesaic.errors import InvalidInput
from moesaic.v1.attention_pb2 import Candidate, Finished, Scores, Scoring
from services.gateway.deliver import answer_id
from services.gateway.disconnect import while_connected
from services.gateway.exchange import Exchange
from services.gateway.execution import Deadline, Run
from services.gateway.fields import ClassifyWire, LabelWire, as_list
from services.gateway.gateway import Gateway, exchange_of, gateway_of, terms_of
from services.gateway.language import PER_MESSAGE_CHARS
from services.gateway.openapi import INFERENCE, answers
from services.gateway.problems import RouteNotEnabled
from services.gateway.replies import (
    Classified,
    ClassifiedLabel,
    ClassifiedText,
    EpochTokens,
    Provenance,
    reply,
    usage_of,
)

router = APIRouter()


@router.post("/classify", responses=answers(Classified, errors=INFERENCE))
@router.post("/v1/classify", responses=answers(Classified, errors=INFERENCE))
async def classify(body: ClassifyWire, request: Request) -> Response:
    """Say which of the given labels fits each text best, and how likely each is."""
    gateway, exchange = gateway_of(request), exchange_of(request)
    gateway.check(exchange, body)
    if body.labels is None:
        raise RouteNotEnabled("this model has no labels of its own: send them in the field labels")
    gateway.admit(exchange)
    deadline = gateway.deadline(request, body)
    labels = [_label(label) for label in body.labels]
    form, prompts = await gateway.language.work(
        _num_chars(body, labels), _ask, gateway, body, labels
    )
    work, terms = _scoring(form), terms_of(body, exchange.tenant)
    runs = [Run(prompt, work, terms) for prompt in prompts]
    exchange.prompt_tokens = sum(map(len, prompts))
    exchange.take_tokens(0)
    answer = _classify(gateway, exchange, body, form, runs, deadline)
    return reply(await while_connected(request.receive, answer))


async def _classify(
    gateway: Gateway,
    exchange: Exchange,
    body: ClassifyWire,
    form: Form,
    runs: Sequence[Run],
    deadline: Deadline,
) -> Classified:
    classify_id, created = answer_id("classify"), int(time.time())
    scores: dict[int, Classification] = {}
    finished: list[Finished] = []
    async with gateway.execution(classify_id, runs, deadline) as execution:
        try:
            while events := await execution.next_events():
                for i, event in events:
                    if isinstance(event, Scores):
                        scores[i] = assemble(form, event.logprobs, body.top_k)
                    elif isinstance(event, Finished):
                        finished.append(event)
                exchange.note_tokens(0)
        finally:
            exchange.attempts = sum(run.attempt for run in runs)
    provenance = _provenance(body, runs, finished)
    exchange.cached_tokens = provenance.cached_tokens
    return Classified(
        id=classify_id,
        created=created,
        model=gateway.model_name,
        data=[_text(i, scores[i]) for i in range(len(runs))],
        usage=usage_of(exchange.prompt_tokens, 0, provenance.cached_tokens),
        method=form.method,
        moesaic=provenance,
    )


def _ask(gateway: Gateway, body: ClassifyWire, labels: list[Label]) -> tuple[Form, list[list[int]]]:
    language = gateway.language
    form = plan(language.dialogue, labels, body.instruction, body.method, language.classify_methods)
    room = gateway.language.max_tokens - max(map(len, form.candidates))
    prompts = []
    for i, text in enumerate(as_list(body.input)):
        prompts.append(form.prompt(text))
        if len(prompts[-1]) > room:
            field = "input" if isinstance(body.input, str) else f"input[{i}]"
            fix = (
                f"this model's context is {gateway.language.max_tokens} tokens; the text with its "
                f"labels takes {len(prompts[-1])}, at most {room} leave room for the answer"
            )
            raise InvalidInput(field, fix, code="context_length_exceeded")
    return form, prompts


def _num_chars(body: ClassifyWire, labels: Sequence[Label]) -> int:
    """Characters of all the prompts: each has the labels in it, and each label is tried behind a short one."""
    texts = as_list(body.input)
    head = sum(len(label.name) + len(label.description) for label in labels)
    head += len(body.instruction or "")
    return sum(map(len, texts)) + len(texts) * head + len(labels) * PER_MESSAGE_CHARS


def _label(label: str | LabelWire) -> Label:
    return Label(label) if isinstance(label, str) else Label(label.label, label.description or "")


def _scoring(form: Form) -> Scoring:
    return Scoring(candidates=[Candidate(token_ids=candidate) for candidate in form.candidates])


def _text(index: int, answer: Classification) -> ClassifiedText:
    ranked = [ClassifiedLabel(*scored) for scored in answer.ranked]
    return ClassifiedText(
        index, answer.label, answer.probs, len(answer.probs), ranked, answer.label_mass
    )


def _provenance(
    body: ClassifyWire, runs: Sequence[Run], finished: Sequence[Finished]
) -> Provenance:
    tokens: dict[int, int] = {}
    for done in finished:
        for span in done.epochs:
            tokens[span.epoch] = tokens.get(span.epoch, 0) + span.tokens
    workers = sorted({worker_id for run in runs for worker_id in run.worker_ids})
    return Provenance(
        epochs=[EpochTokens(epoch, count) for epoch, count in sorted(tokens.items())],
        cached_tokens=sum(done.cached_tokens for done in finished),
        workers=workers if body.moesaic.provenance else None,
    )
