"""The spellings of the rotary embedding in ``config.json``: new files have ``rope_parameters``, older ones
``rope_theta`` beside a ``rope_scaling`` that may be null."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from moesaic.models.configuration.architecture import Llama3, Rope, Yarn
from moesaic.models.configuration.fields import Fields

_GROUPS = ("rope_parameters", "rope_scaling")
# The values that transformers' functions take for fields that a group leaves out; null is the same, except for two.
_DEFAULTS: dict[str, Any] = {
    "truncate": True,
    "rope_type": "default",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.0,  # 0 is how a file says "none"
    "mscale_all_dim": 0.0,
}
_NULL_COUNTS = ("factor", "truncate")
_SCALED = ("factor", "mscale_all_dim")  # the latter only with latent attention
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": _SCALED,
    "dynamic": _SCALED,
    "llama3": (
        *_SCALED,
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": (
        *_SCALED,
        "mscale",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "original_max_position_embeddings",
    ),
}
"""The fields that are used with each type, beside ``rope_theta`` and ``partial_rotary_factor``."""
ROPE_FIELDS = {
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "short_factor",
    "long_factor",
    "mrope_section",
}.union(*ROPE_TYPES.values())
"""All fields that transformers knows in a group, of any type."""


def read_rope(fields: Fields, *, latent: bool) -> Rope:
    """Read the rotary embedding of a model, with ``latent`` attention or without.

    Raises:
        CheckpointError: a field is invalid, not supported, unknown, or contradicts another one.
    """
    # transformers skips empty ones; those that the file leaves out may have a default.
    given = [name for name in _GROUPS if fields.gives(name) and fields.group(name)]
    ropes = [_read_group(fields, name, latent=latent) for name in given or _GROUPS[:1]]
    if any(rope != ropes[0] for rope in ropes):
        raise fields.contradiction(given[0], fields, given[1])
    return ropes[0]


def _read_group(fields: Fields, name: str, *, latent: bool) -> Rope:
    values = fields.group(name)
    for key, value in values.items():
        if isinstance(value, dict):
            raise fields.under(name, values).error(
                key, "layers that rotate differently are not supported"
            )
    inner = _inner(fields, name)
    theta = _here_or_there(inner, fields, "rope_theta").number("rope_theta")
    rope_type = inner.choice("rope_type", tuple(ROPE_TYPES))
    rope = _READERS[rope_type](inner, fields, theta)
    all_dim = inner.number("mscale_all_dim", zero=True)
    if latent and all_dim and rope_type != "default":
        rope = replace(rope, softmax_scale=_magnitude(inner.number("factor"), all_dim) ** 2)
    # Fields of other types change nothing in transformers either.
    inner.refuse_unread(ROPE_FIELDS, "is not a known field of a rope group: leave it out")
    return rope


def _read_default(inner: Fields, fields: Fields, theta: float) -> Rope:
    return Rope(theta, None)


def _read_linear(inner: Fields, fields: Fields, theta: float) -> Rope:
    return Rope(theta, None, slowdown=inner.number("factor"))


def _read_dynamic(inner: Fields, fields: Fields, theta: float) -> Rope:
    # It has no effect up to max_position_embeddings, and no position is beyond that.
    inner.number("factor")
    return Rope(theta, None)


def rotated_width(fields: Fields, head_dim: int, *, partly: bool) -> int | None:
    """Read how many numbers of each head are rotated; None: all, as without ``partly`` it must be.

    Raises:
        CheckpointError: it is invalid, not supported, or said twice and differently.
    """
    # Older files have the latter.
    name, width = "partial_rotary_factor", "rotary_dim"
    places = [place for place in map(partial(_inner, fields), _GROUPS) if place.gives(name)]
    if fields.gives(name) or (fields.has(name) and not places):
        places.append(fields)
    widths = [(int(head_dim * place.number(name)), place, name) for place in places]
    if fields.has(width):
        widths.append((fields.size(width), fields, width))
    for found, place, said in widths:
        if found > head_dim:
            raise place.error(said, f"expected no more than a head, {head_dim}, got {found}")
        if not found:
            raise place.error(said, f"leaves nothing to rotate of a head of {head_dim}")
        if found < head_dim and not partly:
            raise place.error(said, "heads that are rotated in part are not supported")
        if found != widths[0][0]:
            raise widths[0][1].contradiction(widths[0][2], place, said)
    return widths[0][0] if widths and widths[0][0] < head_dim else None


def _inner(fields: Fields, name: str) -> Fields:
    """Return the fields of one of the groups."""
    values = fields.group(name).items()
    known = {k: v for k, v in values if v is not None or k in _NULL_COUNTS}
    return fields.under(name, known).filled(_DEFAULTS, {"rope_type": "type"})


def _read_llama3(inner: Fields, fields: Fields, theta: float) -> Rope:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise inner.error("high_freq_factor", f"expected more than low_freq_factor, {low}")
    positions = _original_positions(inner, fields)
    return Rope(theta, None, llama3=Llama3(inner.number("factor"), positions, low, high))


def _original_positions(inner: Fields, fields: Fields) -> int:
    name = "original_max_position_embeddings"
    place = _here_or_there(inner, fields, name)
    return place.size(name if place.gives(name) else "max_position_embeddings")


def _read_yarn(inner: Fields, fields: Fields, theta: float) -> Rope:
    if theta <= 1:
        raise _here_or_there(inner, fields, "rope_theta").error(
            "rope_theta", f"expected more than 1 with yarn, got {theta}"
        )
    factor = inner.number("factor")
    mscale = inner.number("mscale", zero=True)
    all_dim = inner.number("mscale_all_dim", zero=True)
    both = mscale and all_dim
    inferred = (
        _magnitude(factor, mscale) / _magnitude(factor, all_dim) if both else _magnitude(factor, 1)
    )
    given = inner.gives("attention_factor")
    yarn = Yarn(
        factor=factor,
        original_max_positions=_original_positions(inner, fields),
        beta_fast=inner.number("beta_fast"),
        beta_slow=inner.number("beta_slow"),
        truncate=inner.flag("truncate"),
        rotation_scale=inner.number("attention_factor") if given else inferred,
    )
    return Rope(theta, yarn)


def _magnitude(factor: float, mscale: float) -> float:
    """Return the factor by which YaRN scales attention in a context that is ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_READERS: dict[str, Callable[[Fields, Fields, float], Rope]] = {
    "default": _read_default,
    "yarn": _read_yarn,
    "llama3": _read_llama3,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
}


def _here_or_there(inner: Fields, fields: Fields, name: str) -> Fields:
    """Choose the one of the two that has ``name``; ``fields`` has its default."""
    if inner.gives(name) and fields.gives(name) and inner.number(name) != fields.number(name):
        raise inner.contradiction(name, fields, name)
    return inner if inner.gives(name) else fields
