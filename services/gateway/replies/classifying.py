"""Answer of ``/v1/classify``."""

import msgspec

from moesaic.services.gateway.replies.accounts import ListReply


class ClassifiedLabel(msgspec.Struct, omit_defaults=True):
    """One label with its log-probability and its share among the labels; where each label is a question of its own
    (``multi``), those of yes, and the probability of yes and no together."""

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
