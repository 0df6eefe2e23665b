"""Answer of ``/v1/decisions``.

``label_mass`` is the model's probability for all the answers together that it may give; little means that it wanted to
say something else. All answers that are read off a prompt have it.
"""

import msgspec

from moesaic.services.gateway.replies.accounts import Provenance, ResponseUsage


class PredicateAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="predicate"):
    """Probability that a statement is true."""

    name: str | None
    probability: float
    label_mass: float


class ValueProbability(msgspec.Struct):
    """One value's share."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="choice"):
    """The likeliest value; ``confidence`` is its share."""

    name: str | None
    choice: str | bool
    probabilities: list[ValueProbability]
    confidence: float
    label_mass: float


class LevelProbability(msgspec.Struct):
    """One level's share; ``value`` counts from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="score"):
    """The mean level; ``confidence`` is the share of the likeliest."""

    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float
    label_mass: float


class Decisions(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/decisions``, in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: ResponseUsage
    moesaic: Provenance
