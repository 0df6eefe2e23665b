"""``/v1/classify``: one prefill a text, or one a text and label; no decoding."""

from functools import partial

from fastapi import APIRouter, Request, Response

from moesaic.classification.candidates import Read
from moesaic.classification.forms import Classification, Form, Label, assemble, normal_form
from moesaic.errors import InvalidInput
from moesaic.services.gateway.fields.bodies import as_list
from moesaic.services.gateway.fields.scoring import ClassifyWire, LabelWire
from moesaic.services.gateway.gateway import Gateway, admit
from moesaic.services.gateway.http.openapi import INFERENCE, answers
from moesaic.services.gateway.http.problems import RouteNotEnabled
from moesaic.services.gateway.language import PER_MESSAGE_CHARS
from moesaic.services.gateway.replies.scoring import Classified, ClassifiedLabel, ClassifiedText
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.score.reading import MAX_READS, Bounds, list_reply, read_answers

router = APIRouter(route_class=JsonRoute)


@router.post("/classify", responses=answers(Classified, errors=INFERENCE))
@router.post("/v1/classify", responses=answers(Classified, errors=INFERENCE))
async def classify(body: ClassifyWire, request: Request) -> Response:
    """Say which of the given labels fits each text best, and how likely each is."""
    admitted = admit(request, body, "classify", _refusal(body))
    language = admitted.gateway.language
    num_chars = _num_chars(body, admitted.record.num_bytes)
    form, families, unknown = await language.work_waiting(num_chars, _ask, admitted.gateway, body)
    told = await read_answers(admitted, request, families, "input", unknown)

    def answer() -> Response:
        texts = enumerate(told.logprobs)
        data = [_text(i, assemble(form, found, body.top_k)) for i, found in texts]
        return list_reply(Classified, admitted, told, data, method=form.method)

    return await language.work(len(families) * len(body.labels or ()), answer)


def _refusal(body: ClassifyWire) -> RouteNotEnabled | None:
    if body.labels is not None:
        return None
    what = (
        "this model has no labels of its own: send them in the field labels, or ask /v1/decisions"
    )
    return RouteNotEnabled(what)


def _ask(gateway: Gateway, body: ClassifyWire) -> tuple[Form, list[list[Read]], list[str]]:
    language, texts = gateway.language, as_list(body.input)
    dialogue, unknown = language.dialogue_with(body.chat_template_kwargs or {})
    labels = [_label(label) for label in body.labels or ()]
    with language.naming("labels"):
        methods = language.classify_methods
        form = normal_form(dialogue, labels, body.instruction, body.method, methods)
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
    return form, families, unknown


def _num_chars(body: ClassifyWire, num_bytes: int) -> int:
    """Characters of all the prompts at most: each has the labels in it, and each label is tried behind a short one."""
    num_labels = len(body.labels or ())
    num_reads = len(as_list(body.input)) * (num_labels if body.method == "multi" else 1)
    return max(1, num_reads) * num_bytes + num_labels * PER_MESSAGE_CHARS


def _label(label: str | LabelWire) -> Label:
    return Label(label) if isinstance(label, str) else Label(label.label, label.description or "")


def _text(index: int, answer: Classification) -> ClassifiedText:
    ranked = [ClassifiedLabel(*scored) for scored in answer.ranked]
    return ClassifiedText(
        index, answer.label, answer.probs, len(answer.probs), ranked, answer.label_mass
    )
