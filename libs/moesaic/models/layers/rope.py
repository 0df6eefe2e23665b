"""Rotary position embedding."""

import math

import torch
from torch import Tensor

from moesaic.kernels.decoder_step import Rotation
from moesaic.models.configuration.architecture import Llama3, Rope, Yarn


class RotaryEmbedding:
    """Makes the rotations for given positions."""

    def __init__(self, rope: Rope, dim: int, *, interleaved: bool, device: torch.device) -> None:
        """Prepare the frequencies of a rotated width of ``dim``."""
        self._frequencies = _frequencies(rope, dim).to(device)  # float32 [d / 2]
        self._scale = rope.yarn.rotation_scale if rope.yarn else 1.0
        self._interleaved = interleaved
        self._known: dict[torch.dtype, Rotation] = {}  # of all positions up to some power of two

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotations at ``positions`` (int64 ``[T]``), computed in float32 and kept as ``dtype``."""
        if positions.device.type != "cpu" or not len(positions):
            return self.compute(positions, dtype)
        # A step of one row would spend as long on its angles as on a layer's attention.
        known = self.up_to(int(positions.max()) + 1, dtype)
        cos, sin = (table.index_select(0, positions) for table in (known.cos, known.sin))
        return Rotation(cos, sin, self._interleaved)

    def up_to(self, num_positions: int, dtype: torch.dtype) -> Rotation:
        """Return the rotations at all positions from 0 on, ``num_positions`` at least; on a CPU."""
        known = self._known.get(dtype)
        if known is None or len(known.cos) < num_positions:
            everything = torch.arange(1 << max(10, (num_positions - 1).bit_length()))
            known = self._known[dtype] = self.compute(everything, dtype)
        return known

    def compute(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Compute what ``rotation`` returns, on any device, without what is known already."""
        angles = torch.outer(positions.float(), self._frequencies)
        # In float64: the last bit of a float32 cosine depends on where in the tensor it stands.
        angles = angles.double()
        cos, sin = ((f * self._scale).float() for f in (angles.cos(), angles.sin()))
        if self._interleaved:
            cos, sin = (
                cos.repeat_interleave(2, dim=-1),
                torch.stack((-sin, sin), dim=-1).flatten(-2),
            )
        else:
            cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return Rotation(cos.to(dtype), sin.to(dtype), self._interleaved)


def _frequencies(rope: Rope, dim: int) -> Tensor:
    frequencies = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    frequencies /= rope.slowdown
    if rope.llama3 is not None:
        return _slowed_as_llama3(frequencies, rope.llama3)
    if rope.yarn is None:
        return frequencies
    low, high = _yarn_bounds(rope.yarn, rope.theta, dim)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / rope.yarn.factor * ramp


def _yarn_bounds(yarn: Yarn, theta: float, dim: int) -> tuple[float, float]:
    """Find the two dimensions between which frequencies go over from kept to slowed (arXiv:2309.00071, section 3.2)."""

    def dimension(rotations: float) -> float:
        wavelengths = yarn.original_max_positions / (rotations * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = dimension(yarn.beta_fast), dimension(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width would divide by zero.
    return low, high if high != low else high + 0.001


def _slowed_as_llama3(frequencies: Tensor, how: Llama3) -> Tensor:
    """Divide the frequencies of long waves, keep those of short ones, and mix the two between."""
    # In the first context.
    turns = how.original_max_positions * frequencies / (2 * math.pi)
    kept = (turns - how.low_freq_factor) / (how.high_freq_factor - how.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * kept + frequencies / how.factor * (1 - kept)
