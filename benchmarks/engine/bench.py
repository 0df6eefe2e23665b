"""Speed of generation and prefill on this machine, beside transformers and beside the machine's own limits.

The benchmark makes one model of random weights. Ours is a whole suite, asked over REST. It gets
tokenised prompts and returns text; gateway, gRPC and sampling are included. The library
transformers runs in this process at its best: one batch of equally long prompts, without a server.
Installed vLLM and llama.cpp are asked as ours is. The sides take turns at each workload, so drift
of the machine meets all of them. The machine's limits are measured before and after each turn. (For
first tokens, many streams are measured in turns, without the limits.)
"""

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common.models import qwen3_moe, write_model
from benchmarks.common.suite import DEMO
from benchmarks.common.turns import DRIFT, ratios, spread
from benchmarks.engine import int8_error
from benchmarks.engine.first_token import PROMPT_TOKENS, STREAM_TOKENS, first_tokens
from benchmarks.engine.llama_cpp import llama_cpp_build, llama_cpp_side
from benchmarks.engine.peers import vllm_side
from benchmarks.engine.sides import Prompts, Side, suite_side, transformers_side

SHAPE = qwen3_moe(
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
)
FIRST_PLAIN_TOKEN = 300  # past special tokens and single bytes
OURS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("local", "local", {}),
    ("disaggregated", "disaggregated", {}),
    ("int8", "local", {"MOESAIC_QUANTIZATION": "int8"}),
)
PEERS = ("transformers", "vllm", "llama_cpp")
VLLM, LLAMA_CPP = "MOESAIC_BENCH_VLLM", "MOESAIC_BENCH_LLAMA_CPP"  # each names a Python


@dataclass(frozen=True)
class EngineWorkload:
    """One workload: a number of prompts at once."""

    name: str
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    times: int = 1  # in each turn, one after the other

    @property
    def counted_tokens(self) -> int:
        """Tokens that its rate counts: those generated, or, where only one is, those of the prompts."""
        per_prompt = self.output_tokens if self.output_tokens > 1 else self.prompt_tokens
        return self.times * self.num_prompts * per_prompt

    def prompts(self, generator: torch.Generator) -> Prompts:
        """Draw new prompts at every call: a prefix cache must not find those of an earlier round."""
        shape = (self.num_prompts, self.prompt_tokens)
        tokens = torch.randint(FIRST_PLAIN_TOKEN, SHAPE["vocab_size"], shape, generator=generator)
        tokens[:, : self.shared_tokens] = tokens[0, : self.shared_tokens]
        return [list(map(int, row)) for row in tokens]


WORKLOADS = (
    EngineWorkload("generation_1", 1, 128, 64, times=4),
    EngineWorkload("generation_8", 8, 128, 64, times=2),
    EngineWorkload("generation_32", 32, 128, 64),
    EngineWorkload("prefill", 64, 512, 1),
    EngineWorkload("prefill_shared", 64, 512, 1, shared_tokens=384),
)

QUICK_WORKLOADS = (
    EngineWorkload("generation_1", 1, 128, 16),
    EngineWorkload("generation_8", 8, 128, 16),
    EngineWorkload("prefill", 8, 512, 1),
    EngineWorkload("prefill_shared", 8, 512, 1, shared_tokens=384),
)


def run(quick: bool) -> dict[str, Any]:
    """Measure every workload on every side, in turns; ``quick`` takes fewer prompts, one round, and no int8.

    Returns:
        ``config``; ``figures`` per workload: tokens/s of each side (median, least and most of rounds), ratios to the
        best peer, and the part of the machine's own limit; ``notes``.
    """
    rounds, workloads = (1, QUICK_WORKLOADS) if quick else (3, WORKLOADS)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory))
        theirs: Any = transformers.Qwen3MoeForCausalLM
        model = theirs.from_pretrained(directory, dtype=torch.float32).eval()
        measured = _measure(Path(directory), model, workloads, rounds, quick)
    active, flops = active_bytes(model), prefill_flops(model)
    figures: dict[str, Any] = {}
    figures["int8_error"] = int8_error.measure(num_windows=2 if quick else 16)
    for workload in workloads:
        figures[workload.name] = _figure(workload, measured, active, flops)
    figures["first_token"] = measured.first_token
    return {
        "config": {
            **SHAPE,
            "dtype": "float32",
            "rounds": rounds,
            "turns_repeated": measured.num_repeated,
            "workloads": {
                r.name: [r.num_prompts, r.prompt_tokens, r.output_tokens] for r in workloads
            },
            "times": {r.name: r.times for r in workloads},
            "first_token": [1, PROMPT_TOKENS, STREAM_TOKENS],
            "transformers": transformers.__version__,
            "llama_cpp": llama_cpp_build(python) if (python := os.environ.get(LLAMA_CPP)) else None,
            "active_bytes_per_token": active,
            "prefill_flops_per_token": flops,
            "cores": os.cpu_count(),
        },
        "figures": figures,
        "notes": [
            "first_token: of streams, one at a time; steps are of one row, as the mean gap between a stream's tokens; "
            "vLLM, llama.cpp and ours over REST, on a connection on which one other prompt has just been answered",
            "generation counts output tokens, their prefill's time included; prefill counts prompt tokens",
            "ours, vLLM, llama.cpp: a server asked over REST; transformers: one batch in this process, no server",
            "llama.cpp: its defaults, but for as many slots as the most streams that generate at once: keys and "
            "values as float16; a slot keeps its last prompt, so one that waits for a slot finds what it shares "
            "with the prompt before it, and those read at once share nothing",
            "limits: reading a large array once, and a product of two matrices of 2048; the median of what was "
            "measured before and after each turn",
            "int8_error: the demo model on held-out text, float32 against int8",
            "a share counts linear layers only: attention over the context comes on top; of prompts all layers but the"
            " last, and of that one keys and values",
            f"turns within which the product's rate changed by more than {DRIFT:.0%} were repeated, at most as often "
            "as there are rounds of the row",
            *(
                f"{peer} takes part where {variable} names its Python"
                for peer, variable in (("vllm", VLLM), ("llama_cpp", LLAMA_CPP))
                if peer not in measured.rates
            ),
            *(["quick: fewer prompts and sides, one round, the same code path"] if quick else []),
        ],
    }


def _figure(
    workload: EngineWorkload, measured: "_Measured", active: int, flops: int
) -> dict[str, Any]:
    rates = {side: values[workload.name] for side, values in measured.rates.items()}
    middle = {side: statistics.median(values) for side, values in rates.items()}
    figure: dict[str, Any] = {f"{side}_tokens_per_s": spread(v, 1) for side, v in rates.items()}
    best_peer = max(middle[side] for side in PEERS if side in middle)
    figure["ratio_vs_best_peer"] = round(middle["local"] / best_peer, 3)
    figure["disaggregated_ratio_vs_best_peer"] = round(middle["disaggregated"] / best_peer, 3)
    # Turn by turn: both sides of a turn meet the same machine.
    of_local = ratios(rates["disaggregated"], rates["local"])
    figure["disaggregated_ratio_vs_local"] = spread(of_local)
    if "int8" in middle:
        figure["ratio_int8_vs_float32"] = round(middle["int8"] / middle["local"], 3)
    limits = measured.limits[workload.name]
    figure |= {name: spread(values, 1) for name, values in limits.items()}
    if workload.name == "generation_1":
        bandwidth = statistics.median(limits["read_gbytes_per_s"]) * 1e9
        figure["share_of_memory_bandwidth"] = round(middle["local"] * active / bandwidth, 3)
    if workload.name == "prefill":
        gemm = statistics.median(limits["gemm_gflops"]) * 1e9
        figure["share_of_gemm_rate"] = round(middle["local"] * flops / gemm, 3)
    return figure


def make_model(directory: Path, shape: dict[str, Any] = SHAPE) -> None:
    """Write a float32 model of random weights to ``directory``, with a tokenizer."""
    write_model(directory, shape, "float32", tokenizer=DEMO, seed=11)


def active_bytes(model: Any) -> int:
    """Count the bytes that one token is multiplied with: all but the embedding and the experts not chosen."""
    experts, always = 0, 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        if ".experts." in name:
            experts += nbytes
        elif "embed_tokens" not in name:
            always += nbytes
    return int(always + experts * SHAPE["num_experts_per_tok"] // SHAPE["num_experts"])


def prefill_flops(model: Any) -> int:
    """Count the operations of linear layers for one token of a long prompt.

    These are all layers but the last one, and there its keys and values. The rest, which only the prompt's
    last token needs, is not counted.
    """
    last = f"layers.{SHAPE['num_hidden_layers'] - 1}."
    numbers = 0.0
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name or parameter.dim() == 1:
            continue
        if last in name and not ("k_proj" in name or "v_proj" in name):
            continue
        chosen = SHAPE["num_experts_per_tok"] / SHAPE["num_experts"] if ".experts." in name else 1
        numbers += parameter.numel() * chosen
    return int(2 * numbers)


@dataclass
class _Measured:
    rates: dict[str, dict[str, list[float]]]  # side, workload: tokens/s of each turn
    limits: dict[str, dict[str, list[float]]]  # workload, limit: before and after each turn
    first_token: dict[str, Any]  # figures
    num_repeated: int = 0


def _measure(
    directory: Path, model: Any, workloads: tuple[EngineWorkload, ...], rounds: int, quick: bool
) -> _Measured:
    generator = torch.Generator().manual_seed(5)
    with ExitStack() as running:
        sides: dict[str, Side] = {"transformers": transformers_side(model)}
        for name, topology, settings in OURS[:2] if quick else OURS:
            sides[name] = running.enter_context(suite_side(directory, topology, settings))
        if python := os.environ.get(VLLM):
            sides["vllm"] = running.enter_context(vllm_side(python, directory))
        if python := os.environ.get(LLAMA_CPP):
            streams = max(w.num_prompts for w in workloads if w.output_tokens > 1)
            sides["llama_cpp"] = running.enter_context(llama_cpp_side(python, directory, streams))
        for side in sides.values():
            # Warm up
            side.generate(workloads[0].prompts(generator), 2)
        short = EngineWorkload("first_token", 1, PROMPT_TOKENS, STREAM_TOKENS)
        first_token = first_tokens(sides, PEERS, rounds, lambda: short.prompts(generator)[0])
        measured = _Measured({side: {} for side in sides}, {}, first_token)
        for workload in workloads:
            _measure_workload(workload, rounds, sides, measured, generator)
    return measured


def _measure_workload(
    workload: EngineWorkload,
    rounds: int,
    sides: dict[str, Side],
    measured: _Measured,
    generator: torch.Generator,
) -> None:
    """Measure ``rounds`` turns of all sides; a turn in which the machine's speed changed is repeated."""
    kept, repeated = 0, 0
    limits: dict[str, list[float]] = {"gemm_gflops": [], "read_gbytes_per_s": []}
    measured.limits[workload.name] = limits
    while kept < rounds:
        gemm, read = [_gemm_rate()], [_read_rate()]
        rates = {name: _rate(side, workload, generator) for name, side in sides.items()}
        gemm.append(_gemm_rate())
        read.append(_read_rate())
        drifted = max(gemm) - min(gemm) > DRIFT * max(gemm)
        if drifted and repeated < rounds:
            repeated += 1
            continue
        kept += 1
        for name, rate in rates.items():
            measured.rates[name].setdefault(workload.name, []).append(rate)
        limits["gemm_gflops"] += gemm
        limits["read_gbytes_per_s"] += read
    measured.num_repeated += repeated


def _rate(side: Side, workload: EngineWorkload, generator: torch.Generator) -> float:
    """Tokens/s."""
    taken = 0.0
    for _ in range(workload.times):
        prompts = workload.prompts(generator)
        started = time.perf_counter()
        side.generate(prompts, workload.output_tokens)
        taken += time.perf_counter() - started
    return workload.counted_tokens / taken


def _read_rate() -> float:
    """Measure the GB/s at which all cores read memory that no cache holds."""
    array = torch.ones(64 << 20)
    started = time.perf_counter()
    for _ in range(4):
        array.sum()
    return 4 * array.numel() * 4 / (time.perf_counter() - started) / 1e9


def _gemm_rate() -> float:
    """GFLOP/s of a large matrix product."""
    size, rounds = 2048, 4
    left, right = torch.ones(size, size), torch.ones(size, size)
    left @ right
    started = time.perf_counter()
    for _ in range(rounds):
        left @ right
    return 2 * size**3 * rounds / (time.perf_counter() - started) / 1e9
