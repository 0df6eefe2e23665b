"""How fast the suite generates and prefills on this machine, beside transformers and beside what the machine allows.

One model of random weights is made on the spot. Ours is a whole suite, asked over REST: tokenised prompts in, text out,
gateway, gRPC and sampling included. transformers runs in this process and gets what suits it best, one batch of equally
long prompts, no server around it. The sides take turns within each round, so that drift of the machine meets both.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

DEMO = Path(__file__).parents[1] / "models" / "demo"  # for its tokenizer
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FIRST_PLAIN_TOKEN = 300  # past special tokens and single bytes
START_S = 120
ANSWER_S = 300.0

Prompts = list[list[int]]
Side = Callable[[Prompts, int], None]  # runs prompts to so many output tokens each


@dataclass(frozen=True)
class Row:
    """One workload: so many prompts at once."""

    name: str
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int = 0

    @property
    def counted_tokens(self) -> int:
        """What its rate counts: tokens generated, or, where one is, tokens of the prompts."""
        per_prompt = self.output_tokens if self.output_tokens > 1 else self.prompt_tokens
        return self.num_prompts * per_prompt

    def prompts(self, generator: torch.Generator) -> Prompts:
        """New ones at every call: nothing of an earlier round may be found in a prefix cache."""
        shape = (self.num_prompts, self.prompt_tokens)
        tokens = torch.randint(FIRST_PLAIN_TOKEN, SHAPE["vocab_size"], shape, generator=generator)
        tokens[:, : self.shared_tokens] = tokens[0, : self.shared_tokens]
        return [list(map(int, row)) for row in tokens]


ROWS = (
    Row("generation_1", 1, 128, 64),
    Row("generation_8", 8, 128, 64),
    Row("generation_32", 32, 128, 64),
    Row("prefill", 64, 512, 1),
    Row("prefill_shared", 64, 512, 1, shared_tokens=384),
)

QUICK_ROWS = (
    Row("generation_1", 1, 128, 16),
    Row("generation_8", 8, 128, 16),
    Row("prefill", 8, 512, 1),
    Row("prefill_shared", 8, 512, 1, shared_tokens=384),
)


def run(quick: bool) -> dict[str, Any]:
    """Measure every row on every side, in turns; ``quick`` takes fewer prompts and one round instead of three.

    Returns:
        ``config``; ``figures`` per row: tokens/s of each side (median, lowest and highest round), the ratio to
        transformers, and the share of the machine's own limit; ``notes``.
    """
    rounds, rows = (1, QUICK_ROWS) if quick else (3, ROWS)
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        samples, ceilings = _measure(Path(directory), model, rows, rounds)
    active = active_bytes(model)
    figures: dict[str, Any] = {"limits": {name: _spread(v) for name, v in ceilings.items()}}
    for row in rows:
        rates = {side: values[row.name] for side, values in samples.items()}
        figure: dict[str, Any] = {f"{side}_tokens_per_s": _spread(v) for side, v in rates.items()}
        ours, theirs = statistics.median(rates["local"]), statistics.median(rates["transformers"])
        figure["ratio_local_to_transformers"] = round(ours / theirs, 3)
        if row.name == "generation_1":
            bandwidth = statistics.median(ceilings["read_gbytes_per_s"]) * 1e9
            figure["share_of_memory_bandwidth"] = round(ours * active / bandwidth, 3)
        if row.name == "prefill":
            gemm = statistics.median(ceilings["gemm_gflops"]) * 1e9
            figure["share_of_gemm_rate"] = round(ours * active / 4 * 2 / gemm, 3)
        figures[row.name] = figure
    return {
        "config": {
            **SHAPE,
            "dtype": "float32",
            "rounds": rounds,
            "rows": {r.name: [r.num_prompts, r.prompt_tokens, r.output_tokens] for r in rows},
            "transformers": transformers.__version__,
            "active_bytes_per_token": active,
            "cores": os.cpu_count(),
        },
        "figures": figures,
        "notes": [
            "generation counts output tokens, their prefill's time included; prefill counts prompt tokens",
            "ours: a whole suite over REST; transformers: one batch in this process, no server",
            "limits: reading a large array once, and a product of two matrices of 2048",
            "a share counts linear layers only: attention over the context comes on top",
            *(["quick: fewer prompts, one round, the same code path"] if quick else []),
        ],
    }


def make_model(directory: Path) -> Any:
    """A model of random weights, saved to ``directory`` with a tokenizer, and loaded."""
    torch.manual_seed(11)
    config = transformers.Qwen3MoeConfig(**SHAPE)
    model = transformers.Qwen3MoeForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    return model


def active_bytes(model: Any) -> int:
    """Bytes of the weights that one token is multiplied with: all but the embedding and the experts not chosen."""
    experts, share = 0, 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * parameter.element_size()
        if ".experts." in name:
            experts += nbytes
        elif "embed_tokens" not in name:
            share += nbytes
    return int(share + experts * SHAPE["num_experts_per_tok"] // SHAPE["num_experts"])


def _measure(
    directory: Path, model: Any, rows: tuple[Row, ...], rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(5)
    ceilings: dict[str, list[float]] = {"read_gbytes_per_s": [], "gemm_gflops": []}
    sides: dict[str, Side] = {"transformers": lambda p, n: _generate(model, p, n)}
    with _suite(directory, "local") as local, _suite(directory, "disaggregated") as disaggregated:
        sides |= {"local": local, "disaggregated": disaggregated}
        samples: dict[str, dict[str, list[float]]] = {s: {r.name: [] for r in rows} for s in sides}
        for side in sides.values():
            side(rows[0].prompts(generator), 2)  # warm up
        for _ in range(rounds):
            for row in rows:
                for name, side in sides.items():
                    prompts = row.prompts(generator)
                    started = time.perf_counter()
                    side(prompts, row.output_tokens)
                    elapsed = time.perf_counter() - started
                    samples[name][row.name].append(row.counted_tokens / elapsed)
            ceilings["read_gbytes_per_s"].append(_read_rate())
            ceilings["gemm_gflops"].append(_gemm_rate())
    return samples, ceilings


def _generate(model: Any, prompts: Prompts, num_tokens: int) -> None:
    with torch.inference_mode():
        tokens = torch.tensor(prompts)
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            min_new_tokens=num_tokens,
            max_new_tokens=num_tokens,
            do_sample=False,
        )
    assert output.shape[1] == len(prompts[0]) + num_tokens


@contextmanager
def _suite(model: Path, topology: str) -> Iterator[Side]:
    """A suite of its own, asked over REST."""
    command = [sys.executable, "-m", "moesaic.cli"]
    with tempfile.TemporaryDirectory() as directory:
        flags = ["--model", str(model), "--topology", topology, "--port", "0", "--detach"]
        environment = {**os.environ, "MOESAIC_KV_BLOCKS": "4096"}
        subprocess.run(
            [*command, "up", *flags],
            cwd=directory,
            env=environment,
            timeout=START_S,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = json.loads((Path(directory) / "run/moesaic.json").read_text())["url"]
            with httpx.Client(base_url=url, timeout=ANSWER_S) as client:
                yield lambda prompts, num_tokens: _ask(client, model.name, prompts, num_tokens)
        finally:
            subprocess.run(
                [*command, "down"], cwd=directory, check=True, capture_output=True, timeout=START_S
            )


def _ask(client: httpx.Client, model: str, prompts: Prompts, num_tokens: int) -> None:
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    assert response.json()["usage"]["completion_tokens"] == len(prompts) * num_tokens


def _read_rate() -> float:
    """GB/s at which all cores read memory that no cache holds."""
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


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "lowest": round(min(values), 1),
        "highest": round(max(values), 1),
    }
