"""Family × topology × dtype × format: agreement with transformers, start, memory beside the plan, tokens a second.

Every case is a suite of real processes with a small random model. The demo model's tokenizer goes with it, so prompts
are token ids.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.common.suite import RunningSuite, running_suite
from benchmarks.engine.sides import openai_side
from benchmarks.memory.measure import LIMITS, MeasuredProcess, fill, memory_beside, planned_bytes
from benchmarks.models.cases import VOCAB_SIZE, ModelCase, Models, cases_of
from benchmarks.parity.configurations import CLASSES
from moesaic.cli.terminal.console import say

PROMPTS, ANSWER_TOKENS = (1, 5, 40, 200), 24
STREAMS, PROMPT_TOKENS, RATE_TOKENS = (1, 8), 32, 48
ROUNDS = 3
ANSWER_S = 300.0
EXACT = (" none", " fp8, blocks of 128 x 128")
QUICK = ("qwen3_moe", "deepseek_v3", "gpt_oss")
_MIB = 1 << 20


def run(quick: bool) -> dict[str, Any]:
    """Measure; ``quick`` has three families, apart."""
    figures: dict[str, Any] = {}
    for family in QUICK if quick else CLASSES:
        with tempfile.TemporaryDirectory() as directory:
            models = Models(family, Path(directory))
            for case in cases_of(family, quick=quick):
                figures[str(case)] = _of_case(models, case)
                say(f"{case}: {json.dumps(figures[str(case)])}")
    measured = [each for each in figures.values() if "refused" not in each]
    exact = [each["logprobs_off"] for name, each in figures.items() if _is_exact(name, each)]
    figures["all"] = {
        "cases": len(measured),
        "refused": len(figures) - len(measured),
        "exact_logprobs_off": max(exact),
        "memory_off": max((each["memory_off"] for each in measured), key=abs),
    }
    return {
        "config": {"prompts": PROMPTS, "answer_tokens": ANSWER_TOKENS, "streams": STREAMS},
        "figures": figures,
        "notes": [
            "logprobs_off: largest difference of a greedy token's log-probability from that of transformers in "
            "float32, with the float numbers that the checkpoint stands for; mean_off: the mean one",
            "likeliest: share of tokens that are transformers' likeliest ones as well",
            "memory: PSS in MiB, planned and found; memory_off: the plan's relative error, of the process with the "
            "largest",
            "exact_logprobs_off: the largest of cases without int8 and int4, which round rows to multiply as well",
        ],
    }


def _is_exact(name: str, figures: dict[str, Any]) -> bool:
    return "refused" not in figures and name.endswith(EXACT)


def _of_case(models: Models, case: ModelCase) -> dict[str, Any]:
    directory, values = models.of(case)
    flags = ("--model", str(directory), *case.flags, *LIMITS)
    began = time.monotonic()
    try:
        planned = planned_bytes(*flags)
        planned_s = time.monotonic() - began
        began = time.monotonic()
        with running_suite(*flags) as suite:
            start_s = time.monotonic() - began
            off = _logprobs_off(suite, directory.name, models.reference(values))
            rates = _rates(suite, directory.name)
            fill(suite, VOCAB_SIZE)
            memory = memory_beside(suite, planned)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        told = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        return {"refused": told[-1] if told else repr(error)}
    return {
        **off,
        "plan_s": round(planned_s, 2),
        "start_s": round(start_s, 2),
        "tokens_per_s": rates,
        "memory": {p.name: f"{p.planned // _MIB} / {p.measured // _MIB}" for p in memory},
        "memory_off": round(_worst(memory), 3),
    }


def _worst(memory: Sequence[MeasuredProcess]) -> float:
    return max((process.error for process in memory), key=abs)


def _logprobs_off(suite: RunningSuite, model: str, reference: Any) -> dict[str, float]:
    """Compare greedy answers with what the reference says of the same tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(300, VOCAB_SIZE, (size,), generator=generator).tolist() for size in PROMPTS
    ]
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    url = f"http://127.0.0.1:{suite.port}/v1/completions"
    answer = httpx.post(url, json=body, timeout=ANSWER_S).raise_for_status().json()
    off: list[float] = []
    likeliest = 0
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        ids = choice["token_ids"]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        right = logits.log_softmax(-1)
        told = torch.tensor(choice["logprobs"]["token_logprobs"])
        off += (told - right[range(len(ids)), ids]).abs().tolist()
        likeliest += int((right.argmax(-1) == torch.tensor(ids)).sum())
    return {
        "logprobs_off": float(f"{max(off):.2g}"),
        "mean_off": float(f"{statistics.mean(off):.2g}"),
        "likeliest": round(likeliest / len(off), 3),
    }


def _rates(suite: RunningSuite, model: str) -> dict[str, float]:
    """Output tokens per second of this number of streams, the median of the rounds."""
    generator = torch.Generator().manual_seed(2)
    found: dict[str, float] = {}
    with httpx.Client(base_url=f"http://127.0.0.1:{suite.port}", timeout=ANSWER_S) as client:
        side = openai_side(client, model)
        for count in STREAMS:
            rates = []
            for _ in range(ROUNDS):
                seconds = []
                for tokens in (1, 1 + RATE_TOKENS):
                    # New ones each time, for those before are cached.
                    size = (count, PROMPT_TOKENS)
                    prompts = torch.randint(300, VOCAB_SIZE, size, generator=generator).tolist()
                    began = time.perf_counter()
                    side.generate(prompts, tokens)
                    seconds.append(time.perf_counter() - began)
                rates.append(count * RATE_TOKENS / (seconds[1] - seconds[0]))
            found[str(count)] = round(statistics.median(rates), 1)
    return found
