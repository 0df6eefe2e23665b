"""Read one matrix of a checkpoint, stored in any format."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from moesaic.kernels.coded_matrix import coded_form, keeps_codes
from moesaic.kernels.stored_weights import StoredWeight, cat_rows, dequantised, to_device
from moesaic.models.configuration.weight_format import Layout, WeightFormat
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.formats import awq, fp8, gptq, mxfp4, pack_quantized
from moesaic.models.weights.formats.parts import ApartParts, MatrixParts
from moesaic.models.weights.header import StoredTensor

_Read = Callable[[MatrixParts, WeightFormat, int, int], StoredWeight]
_INTEGERS: Mapping[Layout, tuple[str, _Read]] = {
    "awq": ("qweight", awq.read),
    "gptq": ("qweight", gptq.read),
    "pack-quantized": ("weight_packed", pack_quantized.read),
}


def read_matrix(
    checkpoint: Checkpoint,
    weight_format: WeightFormat | None,
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> StoredWeight:
    """Read the matrix ``name``.

    Args:
        checkpoint: the files; their tensors decide if the matrix is quantised.
        weight_format: format of quantised matrices; None: there are none.
        name: name in a model that is not quantised, ``PREFIX.weight``.
        shape: outputs and inputs.
        dtype: dtype of a matrix that is not quantised.
        device: device of the matrix.

    Returns:
        Codes, if the device can compute with codes of this form; else numbers.

    Raises:
        CheckpointError: a tensor is missing, mis-shaped, damaged, or has another dtype than the format's.
    """
    prefix = name.removesuffix(".weight")
    read = _reader(checkpoint, weight_format, prefix)
    if weight_format is None or read is None:
        return checkpoint.read(name, shape, dtype, device)
    weight = read(MatrixParts(checkpoint, prefix), weight_format, *shape)
    return _settled(weight, dtype, device)


def read_entry(
    checkpoint: Checkpoint,
    weight_format: WeightFormat | None,
    name: str,
    index: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    halves: int = 1,
) -> StoredWeight:
    """Read matrix ``index`` of the fused matrices ``name``, of ``shape`` (matrices, out, in); see ``read_matrix``.

    Each is joined from ``halves`` matrices that may have been quantised separately, such as gate and up.
    """
    stored = checkpoint.stored(name)
    if weight_format is not None and stored is None and weight_format.layout == "mxfp4":
        return _settled(mxfp4.read_entry(checkpoint, name, index, *shape), dtype, device)
    if weight_format is not None and _is_fp8(weight_format, stored):
        parts = MatrixParts(checkpoint, name, index, shape[0])
        return _settled(fp8.read(parts, weight_format, *shape[1:], halves), dtype, device)
    return checkpoint.read_slice(name, index, shape, dtype, device)


def read_apart(
    checkpoint: Checkpoint,
    weight_format: WeightFormat,
    matrices: tuple[str, ...],
    scales: str,
    index: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> StoredWeight:
    """Read fp8 ``matrices``, one below the other, with the scales of entry ``index`` of the tensor ``scales``.

    ``shape`` and all else are as in ``read_entry``.
    """
    prefix = scales.removesuffix("_scale_inv")
    parts = ApartParts(checkpoint, prefix, index, shape[0], matrices)
    return _settled(fp8.read(parts, weight_format, *shape[1:], len(matrices)), dtype, device)


def joined(weights: Sequence[StoredWeight], dtype: torch.dtype) -> StoredWeight:
    """Put the outputs of weights one below the other; if they are held in different forms, as numbers."""
    try:
        return cat_rows(weights)
    except ValueError:
        return torch.cat([dequantised(weight, dtype) for weight in weights])


def _settled(weight: StoredWeight, dtype: torch.dtype, device: torch.device) -> StoredWeight:
    """Bring a weight that was read to the CPU to ``device``, as codes if it can compute with them."""
    if not isinstance(weight, Tensor):
        kept = keeps_codes(device) and coded_form(weight)
        if device.type == "cpu" or kept:
            return to_device(weight, device)
    return dequantised(weight, dtype).to(device)


def _reader(
    checkpoint: Checkpoint, weight_format: WeightFormat | None, prefix: str
) -> _Read | None:
    """Find the reader of a matrix; None: it is not quantised."""
    if weight_format is None:
        return None
    if _is_fp8(weight_format, checkpoint.stored(f"{prefix}.weight")):
        return fp8.read
    if weight_format.layout not in _INTEGERS:
        return None
    first, read = _INTEGERS[weight_format.layout]
    return read if f"{prefix}.{first}" in checkpoint else None


def _is_fp8(weight_format: WeightFormat, stored: StoredTensor | None) -> bool:
    return weight_format.layout == "fp8" and stored is not None and stored.dtype == "F8_E4M3"
