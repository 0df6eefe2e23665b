"""Whole suites on a GPU: answers beside a CPU's, tokens a second over REST, and what brownout brings there.

The demo model shows that answers are the same, and what a step costs that computes next to nothing. A model of the
width of Qwen3-30B-A3B, of random weights and fewer layers, shows how much of the GPU a long prompt uses.
"""

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

from benchmarks.brownout import set_thresholds
from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.engine.bench import EngineWorkload
from benchmarks.engine.sides import openai_side
from moesaic.cli.terminal.outcome import CommandError, Exit

ON_GPU = {"MOESAIC_DEVICE": "cuda", "MOESAIC_THREADS": "4"}
CAPTURED = {"MOESAIC_DECODE_GRAPH_TOKENS": "512"}
LOCAL = ("--topology", "local")
APART = ("--topology", "disaggregated", "--experts", "1")
ARMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "local": (LOCAL, ON_GPU),
    "local_captured": (LOCAL, ON_GPU | CAPTURED),
    "disaggregated": (APART, ON_GPU),
    "disaggregated_captured": (APART, ON_GPU | CAPTURED),
    "disaggregated_over_host": (APART, ON_GPU | {"UCX_TLS": "tcp"}),
}
WIDE_ARMS = ("local", "local_captured", "disaggregated")
TEXTS = (
    "What is 347 + 285?",
    "Anna was in the garden. Tom worked as a baker. Then Anna went to the mill.\n\nWhere is Anna?",
    "The history of the town begins with",
    "Continue this story.\n\nAnna had a red hat. Tom had a blue kite. Anna liked the kite.",
)
DEMO_WORKLOADS = (
    EngineWorkload("generation_1", 1, 128, 128),
    EngineWorkload("generation_8", 8, 128, 128),
    EngineWorkload("generation_32", 32, 128, 128),
    EngineWorkload("prefill", 16, 512, 1),
)
WIDE_WORKLOADS = (
    EngineWorkload("generation_1", 1, 128, 64),
    EngineWorkload("generation_64", 64, 128, 64),
    EngineWorkload("prefill", 16, 2048, 1),
)
WIDE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
DEGRADED = (0, 0.0)  # way and threshold
ANSWER_S = 120


def run(quick: bool) -> dict[str, Any]:
    """Serve both models in every arm; ``quick``: the demo alone, in two arms."""
    if not torch.cuda.is_available():
        raise CommandError(
            "serving needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    rounds, layers = (1, 2) if quick else (3, 8)
    generator = torch.Generator().manual_seed(5)
    with running_suite(*LOCAL) as suite, _client(suite) as client:
        expected = _texts(client)
    demo: dict[str, Any] = {}
    for name in list(ARMS)[1:3] if quick else ARMS:
        flags, settings = ARMS[name]
        started = time.perf_counter()
        with running_suite(*flags, **settings) as suite, _client(suite) as client:
            demo[name] = {
                "start_s": round(time.perf_counter() - started, 1),
                "same_answers_as_a_cpu": _texts(client) == expected,
                **_rates(client, DEMO.name, DEMO_WORKLOADS, generator, rounds),
                "degraded": _degraded(suite, client, generator),
            }
    figures: dict[str, Any] = {"demo": demo}
    if not quick:
        figures[f"qwen3-30b-a3b, {layers} layers"] = _wide(layers, generator, rounds)
    differing = [name for name, arm in demo.items() if not arm["same_answers_as_a_cpu"]]
    return {
        "config": {"device": torch.cuda.get_device_name(), "rounds": rounds, "wide": WIDE},
        "figures": figures,
        "notes": [
            "demo: float32; the wide model: bfloat16, random weights",
            "tokens/s over REST, medians of the rounds: generated ones, their prompts in the time; prefill: of prompts",
            "share_of_gemm_rate: operations of linear layers for the prompts over the rate of a large product",
            "captured: decode steps as CUDA graphs; over_host: UCX_TLS=tcp, tensors within frames",
            "one GPU: in disaggregated, attention and experts share it",
        ],
        "failed": f"other answers than a CPU's: {', '.join(differing)}" if differing else None,
    }


def _client(suite: RunningSuite) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{suite.port}", timeout=ANSWER_S)


def _texts(client: httpx.Client) -> list[str]:
    """Greedy answers of the demo model, beyond their end: where they are longest, differences show."""
    asked = {"model": DEMO.name, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json={**asked, "prompt": list(TEXTS)})
    return [choice["text"] for choice in response.raise_for_status().json()["choices"]]


def _rates(
    client: httpx.Client,
    model: str,
    workloads: tuple[EngineWorkload, ...],
    generator: torch.Generator,
    rounds: int,
) -> dict[str, float]:
    """Tokens a second by workload, each met once before."""
    side = openai_side(client, model)
    rates = {}
    for workload in workloads:
        times = []
        for _ in range(rounds + 1):
            prompts = workload.prompts(generator)
            started = time.perf_counter()
            side.generate(prompts, workload.output_tokens)
            times.append(time.perf_counter() - started)
        rates[workload.name] = round(workload.counted_tokens / sorted(times[1:])[rounds // 2], 1)
    return rates


def _degraded(
    suite: RunningSuite, client: httpx.Client, generator: torch.Generator
) -> dict[str, float]:
    """Share and rate of an answer under brownout, after which all is exact again."""
    way, threshold = DEGRADED
    asyncio.run(set_thresholds(suite, way, threshold))
    workload = DEMO_WORKLOADS[2]
    asked = {"model": DEMO.name, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        body = {
            **asked,
            "prompt": workload.prompts(generator),
            "max_tokens": workload.output_tokens,
        }
        started = time.perf_counter()
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        taken = time.perf_counter() - started
    asyncio.run(set_thresholds(suite, way, 1.0))
    return {
        "share": answer["moesaic"]["quality"]["degraded_share"],
        workload.name: round(workload.counted_tokens / taken, 1),
    }


def _wide(layers: int, generator: torch.Generator, rounds: int) -> dict[str, Any]:
    # Needs triton
    from benchmarks.kernels.bench import Timer, gemm_rate

    peak = gemm_rate(Timer(20))
    figures: dict[str, Any] = {"gemm_bf16_tflops": round(peak / 1e12, 1)}
    with tempfile.TemporaryDirectory(prefix="moesaic-bench-") as name:
        started = time.perf_counter()
        _make(Path(name), layers)
        figures["made_s"] = round(time.perf_counter() - started, 1)
        torch.cuda.empty_cache()
        for arm in WIDE_ARMS:
            flags, settings = ARMS[arm]
            settings = settings | {
                "MOESAIC_DTYPE": "bfloat16",
                "MOESAIC_KV_BLOCKS": "4096",
                "MOESAIC_MAX_NUM_BATCHED_TOKENS": "8192",
            }
            started = time.perf_counter()
            with (
                running_suite("--model", name, *flags, **settings) as suite,
                _client(suite) as client,
            ):
                start_s = round(time.perf_counter() - started, 1)
                rates = _rates(client, Path(name).name, WIDE_WORKLOADS, generator, rounds)
            share = rates["prefill"] * _linear_operations(layers) / peak
            figures[arm] = {"start_s": start_s, **rates, "share_of_gemm_rate": round(share, 3)}
    return figures


def _make(directory: Path, layers: int) -> None:
    """Make the model on the GPU, where drawing billions of numbers takes no time, and save it."""
    torch.manual_seed(11)
    config = transformers.Qwen3MoeConfig(**WIDE, num_hidden_layers=layers, dtype="bfloat16")
    with torch.device("cuda"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((DEMO / name).read_bytes())


def _linear_operations(layers: int) -> int:
    """Operations of one token of a prompt in linear layers: attention's, the gate and the chosen experts."""
    hidden, heads = WIDE["hidden_size"], WIDE["num_attention_heads"]
    # Queries and output, keys and values.
    width = heads + WIDE["num_key_value_heads"]
    attention = 2 * width * WIDE["head_dim"] * hidden
    experts = 3 * WIDE["num_experts_per_tok"] * WIDE["moe_intermediate_size"] * hidden
    return int(2 * layers * (attention + experts + WIDE["num_experts"] * hidden))
