"""Speed that brownout brings: tokens a second beside threshold 1, at the paper's points and with fewer experts.

Two models of random weights: that of ``bench engine`` (32 experts), and one of Qwen1.5-MoE's shape at half its width
(60 experts and a shared one). Their united experts are the means of their groups: what they say does not matter here,
only what it costs. In each suite the way is changed while it serves; then threshold 1 and the point take turns, so that
both meet the same machine and the same kernels.
"""

import asyncio
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.common.turns import ratios, spread
from benchmarks.engine.bench import SHAPE, EngineWorkload, make_model
from benchmarks.engine.sides import openai_side
from moesaic.cluster.rpc.channels import channel
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.digest import weights_digest
from moesaic.models.weights.experts import load_expert
from moesaic.models.weights.united import UnitedManifest, write_united
from moesaic.v1 import attention_pb2, attention_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

POINTS = ((2, 0.0), (4, 0.2), (8, 0.4))  # ways and thresholds, of the paper's Table I
FEWER = ((0, 0.2), (0, 0.0))  # without united experts: rows make do with fewer of their own
PAPER = {"speedup": [1.07, 1.32], "with": "a fused expert kernel, as both sides have here"}
TOPOLOGIES = ("local", "disaggregated")
SIXTY: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 704,
    "shared_expert_intermediate_size": 2816,
    "intermediate_size": 2816,
    "norm_topk_prob": False,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WORKLOADS = (
    EngineWorkload("generation_8", 8, 64, 64),
    EngineWorkload("generation_32", 32, 64, 48),
    EngineWorkload("prefill", 16, 512, 1),
)
ANSWER_S, CHANGE_S, POLL_S = 600, 300, 0.2


def run(quick: bool) -> dict[str, Any]:
    """Measure every model, topology, point and workload, in turns; ``quick``: one model and one round."""
    rounds = 1 if quick else 5
    shapes: dict[str, tuple[Any, Any, dict[str, Any]]]
    shapes = {"32_experts": (transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig, SHAPE)}
    if not quick:
        sixty = (transformers.Qwen2MoeForCausalLM, transformers.Qwen2MoeConfig, SIXTY)
        shapes["60_experts"] = sixty
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped there
    figures: dict[str, Any] = {}
    for name, (model, config, shape) in shapes.items():
        with tempfile.TemporaryDirectory(prefix="moesaic-bench-") as directory:
            _make(Path(directory), model, config, shape)
            for topology in TOPOLOGIES:
                measured = _measure(directory, topology, rounds)
                figures[f"{name}_{topology}"] = measured
    best = max(each["speedup"][0] for of in figures.values() for each in of.values())
    return {
        "config": {
            "shapes": {"32_experts": SHAPE, "60_experts": SIXTY},
            "dtype": "float32",
            "points": [list(point) for point in (*POINTS, *FEWER)],
            "workloads": {
                w.name: [w.num_prompts, w.prompt_tokens, w.output_tokens] for w in WORKLOADS
            },
            "rounds": rounds,
        },
        "figures": {**figures, "best_speedup": best},
        "paper": PAPER,
        "notes": [
            "speedup: tokens/s at the point over threshold 1, in turns; median of the turns, lowest and highest",
            "degraded: of the choices of experts, those that were not served by their own",
            "generation counts output tokens, their prefill's time included; prefill counts prompt tokens",
            "60 experts: Qwen1.5-MoE's shape at half its width, 4 of its 24 layers",
            "way 0: no united experts, each row keeps its heaviest expert and those that stay",
            "united experts are means: this measures their cost, bench brownout-accuracy their quality",
            *(["quick: one model, one round, the same code path"] if quick else []),
        ],
    }


def _make(directory: Path, model: Any, config: Any, shape: dict[str, Any]) -> None:
    """Make a model of random weights, with files of united experts of all ways."""
    if shape is SHAPE:
        make_model(directory)
    else:
        torch.manual_seed(11)
        model(config(**shape)).save_pretrained(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (directory / name).write_bytes((DEMO / name).read_bytes())
    served = load_config(directory)
    checkpoint = Checkpoint(directory)
    for way, _ in POINTS:
        _write_means(directory, checkpoint, served, way)


def _write_means(directory: Path, checkpoint: Checkpoint, config: ModelConfig, way: int) -> None:
    num_experts, cpu = config.moe.num_experts, torch.device("cpu")
    groups = Substitution(way=way).num_united(num_experts)
    experts = {}
    for layer in config.moe_layers:
        read = [
            load_expert(checkpoint, config, layer, e, torch.float32, cpu).numbers(torch.float32)
            for e in range(num_experts)
        ]
        for group in range(groups):
            own = read[group * way : (group + 1) * way]
            experts[layer, group] = (
                torch.stack([gate_up for gate_up, _ in own]).mean(dim=0).bfloat16(),
                torch.stack([down for _, down in own]).mean(dim=0).bfloat16(),
            )
    unknown: dict[int, list[float | None]] = {layer: [None] * groups for layer in config.moe_layers}
    manifest = UnitedManifest(
        way=way,
        model_digest=weights_digest(checkpoint.files),
        rows=0,
        recipe={},
        errors=unknown,
        mean_errors=unknown,
    )
    write_united(directory, manifest, experts)


@dataclass(frozen=True)
class _Turns:
    """One workload at one point."""

    exact: list[float]  # tokens/s of each turn
    degraded: list[float]
    share: float

    def figures(self) -> dict[str, Any]:
        return {
            "exact_tokens_per_s": round(statistics.median(self.exact), 1),
            "degraded_tokens_per_s": round(statistics.median(self.degraded), 1),
            "speedup": spread(ratios(self.degraded, self.exact)),
            "degraded": round(self.share, 3),
        }


def _measure(directory: str, topology: str, rounds: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(5)
    with ExitStack() as stack:
        suite = stack.enter_context(
            running_suite(*("--model", directory, "--topology", topology), MOESAIC_KV_BLOCKS="4096")
        )
        client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{suite.port}", timeout=ANSWER_S)
        )
        side = openai_side(client, Path(directory).name)
        for way, threshold in (*POINTS, *FEWER):
            asyncio.run(set_thresholds(suite, way, 1.0))
            for workload in WORKLOADS:
                # Warm up
                side.generate(workload.prompts(generator), 2)
            turns: dict[str, tuple[list[float], list[float]]] = {
                w.name: ([], []) for w in WORKLOADS
            }
            for _ in range(rounds):
                for at, reached in enumerate((1.0, threshold)):
                    asyncio.run(set_thresholds(suite, way, reached))
                    for workload in WORKLOADS:
                        prompts = workload.prompts(generator)
                        started = time.perf_counter()
                        side.generate(prompts, workload.output_tokens)
                        taken = time.perf_counter() - started
                        turns[workload.name][at].append(workload.counted_tokens / taken)
            for workload in WORKLOADS:
                share = _share(client, workload, generator, Path(directory).name)
                measured = _Turns(*turns[workload.name], share)
                figures[f"way_{way}_threshold_{threshold}_{workload.name}"] = measured.figures()
    return figures


def _share(
    client: httpx.Client, workload: EngineWorkload, generator: torch.Generator, model: str
) -> float:
    """The degraded share that answers tell, of one more turn."""
    answer = client.post(
        "/v1/completions",
        json={
            "model": model,
            "prompt": workload.prompts(generator),
            "max_tokens": workload.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
        },
    ).json()
    return float(answer["moesaic"]["quality"]["degraded_share"])


async def set_thresholds(suite: RunningSuite, way: int, threshold: float) -> None:
    """Set a policy, and wait until steps follow it."""
    scheduler = suite.processes["scheduler"]["admin_address"]
    policy = scheduler_pb2.BrownoutPolicy(
        mode="manual", way=way, prefill_threshold=threshold, decode_threshold=threshold
    )
    async with (
        channel(scheduler, "scheduler") as to_scheduler,
        channel(suite.attention_address, "attention-0") as to_worker,
        asyncio.timeout(CHANGE_S),
    ):
        plans = scheduler_pb2_grpc.SchedulerServiceStub(to_scheduler)
        worker = attention_pb2_grpc.AttentionServiceStub(to_worker)
        await plans.SetBrownout(scheduler_pb2.SetBrownoutRequest(policy=policy))
        while True:
            await asyncio.sleep(POLL_S)
            load = (await worker.GetLoad(attention_pb2.GetLoadRequest())).brownout
            if (load.decode_threshold, load.prefill_threshold) != (threshold, threshold):
                continue
            if "expert-0" not in suite.processes:
                # It adopts the way before the thresholds.
                return
            placed = await plans.GetPlacement(scheduler_pb2.GetPlacementRequest())
            substitution = placed.placement.substitution
            if (substitution.way, substitution.instead) == (way, "united" if way else "fewer"):
                return
