"""What callers get from the routes that ask several questions at once. ``label_mass`` says of each answer how much of
the model's probability was on the answers it may give: little means that it wanted to say something else."""

import msgspec

from services.gateway.replies import Provenance, Usage


class PredicateAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="predicate"):
    """How likely a statement is true."""

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


class InputDetails(msgspec.Struct):
    """Input tokens that need not be computed, and those kept for later, which nobody pays for here."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Output tokens that were not given."""

    reasoning_tokens: int = 0


class DecisionUsage(msgspec.Struct):
    """Tokens that the questions took; none are generated."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Decisions(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/decisions``, in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: DecisionUsage
    moesaic: Provenance


class PairScore(msgspec.Struct, kw_only=True):
    """How relevant the second text of a pair is to the first, 0 to 1."""

    index: int
    object: str = "score"
    score: float
    label_mass: float


class PairScores(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/score``."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: Usage
    moesaic: Provenance


class RankedText(msgspec.Struct):
    """A document, given back."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """How relevant one document is, 0 to 1; ``index`` is its place in the request."""

    index: int
    document: RankedText | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float
    label_mass: float


class Ranking(msgspec.Struct, kw_only=True):
    """Answer of ``/v1/rerank``, the most relevant document first."""

    id: str
    model: str
    results: list[Ranked]
    usage: Usage
    moesaic: Provenance


class ItemScore(msgspec.Struct, kw_only=True):
    """One item: the probability of the first label token, and of all of them in the order of the request."""

    index: int
    object: str = "score"
    score: float
    probs: list[float]
    label_mass: float


class ItemScores(msgspec.Struct, kw_only=True):
    """Answer of ``/generative_scoring``."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ItemScore]
    usage: Usage
    moesaic: Provenance
