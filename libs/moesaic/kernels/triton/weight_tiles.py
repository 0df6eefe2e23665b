# Tiles of weights: numbers as they lie in memory, or codes that become numbers in registers.
#   Layout     the addresses of a matrix's parts, int64 [slots, 5]: weights or codes, bias, scales of groups,
#              scales of outputs, zeros; 0 where a part does not exist. See coded_matrix for the parts of codes.
#   Kinds      plain: numbers; fp8; int4: codes around 8; zeros: codes around zeros; levels: codes are e2m1.
#   Rounding   code times scale of its group is exact in float32 for 4 bits, and rounded once to the dtype of the
#              product: the bits of ``dequantised``. Scales of outputs are powers of two, and multiply the sums.
"""Tiles of weights for the products of ``grouped_products``."""

import triton
import triton.language as tl


@triton.jit
def _part(parts, slot, index: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    address = tl.load(parts + slot * 5 + index)
    # Said of what another function returns, this would be lost.
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), ALIGNED)


@triton.jit
def tile_at(
    parts,
    slot,
    row,
    IN: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    DEPTH: tl.constexpr,
    dtype: tl.constexpr,
):
    """Point to the first tile of the outputs ``row``, and to the scales and zeros of their first groups."""
    if KIND == "plain":
        weights = _part(parts, slot, 0, dtype, 16)
        at = weights + row[None, :] * IN + tl.arange(0, DEPTH)[:, None]
        return at, at, at
    else:
        codes = _part(parts, slot, 0, tl.uint8, 16)
        scale_type: tl.constexpr = tl.float32 if KIND == "fp8" else tl.float16
        first_group = row * tl.cdiv(IN, SHARED)
        scales = _part(parts, slot, 2, scale_type, 2) + first_group
        zeros = _part(parts, slot, 4, tl.float16, 2) + first_group
        if KIND == "fp8":
            return codes + row[:, None] * IN + tl.arange(0, DEPTH)[None, :], scales, zeros
        else:
            in_row = tl.arange(0, DEPTH // 2)[None, :]
            return codes + row[:, None] * (tl.cdiv(IN, 32) * 16) + in_row, scales, zeros


@triton.jit
def tile(
    at,
    scales,
    zeros,
    start,
    FURTHER: tl.constexpr,
    IN: tl.constexpr,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    DEPTH: tl.constexpr,
    dtype: tl.constexpr,
):
    """The inputs ``start`` to ``start + DEPTH`` of outputs as ``dtype`` ``[DEPTH, COLUMNS]``, from ``tile_at``.

    The outputs are ``FURTHER`` on: gates and ups share their pointers, which take registers.
    """
    if KIND == "plain":
        inputs = start + tl.arange(0, DEPTH)[:, None]
        return _loaded(at + start + FURTHER * IN, inputs, IN, DEPTH, IN)
    else:
        first_group = FURTHER * tl.cdiv(IN, SHARED) + start // SHARED
        if KIND == "fp8":
            inputs = start + tl.arange(0, DEPTH)[None, :]
            codes = _loaded(at + start + FURTHER * IN, inputs, IN, DEPTH, IN).to(tl.int32)
            # Exponent and mantissa of e4m3, at the place of those of float32: 2 ** 120 too small.
            bits = ((codes & 0x7F) << 20) | ((codes & 0x80) << 24)
            numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        else:
            END: tl.constexpr = tl.cdiv(IN, 32) * 16
            byte = start // 2 + tl.arange(0, DEPTH // 2)[None, :]
            pairs = _loaded(at + start // 2 + FURTHER * END, byte, IN, DEPTH, END).to(tl.int32)
            codes = tl.interleave(pairs & 15, pairs >> 4)
            if KIND == "levels":
                # e2m1 likewise, and 2 ** 127 too small, for levels are doubled.
                bits = ((codes & 7) << 22) | ((codes & 8) << 28)
                numbers = bits.to(tl.float32, bitcast=True)
            else:
                # 2 ** 23 plus a whole number has it in its last bits: no conversion is needed.
                numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True)
                if KIND == "int4":
                    numbers -= 8388616.0
        groups_left = tl.cdiv(IN, SHARED) - start // SHARED
        scaled = _scaled(
            numbers, scales + first_group, zeros + first_group, groups_left, KIND, SHARED, DEPTH
        )
        return tl.trans(scaled.to(dtype))


@triton.jit
def _loaded(at, place, IN: tl.constexpr, DEPTH: tl.constexpr, END: tl.constexpr):
    """Load what lies at ``at``; zeros where ``place`` is not before ``END``, the end of a row."""
    if IN % DEPTH == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=place < END, other=0)


@triton.jit
def _scaled(
    numbers,
    scales,
    zeros,
    groups_left,
    KIND: tl.constexpr,
    SHARED: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """``numbers`` ``[COLUMNS, DEPTH]`` without their zeros, in the scales of their groups of ``SHARED`` inputs."""
    GROUPS: tl.constexpr = tl.cdiv(DEPTH, SHARED)
    COLUMNS: tl.constexpr = numbers.shape[0]
    group = tl.arange(0, GROUPS)[None, :]
    inside = group < groups_left
    scale = tl.load(scales[:, None] + group, mask=inside, other=0.0).to(tl.float32)
    if KIND == "levels":
        scale *= 1.7014118346046923e38
    of_groups = tl.reshape(numbers, (COLUMNS, GROUPS, DEPTH // GROUPS))
    if KIND == "zeros":
        zero = tl.load(zeros[:, None] + group, mask=inside, other=0.0).to(tl.float32)
        of_groups -= (zero + 8388608.0)[:, :, None]
    return tl.reshape(of_groups * scale[:, :, None], (COLUMNS, DEPTH))


@triton.jit
def finished(
    sums,
    parts,
    slot,
    row,
    real,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    dtype: tl.constexpr,
):
    """The ``sums`` of products ``[ROWS, COLUMNS]`` in the scales of the outputs ``row``, with their biases."""
    if KIND != "plain" and KIND != "fp8":
        scale = tl.load(_part(parts, slot, 3, tl.float32, 4) + row, mask=real, other=0.0)
        sums *= scale[None, :]
    if BIASED:
        bias_type: tl.constexpr = dtype if KIND == "plain" else tl.float32
        bias = tl.load(_part(parts, slot, 1, bias_type, 2) + row, mask=real, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    return sums
