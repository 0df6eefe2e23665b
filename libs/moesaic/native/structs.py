"""The structs of ``calls.h`` that Python fills: a field is set by its name in C."""

from collections.abc import Callable
from ctypes import Structure
from typing import TypeVar

from moesaic.native import header

S = TypeVar("S", bound=type[Structure])

STRUCTS: dict[str, type[Structure]] = {}
"""The classes below, by the name of the struct."""


def _struct(name: str) -> Callable[[S], S]:
    def with_fields(cls: S) -> S:
        fields = header.structs()[name]
        cls._fields_ = [(field.name, field.ctype(STRUCTS)) for field in fields]
        STRUCTS[name] = cls
        return cls

    return with_fields


@_struct("matrix")
class MatrixArgs(Structure):
    """A packed matrix."""


@_struct("expert")
class ExpertArgs(Structure):
    """The two matrices of an expert."""


@_struct("batch")
class BatchArgs(Structure):
    """The sequences of a step."""


@_struct("shape")
class ShapeArgs(Structure):
    """The place of heads in queries and cache."""


@_struct("layer")
class AttentionLayerArgs(Structure):
    """The weights of one layer's grouped-query attention, between two norms."""


@_struct("promises")
class PromisesArgs(Structure):
    """Promises to the rows of a batch."""


@_struct("substitution")
class SubstitutionArgs(Structure):
    """The way in which a layer's choices are degraded."""


@_struct("step")
class AttentionStepArgs(Structure):
    """The rows of a step, as attention sees them."""


@_struct("gating")
class GatingArgs(Structure):
    """The way in which a gate chooses."""


@_struct("moe")
class RoutedExpertsArgs(Structure):
    """The gate and the experts of one layer."""


@_struct("whole_layer")
class WholeLayerArgs(Structure):
    """One layer: attention and routed experts."""


@_struct("decoder")
class DecoderArgs(Structure):
    """A decoder: its layers, with experts or without."""


@_struct("whole_step")
class WholeStepArgs(Structure):
    """The rows of a step, in all layers and in the last."""


@_struct("answerable")
class AnswerableArgs(Structure):
    """One layer of one epoch that can be answered without Python."""


@_struct("answer_tally")
class AnswerTally(Structure):
    """Counts of answers since the last look."""


@_struct("ask")
class AskArgs(Structure):
    """One layer of one route."""


@_struct("asked")
class AskedArgs(Structure):
    """One batch that is sent to expert workers."""


@_struct("part")
class PartArgs(Structure):
    """One part of a step whose experts are in other processes."""


@_struct("apart")
class ApartArgs(Structure):
    """All layers of one route, and the exchanges of one step."""


@_struct("edge_state")
class EdgeStateArgs(Structure):
    """A simulated fleet of edge servers."""
