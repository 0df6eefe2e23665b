"""The format of weights that are published quantised: ``quantization_config`` in ``config.json``. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from moesaic.kernels.held_bytes import WeightForm
from moesaic.models.configuration.fields import Fields
from moesaic.models.configuration.quantization_fields import (
    MODULES_LEFT_OUT,
    OF_SCHEME,
    OF_WEIGHTS,
    WITHOUT_EFFECT,
    as_saved_now,
)

Layout = Literal["fp8", "mxfp4", "awq", "gptq", "pack-quantized"]

HELD_GROUPS = (128, 64, 32)  # inputs that share a scale in memory; any other group is a run of them
_FIELD = "quantization_config"
_AWQ_KERNELS = (
    *("auto", "auto_trainable", "autoawq", "machete", "marlin", "exllama_v1", "exllama_v2"),
    *("gemm", "gemm_triton", "gemv", "gemv_fast", "torch_awq", "torch_fused_awq"),
)
_UNKNOWN = "is not known, and could change the meaning of the weights: leave it out if it does not"


@dataclass(frozen=True)
class WeightFormat:
    """The codes and scales of the matrices that are quantised; the files say which ones are.

    Attributes:
        layout: which tensors make up a matrix, and how codes lie in them.
        bits: bits of a code.
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
    own = fields.under(_FIELD, fields.group(_FIELD)).filled({}, {"quant_method": "method"})
    method = own.choice("quant_method", tuple(_READERS))
    found = _READERS[method](own)
    own.refuse_unread(WITHOUT_EFFECT[method], _UNKNOWN)
    left_out = [name for field in (*MODULES_LEFT_OUT, "dynamic") for name in own.texts(field)]
    return replace(found, attention=not any("attn" in name for name in left_out))


def _read_fp8(fields: Fields) -> WeightFormat:
    _require(fields, "fmt", ("e4m3", "float8_e4m3fn"))
    # The scales' own dtype says which.
    _require(fields, "scale_fmt", ("float", "ue8m0"))
    _require(fields, "expert_dtype", ("fp8",))
    _refuse_cache_scheme(fields)
    if not fields.has("weight_block_size"):
        return WeightFormat("fp8", 8, None, None)
    rows, columns = _block(fields, "weight_block_size")
    return WeightFormat("fp8", 8, columns, rows, scale="weight_scale_inv")


def _read_mxfp4(fields: Fields) -> WeightFormat:
    return WeightFormat("mxfp4", 4, 32)


def _read_awq(fields: Fields) -> WeightFormat:
    fields = fields.filled({}, {"bits": "w_bit", "group_size": "q_group_size"})
    _bits(fields, "bits", (4,))
    for name in ("version", "format", "checkpoint_format"):
        _require(fields, name, ("gemm",))
    # llm-awq is not among them: its packing differs.
    _require(fields, "backend", _AWQ_KERNELS)
    if fields.has("zero_point") and not fields.flag("zero_point"):
        raise fields.error("zero_point", "expected true: AWQ without zero points is not supported")
    _refuse_exceptions(fields)
    return WeightFormat("awq", 4, _group(fields, "group_size"), scale="scales", zeros=True)


def _read_gptq(fields: Fields) -> WeightFormat:
    versions = [
        _require(fields, name, ("gptq", "gptq_v2"))
        for name in ("checkpoint_format", "format")
        if fields.has(name)
    ]
    if len(set(versions)) > 1:
        raise fields.contradiction("format", fields, "checkpoint_format")
    _refuse_exceptions(fields)
    group = _group(fields, "group_size")
    return WeightFormat(
        "gptq",
        _bits(fields, "bits", (4, 8)),
        group,
        scale="scales",
        zeros=not (fields.has("sym") and fields.flag("sym")),
        zero_offset=0 if "gptq_v2" in versions else 1,
        ordered=fields.has("desc_act") and fields.flag("desc_act") and group is not None,
    )


def _refuse_exceptions(fields: Fields) -> None:
    """Refuse words other than int32, and modules of another form, in the fields of GPTQModel and AutoRound."""
    _require(fields, "pack_dtype", ("int32",))
    _require(fields, "data_type", ("int",))
    for head in ("lm_head", "quant_lm_head"):
        if fields.has(head) and fields.flag(head):
            raise fields.error(head, "a quantised output head is not supported")
    for pattern in fields.group("dynamic"):
        # These patterns leave modules unquantised.
        if not pattern.startswith("-:"):
            raise fields.error("dynamic", f"modules of another form are not supported: {pattern!r}")
    for module, form in fields.group("extra_config").items():
        bits = form.get("bits") if isinstance(form, Mapping) else None
        # Unquantised
        if type(bits) is not int or bits < 16:
            raise fields.error(
                "extra_config", f"modules of another form are not supported: {module!r}"
            )


def _read_compressed(fields: Fields) -> WeightFormat:
    _refuse_cache_scheme(fields)
    sparsity = fields.under("sparsity_config", fields.group("sparsity_config"))
    _require(sparsity, "format", ("dense",))
    # mixed-precision: see each group.
    _require(fields, "format", (*_SCHEMES, "mixed-precision"))
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
    told = as_saved_now(own.group("weights"))
    weights = own.under("weights", told).filled(_DEFAULTS_OF_WEIGHTS, {})
    own.refuse_unread(OF_SCHEME, _UNKNOWN)
    if weights.has("dynamic") and weights.flag("dynamic"):
        raise weights.error("dynamic", "expected false: weights do not change from row to row")
    found = _SCHEMES[layout](weights)
    weights.refuse_unread(OF_WEIGHTS, _UNKNOWN)
    return found


def _read_packed_scheme(weights: Fields) -> WeightFormat:
    weights.choice("type", ("int",))
    strategy = weights.choice("strategy", ("group", "channel"))
    ordered = weights.has("actorder") and weights.choice(
        "actorder", ("group", "dynamic", "weight", "static")
    ) in ("group", "dynamic")
    group = _group_of(weights, strategy)
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
    if not weights.flag("symmetric"):
        raise weights.error("symmetric", "expected true: fp8 with zero points is not supported")
    strategy = weights.choice("strategy", ("tensor", "channel", "block"))
    if strategy == "block":
        rows, columns = _block(weights, "block_structure")
        return WeightFormat("fp8", 8, columns, rows)
    _group_of(weights, strategy)
    return WeightFormat("fp8", 8, None, 1 if strategy == "channel" else None)


# As compressed-tensors has them.
_DEFAULTS_OF_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True}
_SCHEMES = {
    "pack-quantized": _read_packed_scheme,
    "float-quantized": _read_float_scheme,
    "naive-quantized": _read_float_scheme,  # the same files as float-quantized; those of integers differ
}
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


def _group_of(weights: Fields, strategy: str) -> int | None:
    """Read the number of inputs that share a scale; a group size needs a strategy with groups."""
    if strategy == "group":
        return _group(weights, "group_size")
    if weights.has("group_size") and weights.size("group_size", least=-1) != -1:
        raise weights.error("group_size", f"does not apply to strategy {strategy!r}: leave it out")
    return None


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


def _require(fields: Fields, name: str, allowed: tuple[str, ...]) -> str:
    """Return a string in lower case, one of ``allowed``; empty if the file has none."""
    if not fields.has(name):
        return ""
    return fields.choice(name, allowed, lowered=True)


def _refuse_cache_scheme(fields: Fields) -> None:
    if fields.has("kv_cache_scheme"):
        raise fields.error("kv_cache_scheme", "a quantised KV cache is not supported; set null")
