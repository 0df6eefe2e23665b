"""The tensors of a matrix in each format, by the ends of their names. Needs no torch."""

from collections.abc import Container, Iterator, Mapping, Sequence

from moesaic.models.configuration.weight_format import Layout, WeightFormat

# Of one matrix; MXFP4 has those of all experts together. The first tells a quantised matrix, but in fp8 its dtype does.
_PARTS: Mapping[Layout, tuple[str, ...]] = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "pack-quantized": (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
    ),
}
# transformers writes the first suffix, AutoFP8 and compressed-tensors the second, after the name of the codes.
SCALES_OF_FP8 = ("weight_scale_inv", "weight_scale")
# Scales of activations, which are not quantised here.
_UNREAD = (".input_scale", ".activation_scale", "_proj_activation_scale")


def holds(found: Container[str], name: str) -> bool:
    """Return true if what is called ``name``, a matrix or those of all experts, is there in any format."""
    prefix = name.removesuffix(".weight")
    others = (f"{name}_blocks", f"{prefix}.qweight", f"{prefix}.weight_packed")
    return name in found or any(other in found for other in others)


def stored_names(
    weight_format: WeightFormat | None, name: str, found: Container[str]
) -> Iterator[str]:
    """List the tensors that hold what is called ``name``; it alone if it is a plain tensor or not there."""
    if weight_format is None:
        yield name
        return
    if weight_format.layout == "mxfp4":
        fused = f"{name}_blocks" in found
        yield from (f"{name}_blocks", f"{name}_scales") if fused else (name,)
        return
    # The names of tensors with all experts have no "weight".
    if weight_format.layout == "fp8":
        scales = (name + part.removeprefix("weight") for part in SCALES_OF_FP8)
        yield name
        yield from [scale for scale in scales if scale in found][:1]
        return
    prefix, _, end = name.rpartition(".")
    parts = _PARTS[weight_format.layout]
    if end != "weight" or f"{prefix}.{parts[0]}" not in found:
        yield name
        return
    yield from (full for part in parts if (full := f"{prefix}.{part}") in found)


def shared_scales(
    weight_format: WeightFormat | None, experts: Sequence[str], found: Container[str]
) -> tuple[str, ...]:
    """Name the two tensors with the scales of all experts (gate and up, down), if each expert has codes of its own.

    transformers saves its own fp8 models in this form. Empty: there are no such tensors.

    Args:
        weight_format: format of the model.
        experts: names of the matrices of each expert, ``{}`` for its number.
        found: all tensors.
    """
    if weight_format is None or weight_format.layout != "fp8" or len(experts) == 2:
        return ()
    prefix = experts[0].partition("{}")[0]
    both = (f"{prefix}gate_up_proj_scale_inv", f"{prefix}down_proj_scale_inv")
    return both if both[0] in found else ()


def is_unread(name: str) -> bool:
    """Return true for a tensor beside a matrix that its weights do not depend on."""
    return name.endswith(_UNREAD)
