"""The tensors of one matrix in each format, by the ends of their names. Needs no torch."""

from collections.abc import Container, Iterator, Mapping

from moesaic.models.configuration.weight_format import Layout, WeightFormat

# The first of them tells a quantised matrix from a plain one; in fp8 its dtype does.
_PARTS: Mapping[Layout, tuple[str, ...]] = {
    "fp8": ("weight",),
    "mxfp4": (),  # the experts of a layer lie in one tensor
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
_UNREAD = (".input_scale",)  # of activations, which are not quantised here
_FIRST = ("weight", "qweight", "weight_packed")


def has_matrix(found: Container[str], prefix: str) -> bool:
    """Return true if the matrix ``prefix`` is there, in any format."""
    return any(f"{prefix}.{part}" in found for part in _FIRST)


def matrix_names(
    weight_format: WeightFormat | None, name: str, found: Container[str]
) -> Iterator[str]:
    """List the tensors that hold what is called ``name``, ``PREFIX.weight`` or anything else."""
    prefix, _, end = name.rpartition(".")
    if weight_format is None or end != "weight":
        yield name
        return
    parts = _PARTS[weight_format.layout]
    if not parts or f"{prefix}.{parts[0]}" not in found:
        yield name
        return
    if weight_format.layout == "fp8":
        parts += (weight_format.scale,)
    yield from (full for part in parts if (full := f"{prefix}.{part}") in found)


def fused_names(
    weight_format: WeightFormat | None, name: str, found: Container[str]
) -> tuple[str, ...]:
    """Return the tensors that hold ``name`` of all experts of a layer; none: each has its own."""
    if name in found:
        return (name,)
    if weight_format is None or weight_format.layout != "mxfp4" or f"{name}_blocks" not in found:
        return ()
    return f"{name}_blocks", f"{name}_scales"


def is_unread(name: str) -> bool:
    """Return true for a tensor beside a matrix that its weights do not depend on."""
    return name.endswith(_UNREAD)
