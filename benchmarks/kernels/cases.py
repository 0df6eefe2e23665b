"""Inputs that the kernels are measured on: the layers of known models, at the batch sizes of decode and prefill."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.kernels.peers import (
    Peers,
    attention_peers,
    experts_by_grouped_mm,
    experts_by_humming,
    linear_by_humming,
)
from moesaic.brownout import split
from moesaic.brownout.split import Level
from moesaic.kernels import grouped_experts as torch_experts
from moesaic.kernels.gated_mlp import CodedMLP, PlainMLP, make_mlp
from moesaic.kernels.kv_rows import store_grouped_reference
from moesaic.kernels.linear import make_linear
from moesaic.kernels.paged_attention import paged_attention_reference
from moesaic.kernels.paged_rows import KVLayout, PagedRows
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.kernels.rms_norm import add_rms_norm_reference
from moesaic.kernels.stored_weights import (
    LEVELS_OF_E2M1,
    Fp8Weight,
    Int4Weight,
    StoredWeight,
    dequantised,
)
from moesaic.kernels.triton.add_rms_norm import add_rms_norm
from moesaic.kernels.triton.brownout import split_choices
from moesaic.kernels.triton.gate import select_experts
from moesaic.kernels.triton.grouped_experts import grouped_experts
from moesaic.kernels.triton.grouped_products import SlotWeights
from moesaic.kernels.triton.kv_rows import store_grouped
from moesaic.kernels.triton.split_attention import paged_attention
from moesaic.messages.substitution import Substitution

BLOCK_SIZE = 16
NUMBER_BYTES = 2


@dataclass(frozen=True)
class KernelCase:
    """One kernel on one input."""

    kernel_name: str
    name: str
    kernel: Callable[[], Tensor]
    reference: Callable[[], Tensor]
    num_bytes: int  # the fewest that must move
    num_operations: int
    peers: Peers = field(
        default_factory=dict
    )  # others' ways, by name; each prepares its work when it is called

    def relative_error(self) -> float:
        """Norm of the difference to the reference over the reference's norm."""
        expected = self.reference().double()
        return float((self.kernel().double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class ExpertShape:
    """One layer of routed experts."""

    model: str
    num_experts: int
    top_k: int
    hidden: int
    size: int


SHAPES = (
    ExpertShape("qwen3-30b-a3b", 128, 8, 2048, 768),
    ExpertShape("mixtral-8x7b", 8, 2, 4096, 14336),
    ExpertShape("deepseek-v2-lite", 64, 6, 2048, 1408),
)


def all_cases(quick: bool) -> Iterator["partial[KernelCase]"]:
    """Every case, the most telling first; each is made when it is called, so that memory holds one at a time."""
    for num_rows in (1, 64, 4096) if quick else (1, 16, 64, 256, 1024, 8192):
        yield partial(experts, SHAPES[0], num_rows)
    grouped, latent = KVLayout.grouped(4, 128), KVLayout.latent(512, 64)
    layouts = ((grouped, 32), (latent, 16), (latent, 128))
    for layout, num_heads in layouts:
        for batch, length in ((64, 4096),) if quick else ((64, 4096), (1, 32768), (64, 512)):
            yield partial(attention, layout, num_heads, batch, 1, length)
    for form in ("fp8", "mxfp4"):
        for num_rows in (1, 64) if quick else (1, 16, 64, 1024):
            yield partial(experts, SHAPES[0], num_rows, form)
            yield partial(linear, num_rows, form)
    for rows, length in ((512, 8192), (4096, 4096)):
        yield partial(attention, grouped, 32, 1, rows, length)
        yield partial(attention, latent, 16, 1, rows, length)
    # Cut into pieces, or most of the GPU would be idle.
    yield partial(attention, grouped, 16, 1, 512, 8192)
    for num_rows in (64, 8192):
        for make in (gate, brownout, norm, rows_of_cache):
            yield partial(make, num_rows)
    if not quick:
        for shape in SHAPES[1:]:
            for num_rows in (1, 16, 64, 256, 1024, 8192):
                yield partial(experts, shape, num_rows)


def normal(*shape: int) -> Tensor:
    """Random numbers: zeros would be faster than real data."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def experts(shape: ExpertShape, num_rows: int, form: str = "bfloat16") -> KernelCase:
    """A layer's experts, chosen evenly, with weights in a ``form`` of ``stored``."""
    slots = torch.rand(num_rows, shape.num_experts, device="cuda").argsort(dim=1)
    slots = slots[:, : shape.top_k].contiguous()
    routed = (
        normal(num_rows, shape.hidden),
        torch.rand(num_rows, shape.top_k, device="cuda"),
        slots,
    )
    pairs = [
        (stored(form, 2 * shape.size, shape.hidden), stored(form, shape.hidden, shape.size))
        for _ in range(shape.num_experts)
    ]
    numbers = [
        PlainMLP(dequantised(first, torch.bfloat16), dequantised(second, torch.bfloat16))
        for first, second in pairs
    ]
    mlps = [make_mlp(*pair) for pair in pairs]
    weights = SlotWeights.of([mlp for mlp in mlps if isinstance(mlp, PlainMLP | CodedMLP)])

    def by_torch() -> Tensor:
        return torch_experts.grouped_experts(*routed, numbers)

    by_torch.waits = True  # type: ignore[attr-defined]  # it asks the device for the counts

    def stacks() -> tuple[Tensor, Tensor]:
        return (
            torch.stack([mlp.gate_up for mlp in numbers]),
            torch.stack([mlp.down for mlp in numbers]),
        )

    peers: Peers = {"humming": lambda: experts_by_humming(*routed, *stacks(), form)}
    if form == "bfloat16":
        peers = {
            "torch": lambda: by_torch,
            "grouped_mm": lambda: experts_by_grouped_mm(*routed, *stacks()),
        }
    weight_bytes = len(set(slots.flatten().tolist())) * mlps[0].nbytes
    return KernelCase(
        "grouped_experts",
        f"{shape.model}, {form}, {num_rows} rows",
        lambda: grouped_experts(*routed, weights),
        by_torch,
        num_bytes=weight_bytes + num_rows * shape.hidden * (NUMBER_BYTES + 4),
        num_operations=6 * shape.hidden * shape.size * slots.numel(),
        peers=peers,
    )


def linear(num_rows: int, form: str) -> KernelCase:
    """A linear layer of 4096 inputs and outputs, with a weight in a ``form`` of ``stored``."""
    x, weight = normal(num_rows, 4096), stored(form, 4096, 4096)
    numbers, layer = dequantised(weight, torch.bfloat16), make_linear(weight)

    def by_torch() -> Tensor:
        return F.linear(x, numbers)

    return KernelCase(
        "linear",
        f"{form}, {num_rows} rows",
        lambda: layer(x),
        by_torch,
        num_bytes=layer.nbytes + 2 * x.nbytes,
        num_operations=2 * num_rows * numbers.numel(),
        peers={
            "torch": lambda: by_torch,
            "humming": lambda: linear_by_humming(x, numbers, form),
        },
    )


def stored(form: str, num_out: int, num_in: int) -> StoredWeight:
    """Draw a weight whose outputs are about as large as its inputs.

    ``form`` is bfloat16, fp8 with a scale for 128 inputs, or mxfp4 of random codes.
    """
    numbers: Tensor = normal(num_out, num_in) * num_in**-0.5
    if form == "bfloat16":
        return numbers
    if form == "fp8":
        groups = numbers.float().view(num_out, -1, 128)
        scales = groups.abs().amax(dim=2, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        codes = (groups / scales).to(torch.float8_e4m3fn).view(torch.uint8)
        return Fp8Weight(codes.view(num_out, num_in), scales[:, :, 0], 128)
    codes = torch.randint(0, 16, (num_out, num_in), device="cuda").to(torch.uint8)
    levels = torch.tensor(LEVELS_OF_E2M1, dtype=torch.int8, device="cuda")
    spread = math.ldexp(1.0, round(math.log2(num_in**-0.5 / levels.float().std().item())))
    scales = torch.full((num_out, num_in // 32), spread, device="cuda")
    return Int4Weight(codes, scales, None, levels, 32)


def gate(num_rows: int) -> KernelCase:
    """Eight of 128, normalised."""
    logits = normal(num_rows, 128)

    def by_torch() -> Tensor:
        weights = logits.softmax(dim=-1, dtype=torch.float32).topk(8, dim=-1).values
        return weights / weights.sum(dim=-1, keepdim=True)

    return KernelCase(
        "gate",
        f"{num_rows} rows",
        lambda: select_experts(logits, top_k=8, normalise=True)[0],
        by_torch,
        num_bytes=num_rows * (128 * NUMBER_BYTES + 8 * 8),
        num_operations=0,
        peers={"torch": lambda: by_torch},
    )


def brownout(num_rows: int) -> KernelCase:
    """Eight of 128 in two phases, and a copy of them first: they are split in place."""
    ids = torch.rand(num_rows, 128).argsort(dim=1)[:, :8].int().contiguous()
    weights = torch.rand(num_rows, 8).softmax(dim=-1)
    levels, level_of_row = [Level(0.7), Level(0.5, 1)], torch.arange(num_rows) % 2
    promised = PromisedRows(levels, level_of_row, torch.device("cuda"))
    layer = LayerSubstitution(128, Substitution(way=4, instead="united"))
    source = torch.stack([ids.view(torch.float32), weights]).cuda()
    copy = torch.empty_like(source)

    def kernel() -> Tensor:
        copy.copy_(source)
        split_choices(copy[0].view(torch.int32), copy[1], promised, layer)
        return copy[1]

    def reference() -> Tensor:
        rows = promised.level_of_row.numpy()
        chosen = split.split_choices(ids.numpy(), weights.numpy(), levels, rows, layer.layer)
        return torch.from_numpy(chosen.weights).cuda()

    return KernelCase(
        "brownout",
        f"{num_rows} rows",
        kernel,
        reference,
        num_bytes=4 * source.nbytes,  # the copy; what is read, and at most written, of it
        num_operations=0,
    )


def norm(num_rows: int) -> KernelCase:
    """The residual addition and norm of a hidden size of 4096."""
    hidden, delta, weight = normal(num_rows, 4096), normal(num_rows, 4096), normal(4096)

    def by_torch() -> Tensor:
        return F.rms_norm(hidden + delta, (4096,), weight, 1e-6)

    return KernelCase(
        "add_rms_norm",
        f"{num_rows} rows",
        lambda: add_rms_norm(hidden, delta, weight, 1e-6)[1],
        lambda: add_rms_norm_reference(hidden, delta, weight, 1e-6)[1],
        num_bytes=4 * hidden.nbytes,
        num_operations=0,
        peers={"torch": lambda: by_torch},
    )


def rows_of_cache(num_rows: int) -> KernelCase:
    """Norm, rotation and caching of 32 queries and 4 keys and values of width 128."""
    qkv, qk_norm, cos, sin = (
        normal(num_rows, 40, 128),
        normal(36, 128),
        *normal(2, num_rows, 128),
    )
    slots = torch.randperm(2 * num_rows, device="cuda")[:num_rows]
    cached = normal(2 * num_rows, 1024)
    arguments = (qkv, 32, qk_norm, 1e-6, cos, sin, False, slots, cached)

    def by_torch() -> Tensor:
        return store_grouped_reference(*arguments)

    return KernelCase(
        "store_grouped",
        f"{num_rows} rows",
        lambda: store_grouped(*arguments),
        by_torch,
        num_bytes=2 * qkv.nbytes + 2 * cos.nbytes,
        num_operations=0,
    )


def attention(
    layout: KVLayout, num_heads: int, batch: int, num_rows: int, length: int
) -> KernelCase:
    """``batch`` sequences of ``length`` tokens, of which the last ``num_rows`` are queries."""
    num_blocks = length // BLOCK_SIZE

    def int32(values: Tensor) -> Tensor:
        return values.to("cuda", torch.int32)

    rows = PagedRows(
        first_rows=int32(torch.arange(batch) * num_rows),
        num_rows=int32(torch.full((batch,), num_rows)),
        lengths=int32(torch.full((batch,), length)),
        block_tables=int32(torch.randperm(batch * num_blocks).view(batch, num_blocks)),
        max_rows=num_rows,
        max_length=length,
    )
    width = layout.key_dim if layout.value_column == 0 else 2 * layout.value_column
    cached = normal(batch * length, width)
    queries = normal(batch * num_rows, num_heads, layout.key_dim)
    out = normal(batch * num_rows, num_heads, layout.value_dim)
    arguments = (queries, cached, rows, layout, BLOCK_SIZE, layout.key_dim**-0.5, None, out)

    def kernel() -> Tensor:
        paged_attention(*arguments)
        return out

    def reference() -> Tensor:
        into = torch.empty_like(out)
        paged_attention_reference(*arguments[:-1], into)
        return into

    seen = batch * sum(range(length - num_rows + 1, length + 1))
    per_key = 2 * num_heads * (layout.key_dim + layout.value_dim)
    kind = "latent" if layout.value_column == 0 else "grouped"
    return KernelCase(
        "paged_attention",
        f"{kind}, {num_heads} heads, {batch} x {num_rows} rows, {length} tokens",
        kernel,
        reference,
        num_bytes=cached.nbytes + queries.nbytes + out.nbytes,
        num_operations=seen * per_key,
        peers=attention_peers(layout, num_heads, batch, num_rows, length),
    )
