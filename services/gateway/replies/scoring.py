"""Answers of ``/v1/classify``, ``/v1/score``, ``/v1/rerank`` and ``/generative_scoring``."""

import msgspec

from moesaic.services.gateway.replies.accounts import ListReply, Provenance, Usage


class ClassifiedLabel(msgspec.Struct, omit_defaults=True):
    """One label with its log-probability and its share among the labels.

    With ``multi``, each label is a separate question. Then these are the values of yes, with the probability of yes
    and no together as ``label_mass``.
    """

    label: str
    logprob: float
    prob: float
    label_mass: float | None = None


class ClassifiedText(msgspec.Struct):
    """The answer for one text."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    labels: list[ClassifiedLabel]
    label_mass: float


class Classified(ListReply, kw_only=True):
    """Answer of ``/v1/classify``."""

    data: list[ClassifiedText]
    method: str


class PairScore(msgspec.Struct, kw_only=True):
    """Relevance of the second text of a pair to the first, 0 to 1."""

    index: int
    object: str = "score"
    score: float
    label_mass: float


class PairScores(ListReply, kw_only=True):
    """Answer of ``/v1/score``."""

    data: list[PairScore]


class RankedText(msgspec.Struct):
    """A document, given back."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """Relevance of one document, 0 to 1; ``index`` is its place in the request."""

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


class ItemScores(ListReply, kw_only=True):
    """Answer of ``/generative_scoring``."""

    data: list[ItemScore]
