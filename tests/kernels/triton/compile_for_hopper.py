"""Compile every kernel for a Hopper GPU, as its launcher would at a model's size; needs no GPU.

Prints a JSON object a line: the kernel, its case, what it takes of a multiprocessor and which
matrix instructions it holds. Not for the interpreter: run it without TRITON_INTERPRET.
Arguments are the cases to compile; without them all are.
"""

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moesaic.brownout.split import Level
from moesaic.kernels.coded_matrix import CodedMatrix, coded_parts
from moesaic.kernels.gated_mlp import CodedMLP, PlainMLP
from moesaic.kernels.held_bytes import WeightForm
from moesaic.kernels.paged_rows import KVLayout, PagedRows
from moesaic.kernels.promised import LayerSubstitution, PromisedRows
from moesaic.kernels.triton import grouped_products as grouped_products_module
from moesaic.kernels.triton import paged_attention as paged_attention_module
from moesaic.kernels.triton.add_rms_norm import add_rms_norm
from moesaic.kernels.triton.aebs import schedule_experts
from moesaic.kernels.triton.brownout import split_choices
from moesaic.kernels.triton.gate import select_experts
from moesaic.kernels.triton.grouped_experts import grouped_experts
from moesaic.kernels.triton.grouped_products import SlotWeights, linear
from moesaic.kernels.triton.kv_rows import rotate, store_grouped, store_latent
from moesaic.kernels.triton.sampling import pick_tokens
from moesaic.kernels.triton.split_attention import paged_attention
from moesaic.messages.substitution import Substitution
from moesaic.placement.schedule.aebs import Costs

BFLOAT16 = torch.bfloat16
GROUPED, LATENT = KVLayout.grouped(4, 128), KVLayout.latent(512, 64)
case = ""


class Hopper:
    """The driver of a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The default one."""
        return 0


def compile_instead(self: Any, *args: Any, grid: object, warmup: bool, **options: Any) -> None:
    """In place of a launch: compile with the same arguments, print what came out."""
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()

        def dumped(what: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, what, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, sass = dumped("-res-usage"), dumped("-sass")
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0]
    ptx = kernel.asm["ptx"]
    facts = {
        "case": case,
        "kernel": self.__name__,
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "wgmma_waits": sass.count("WARPGROUP.DEPBAR"),
        "mma": ptx.count("mma.sync"),
        "fused": ptx.count("fma.rn.f64"),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.", ptx)),
    }
    print(json.dumps(facts), flush=True)


def empty(*shape: int, dtype: torch.dtype = BFLOAT16) -> torch.Tensor:
    """A tensor whose numbers nobody reads."""
    return torch.empty(shape, dtype=dtype)


def experts(num_rows: int, hidden: int = 2048, size: int = 768, num_slots: int = 16) -> None:
    """Eight experts a row."""
    slots = empty(num_rows, 8, dtype=torch.int64)
    experts = SlotWeights.of([PlainMLP(empty(2 * size, hidden), empty(hidden, size))] * num_slots)
    grouped_experts(empty(num_rows, hidden), empty(num_rows, 8), slots, experts)


def coded(num_out: int, num_in: int, form: WeightForm, *, biased: bool = False) -> CodedMatrix:
    """A matrix of codes that nobody reads."""
    told = coded_parts(form, num_out, num_in, biased=biased)
    parts = {name: empty(*shape, dtype=dtype) for name, (dtype, shape) in told.items()}
    return CodedMatrix((num_out, num_in), form, parts)


def codes(num_rows: int, hidden: int, size: int, form: WeightForm) -> None:
    """Experts of codes, four a row, and a linear layer."""
    slots = empty(num_rows, 4, dtype=torch.int64)
    biased = form.levels
    first = coded(2 * size, hidden, form, biased=biased)
    second = coded(hidden, size, form, biased=biased)
    mlp = CodedMLP(first, second, (1.702, 7.0) if biased else None)
    weights = SlotWeights.of([mlp] * 16)
    grouped_experts(empty(num_rows, hidden), empty(num_rows, 4), slots, weights)
    linear(empty(num_rows, size), empty(1, 5, dtype=torch.int64), second)


def gpt_oss(num_rows: int) -> None:
    """Biases and the clamped activation, and sinks beside a window, at its sizes."""
    hidden, slots = 2880, empty(num_rows, 4, dtype=torch.int64)
    biases = empty(2 * hidden), empty(hidden)
    mlp = PlainMLP(empty(2 * hidden, hidden), empty(hidden, hidden), biases, (1.702, 7.0))
    weights = SlotWeights.of([mlp] * 8)
    grouped_experts(empty(num_rows, hidden), empty(num_rows, 4), slots, weights)
    attention(num_rows, 4096, KVLayout.grouped(8, 64), 64, 128, empty(64, dtype=torch.float32))


def attention(
    num_rows: int,
    length: int,
    layout: KVLayout,
    num_heads: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Two sequences."""
    two = empty(2, dtype=torch.int32)
    tables = empty(2, length // 16, dtype=torch.int32)
    rows = PagedRows(two, two, two, tables, num_rows, length)
    cached = empty(64, layout.key_dim + layout.value_column)
    queries = empty(2 * num_rows, num_heads, layout.key_dim)
    out = empty(2 * num_rows, num_heads, layout.value_dim)
    paged_attention(queries, cached, rows, layout, 16, 0.1, window, out, sinks)


def rows_of_cache() -> None:
    """Both kinds of attention."""
    offsets, sines = empty(4, dtype=torch.int64), empty(4, 64, dtype=torch.float32)
    turn = (empty(4, 128), empty(4, 128), False)
    store_grouped(empty(4, 40, 128), 32, empty(36, 128), 1e-6, *turn, offsets, empty(9, 1024))
    latent, key = empty(4, 576).split([512, 64], dim=1)
    store_latent(latent, empty(512), 1e-6, key, sines, sines, True, offsets, empty(9, 576))
    heads = empty(4, 128, 192)[..., 128:]
    rotate(heads, sines, sines, True, heads)


def gates() -> None:
    """With and without groups."""
    select_experts(empty(4, 128), top_k=8, normalise=True)
    select_experts(
        empty(4, 160), top_k=6, num_groups=8, topk_group=3, normalise=False, scaling=16.0
    )
    select_experts(
        empty(4, 256),
        top_k=8,
        correction=empty(256, dtype=torch.float32),
        num_groups=8,
        topk_group=4,
        group_best=2,
        sigmoid=True,
        normalise=True,
    )


def schedule() -> None:
    """The experts of DeepSeek-V2 on sixteen instances."""
    numbers = empty(16, dtype=torch.int64)
    replicas, costs = empty(160, 16, dtype=torch.int32), Costs(numbers, numbers)
    for num_rows in (512, 8192):
        ids = empty(num_rows, 6, dtype=torch.int32)
        live = empty(16, dtype=torch.bool)
        schedule_experts(ids, replicas, live, numbers, costs, (0, 160))


def brownout() -> None:
    """Both ways to serve a choice, and what is most in one program."""
    promised = PromisedRows([Level(0.5), Level(1.0, 1)], torch.zeros(512))
    for num_experts, top_k, substitution in (
        (128, 8, Substitution(way=4, instead="united")),
        (128, 8, Substitution(way=4, instead="fewer")),
        (512, 16, Substitution(way=33, instead="united")),
    ):
        ids, weights = empty(512, top_k, dtype=torch.int32), empty(512, top_k, dtype=torch.float32)
        split_choices(ids, weights, promised, LayerSubstitution(num_experts, substitution))
        homes = torch.arange(num_experts, dtype=torch.int32) // 8
        split_choices(
            ids, weights, promised, LayerSubstitution(num_experts, substitution, homes=homes)
        )


def on_less_memory() -> None:
    """As the launchers do on a GPU before Hopper."""
    modules: tuple[Any, ...] = grouped_products_module, paged_attention_module
    for module in modules:
        module.is_roomy = lambda: False
    for num_rows in (64, 4096):
        experts(num_rows)
    codes(4096, 2048, 768, WeightForm("fp8", 128))
    for num_heads in (16, 128):
        attention(1, 4096, LATENT, num_heads)
    attention(512, 4096, LATENT, 128)


CASES = {
    "sampling": lambda: pick_tokens(
        empty(64, 151_936, dtype=torch.float32), empty(5, 64, dtype=torch.int64), 44
    ),
    "gate": gates,
    "schedule": schedule,
    "brownout": brownout,
    "norm": lambda: add_rms_norm(empty(4, 7168), empty(4, 7168), empty(7168), 1e-6),
    "rows": rows_of_cache,
    "experts, decode": lambda: experts(16),
    "experts, some rows": lambda: experts(64),
    "experts, prefill": lambda: experts(4096),
    "experts, odd sizes": lambda: experts(16, 200, 136),
    "attention, decode": lambda: attention(1, 256, GROUPED, 32),
    "attention, long decode": lambda: attention(1, 4096, GROUPED, 32),
    "attention, prefill": lambda: attention(512, 4096, GROUPED, 32),
    "attention, chunk in pieces": lambda: attention(512, 8192, KVLayout.grouped(1, 128), 8),
    "latent attention, decode, 16 heads": lambda: attention(1, 4096, LATENT, 16),
    "latent attention, decode, 128 heads": lambda: attention(1, 4096, LATENT, 128),
    "latent attention, prefill": lambda: attention(512, 4096, LATENT, 128),
    "gpt-oss, decode": lambda: gpt_oss(1),
    "gpt-oss, prefill": lambda: gpt_oss(512),
    **{
        f"{name}, {rows} rows": partial(codes, rows, *sizes, form)
        for rows in (1, 64, 4096)
        for name, form, sizes in (
            ("fp8", WeightForm("fp8", 128), (2048, 768)),
            ("int4 with zeros", WeightForm("int4", 128, zeros=True), (2048, 768)),
            ("MXFP4", WeightForm("int4", 32, levels=True), (2880, 2880)),
        )
    },
    "fp8, odd sizes": partial(codes, 1, 200, 136, WeightForm("fp8", 128)),
    "int4, odd sizes": partial(codes, 1, 200, 136, WeightForm("int4", 64)),
    "less memory": on_less_memory,  # the last one: what it sets stays
}

launch = JITFunction.run

if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compile_instead
    for case in sys.argv[1:] or CASES:
        CASES[case]()
