"""``/v1/decisions``: questions about one input, each a prefill behind the input they share."""

from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from moesaic.classification.candidates import Read
from moesaic.classification.decisions import Question, evidence_of, mean_level, put
from moesaic.services.gateway.fields.decisions import (
    AnyQuestionWire,
    ChoiceWire,
    DecisionsWire,
    GradeWire,
    asked_of,
)
from moesaic.services.gateway.gateway import Gateway, admit
from moesaic.services.gateway.http.openapi import INFERENCE, answers
from moesaic.services.gateway.http.reply import reply
from moesaic.services.gateway.language import PER_MESSAGE_CHARS
from moesaic.services.gateway.replies.accounts import response_usage
from moesaic.services.gateway.replies.decisions import (
    ChoiceAnswer,
    Decisions,
    LevelProbability,
    PredicateAnswer,
    ScoreAnswer,
    ValueProbability,
)
from moesaic.services.gateway.routes.json_route import JsonRoute
from moesaic.services.gateway.score.reading import Bounds, read_answers

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/decisions", responses=answers(Decisions, errors=INFERENCE))
async def decide(body: DecisionsWire, request: Request) -> Response:
    """Answer questions about one input: is it so, which one, how much."""
    admitted = admit(request, body, "decision")
    gateway = admitted.gateway
    questions, reads, unknown = await gateway.language.work_waiting(
        _num_chars(body, admitted.record.num_bytes), _ask, gateway, body
    )
    told = await read_answers(admitted, request, [reads], "input", unknown)

    def answer() -> Response:
        asked = zip(body.questions, questions, told.logprobs[0], strict=True)
        decisions = Decisions(
            model=gateway.model_name,
            answers=[_answer(*one) for one in asked],
            usage=response_usage(told.usage),
            moesaic=told.provenance,
        )
        return reply(decisions)

    return await gateway.language.work(len(questions) * PER_MESSAGE_CHARS, answer)


def _ask(gateway: Gateway, body: DecisionsWire) -> tuple[list[Question], list[Read], list[str]]:
    language, evidence = gateway.language, evidence_of(body.turns())
    dialogue, unknown = language.dialogue_with(body.chat_template_kwargs or {})
    questions, reads, bounds = [], [], Bounds(gateway)
    for i, wire in enumerate(body.questions):
        field = f"questions[{i}]"
        asked = asked_of(wire, field)
        with language.naming(field):
            questions.append(put(dialogue, asked, field, language.classify_methods))
        reads.append(bounds.read(partial(questions[-1].read, evidence), "input", field))
    return questions, reads, unknown


def _answer(
    wire: AnyQuestionWire, question: Question, logprobs: Sequence[float]
) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    shares, mass = question.odds(logprobs)
    best = shares.index(max(shares))
    if isinstance(wire, ChoiceWire):
        values = [option.value for option in wire.choices]
        probabilities = [ValueProbability(*pair) for pair in zip(values, shares, strict=True)]
        return ChoiceAnswer(
            name=wire.name,
            choice=values[best],
            probabilities=probabilities,
            confidence=shares[best],
            label_mass=mass,
        )
    if isinstance(wire, GradeWire):
        levels = [
            LevelProbability(i, level.label, share)
            for i, (level, share) in enumerate(zip(wire.levels, shares, strict=True))
        ]
        return ScoreAnswer(
            name=wire.name,
            score=mean_level(shares),
            probabilities=levels,
            confidence=shares[best],
            label_mass=mass,
        )
    return PredicateAnswer(name=wire.name, probability=shares[0], label_mass=mass)


def _num_chars(body: DecisionsWire, num_bytes: int) -> int:
    """Characters of all the prompts at most, with what telling the options apart costs."""
    num_options = sum(
        len(wire.choices if isinstance(wire, ChoiceWire) else wire.levels)
        for wire in body.questions
        if isinstance(wire, ChoiceWire | GradeWire)
    )
    return len(body.questions) * (num_bytes + PER_MESSAGE_CHARS) + num_options * PER_MESSAGE_CHARS
