"""The spellings of the rotary embedding in ``config.json``: new files have ``rope_parameters``, older ones
``rope_theta`` beside a ``rope_scaling`` that may be null."""

import math
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


def read_rope(fields: Fields, *, latent: bool) -> Rope:
    """Read the rotary embedding of a model, ``latent`` attention or not.

    Raises:
        CheckpointError: a field is invalid, not supported, or contradicts another one.
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
    match inner.choice("rope_type", ("default", "yarn", "llama3", "linear", "dynamic")):
        case "yarn":
            return Rope(theta, _read_yarn(inner, fields, latent=latent))
        case "llama3":
            return Rope(theta, None, llama3=_read_llama3(inner, fields))
        case "linear":
            return Rope(theta, None, slowdown=inner.number("factor"))
        case (
            "dynamic"
        ):  # it changes nothing up to max_position_embeddings, which is as far as any row goes
            inner.number("factor")
    return Rope(theta, None)


def rotated_share(fields: Fields, *, partly: bool) -> float:
    """Read the share of each head that is rotated; without ``partly`` all of it has to be.

    Raises:
        CheckpointError: it is invalid, not supported, or said twice and differently.
    """
    name = "partial_rotary_factor"
    inners = [_inner(fields, group) for group in _GROUPS]
    given = [place for place in (*inners, fields) if place.gives(name)]
    shares = {place.number(name) for place in given} or {
        fields.number(name) if fields.has(name) else 1.0
    }
    if len(shares) > 1:
        raise given[0].contradiction(name, given[-1], name)
    [share] = shares
    if share > 1 or (share != 1 and not partly):
        raise given[0].error(
            name,
            f"expected at most 1, got {share}"
            if share > 1
            else "heads that are rotated in part are not supported",
        )
    return share


def _inner(fields: Fields, name: str) -> Fields:
    """Return the fields of one of the groups."""
    values = fields.group(name).items()
    known = {k: v for k, v in values if v is not None or k in _NULL_COUNTS}
    return fields.under(name, known).filled(_DEFAULTS, {"rope_type": "type"})


def _read_llama3(inner: Fields, fields: Fields) -> Llama3:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if low >= high:
        raise inner.error("high_freq_factor", f"expected more than low_freq_factor, {low}")
    return Llama3(inner.number("factor"), _original_positions(inner, fields), low, high)


def _original_positions(inner: Fields, fields: Fields) -> int:
    name = "original_max_position_embeddings"
    place = _here_or_there(inner, fields, name)
    return place.size(name if place.gives(name) else "max_position_embeddings")


def _read_yarn(inner: Fields, fields: Fields, *, latent: bool) -> Yarn:
    factor = inner.number("factor")
    mscale = inner.number("mscale", zero=True)
    all_dim = inner.number("mscale_all_dim", zero=True)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    inferred = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    given = inner.gives("attention_factor")
    return Yarn(
        factor=factor,
        original_max_positions=_original_positions(inner, fields),
        beta_fast=inner.number("beta_fast"),
        beta_slow=inner.number("beta_slow"),
        truncate=inner.flag("truncate"),
        rotation_scale=inner.number("attention_factor") if given else inferred,
        softmax_scale=magnitude(all_dim) ** 2 if latent and all_dim else 1.0,
    )


def _here_or_there(inner: Fields, fields: Fields, name: str) -> Fields:
    """Choose the one of the two that has ``name``; ``fields`` has its default."""
    if inner.gives(name) and fields.gives(name) and inner.number(name) != fields.number(name):
        raise inner.contradiction(name, fields, name)
    return inner if inner.gives(name) else fields
