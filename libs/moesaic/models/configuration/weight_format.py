"""The format of weights that are published quantised: ``quantization_config`` in ``config.json``. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moesaic.kernels.held_bytes import WeightForm
from moesaic.models.configuration.fields import Fields

Layout = Literal["fp8", "mxfp4", "awq", "gptq", "pack-quantized"]

HELD_GROUPS = (128, 64, 32)  # inputs that share a scale in memory; any other group is a run of them
_FIELD = "quantization_config"
# Fields with the names of modules that stay numbers.
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore", "dynamic")


@dataclass(frozen=True)
class WeightFormat:
    """The codes and scales of the matrices that are quantised; the files say which ones are.

    Attributes:
        layout: which tensors make up a matrix, and how codes lie in them.
        bits: of a code.
        group: inputs that share a scale; None: all of them.
        rows: outputs that share a scale; None: all of them.
        scale: the scales' own part of their name.
        zeros: each group has a code of zero of its own, else it is the middle one.
        zero_offset: added to the stored codes of zero.
        ordered: the files say of each input which group it is in.
        attention: its matrices are quantised, as far as the configuration says; for estimates, since the files decide.
    """

    layout: Layout
    bits: int
    group: int | None
    rows: int | None = 1
    scale: str = "weight_scale"
    zeros: bool = False
    zero_offset: int = 0
    ordered: bool = False
    attention: bool = True

    @property
    def held(self) -> WeightForm | None:
        """The form in memory; None: numbers, for codes cannot be computed with."""
        group = self.held_group
        if group is None or self.ordered:
            return None
        if self.layout == "fp8":
            return WeightForm("fp8", group)
        return (
            WeightForm("int4", group, self.zeros, self.layout == "mxfp4")
            if self.bits == 4
            else None
        )

    @property
    def held_group(self) -> int | None:
        """Inputs that share a scale in memory; None: they cannot be held in groups."""
        if self.group is None:
            return HELD_GROUPS[0]
        return next((size for size in HELD_GROUPS if self.group % size == 0), None)


def read_weight_format(fields: Fields) -> WeightFormat | None:
    """Read the format of quantised weights; None: they are plain numbers.

    Raises:
        CheckpointError: a method, a layout or a number of bits that cannot be read; names the field.
    """
    if not fields.has(_FIELD):
        return None
    own = fields.under(_FIELD, fields.group(_FIELD))
    found = _READERS[own.choice("quant_method", tuple(_READERS))](own)
    left_out = [name for field in _LEFT_OUT for name in own.texts(field)]
    return replace(found, attention=not any("attn" in name for name in left_out))


def _read_fp8(fields: Fields) -> WeightFormat:
    if fields.has("fmt"):
        fields.choice("fmt", ("e4m3", "float8_e4m3fn"))
    if not fields.has("weight_block_size"):
        return WeightFormat("fp8", 8, None, None)
    rows, columns = _block(fields, "weight_block_size")
    return WeightFormat("fp8", 8, columns, rows, scale="weight_scale_inv")


def _read_mxfp4(fields: Fields) -> WeightFormat:
    return WeightFormat("mxfp4", 4, 32)


def _read_awq(fields: Fields) -> WeightFormat:
    _bits(fields, "bits", (4,))
    if fields.has("version"):
        fields.choice("version", ("gemm", "GEMM"))
    if fields.has("zero_point") and not fields.flag("zero_point"):
        raise fields.error("zero_point", "expected true: AWQ without zero points is not supported")
    return WeightFormat("awq", 4, _group(fields, "group_size"), scale="scales", zeros=True)


def _read_gptq(fields: Fields) -> WeightFormat:
    version = "gptq"
    if fields.has("checkpoint_format"):
        version = fields.choice("checkpoint_format", ("gptq", "gptq_v2"))
    if fields.has("lm_head") and fields.flag("lm_head"):
        raise fields.error("lm_head", "a quantised output head is not supported")
    for pattern in fields.group("dynamic"):
        if not pattern.startswith("-:"):  # those leave modules as they are
            raise fields.error("dynamic", f"modules of another form are not supported: {pattern!r}")
    group = _group(fields, "group_size")
    return WeightFormat(
        "gptq",
        _bits(fields, "bits", (4, 8)),
        group,
        scale="scales",
        zeros=not (fields.has("sym") and fields.flag("sym")),
        zero_offset=1 if version == "gptq" else 0,
        ordered=fields.has("desc_act") and fields.flag("desc_act") and group is not None,
    )


def _read_compressed(fields: Fields) -> WeightFormat:
    if fields.has("kv_cache_scheme"):
        raise fields.error("kv_cache_scheme", "a quantised KV cache is not supported; set null")
    groups = fields.group("config_groups")
    if not groups:
        raise fields.error("config_groups", "is missing")
    found = [_read_scheme(fields, f"config_groups.{name}", of) for name, of in groups.items()]
    if any(other != found[0] for other in found):
        raise fields.error("config_groups", "weights of several formats are not supported")
    return found[0]


def _read_scheme(fields: Fields, name: str, scheme: Any) -> WeightFormat:
    if not isinstance(scheme, Mapping) or not isinstance(scheme.get("weights"), Mapping):
        raise fields.error(name, "expected an object with weights")
    own = fields.under(name, scheme)
    place = own if own.has("format") else fields
    layout = place.choice("format", tuple(_SCHEMES))
    return _SCHEMES[layout](own.under("weights", scheme["weights"]))


def _read_packed_scheme(weights: Fields) -> WeightFormat:
    weights.choice("type", ("int",))
    strategy = weights.choice("strategy", ("group", "channel"))
    ordered = weights.has("actorder") and weights.choice(
        "actorder", ("group", "dynamic", "weight", "static")
    ) in ("group", "dynamic")
    group = _group(weights, "group_size") if strategy == "group" else None
    return WeightFormat(
        "pack-quantized",
        _bits(weights, "num_bits", (4, 8)),
        group,
        zeros=not weights.flag("symmetric"),
        ordered=ordered and group is not None,
    )


def _read_float_scheme(weights: Fields) -> WeightFormat:
    weights.choice("type", ("float",))
    _bits(weights, "num_bits", (8,))
    strategy = weights.choice("strategy", ("tensor", "channel", "block"))
    if strategy == "block":
        rows, columns = _block(weights, "block_structure")
        return WeightFormat("fp8", 8, columns, rows)
    return WeightFormat("fp8", 8, None, 1 if strategy == "channel" else None)


_SCHEMES = {"pack-quantized": _read_packed_scheme, "float-quantized": _read_float_scheme}
_READERS = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
}


def _block(fields: Fields, name: str) -> tuple[int, int]:
    sizes = fields.sizes(name)
    if len(sizes) != 2 or 0 in sizes:
        raise fields.error(name, f"expected outputs and inputs of a block, got {list(sizes)}")
    return sizes


def _group(fields: Fields, name: str) -> int | None:
    size = fields.size(name, least=-1)
    if size == 0:
        raise fields.error(name, "expected a positive number of inputs, or -1 for all")
    return None if size == -1 else size


def _bits(fields: Fields, name: str, allowed: tuple[int, ...]) -> int:
    bits = fields.size(name)
    if bits not in allowed:
        raise fields.error(name, f"expected {' or '.join(map(str, allowed))}, got {bits}")
    return bits
