"""``/v1/classify``: one prefill a text, or one a text and label; no decoding."""

import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from moesaic.classification.candidates import Read
from moesaic.classification.forms import Classification, Form, Label, assemble, plan
from moesaic.errors import InvalidInput
from services.gateway.deliver import answer_id
from services.gateway.disconnect import while_connected
from services.gateway.fields import ClassifyWire, LabelWire, as_list
from services.gateway.gateway import Gateway, exchange_of, gateway_of
from services.gateway.language import PER_MESSAGE_CHARS
from services.gateway.openapi import INFERENCE, answers
from services.gateway.problems import RouteNotEnabled
from services.gateway.reading import MAX_READS, Bounds, read_out
from services.gateway.replies import Classified, ClassifiedLabel, ClassifiedText, reply

router = APIRouter()


@router.post("/classify", responses=answers(Classified, errors=INFERENCE))
@router.post("/v1/classify", responses=answers(Classified, errors=INFERENCE))
async def classify(body: ClassifyWire, request: Request) -> Response:
    """Say which of the given labels fits each text best, and how likely each is."""
    gateway, exchange = gateway_of(request), exchange_of(request)
    gateway.check(exchange, body)
    if body.labels is None:
        what = "this model has no labels of its own: send them in the field labels, or ask /v1/decisions"
        raise RouteNotEnabled(what)
    gateway.admit(exchange)
    deadline = gateway.deadline(request, body)
    labels = [_label(label) for label in body.labels]
    form, families = await gateway.language.work(
        _num_chars(body, labels), _ask, gateway, body, labels
    )
    classify_id, created = answer_id("classify"), int(time.time())
    reading = read_out(gateway, exchange, body, classify_id, families, deadline, "input")
    told = await while_connected(request.receive, reading)
    told.provenance.prompt_version = gateway.language.dialogue.wording.version
    answer = Classified(
        id=classify_id,
        created=created,
        model=gateway.model_name,
        data=[_text(i, assemble(form, told.logprobs[i], body.top_k)) for i in range(len(families))],
        usage=told.usage,
        method=form.method,
        moesaic=told.provenance,
    )
    return reply(answer)


def _ask(
    gateway: Gateway, body: ClassifyWire, labels: list[Label]
) -> tuple[Form, list[list[Read]]]:
    language, texts = gateway.language, as_list(body.input)
    with language.naming("labels"):
        methods = language.classify_methods
        form = plan(language.dialogue, labels, body.instruction, body.method, methods)
    if form.method == "multi" and len(texts) * len(labels) > MAX_READS:
        fix = (
            f"{len(labels)} labels of {len(texts)} texts are {len(texts) * len(labels)} questions; "
            f"a request may have {MAX_READS} with method multi: send fewer texts at once"
        )
        raise InvalidInput("input", fix)
    families, bounds = [], Bounds(gateway)
    for i, text in enumerate(texts):
        field = "input" if isinstance(body.input, str) else f"input[{i}]"
        reads = form.reads(text)
        families.append([bounds.read(partial(next, reads), field) for _ in range(form.num_reads)])
    return form, families


def _num_chars(body: ClassifyWire, labels: Sequence[Label]) -> int:
    """Characters of all the prompts: each has the labels in it, and each label is tried behind a short one."""
    texts = as_list(body.input)
    head = sum(len(label.name) + len(label.description) for label in labels)
    head += len(body.instruction or "")
    reads_per_text = len(labels) if body.method == "multi" else 1
    asked = sum(map(len, texts)) + len(texts) * head
    return reads_per_text * asked + len(labels) * PER_MESSAGE_CHARS


def _label(label: str | LabelWire) -> Label:
    return Label(label) if isinstance(label, str) else Label(label.label, label.description or "")


def _text(index: int, answer: Classification) -> ClassifiedText:
    ranked = [ClassifiedLabel(*scored) for scored in answer.ranked]
    return ClassifiedText(
        index, answer.label, answer.probs, len(answer.probs), ranked, answer.label_mass
    )
