"""Whole suites on a GPU, each way to place experts: answers beside a CPU's, tokens a second, a death, a brownout.

The model is the demo model, so a step computes next to nothing: the rates show what else a step costs.
``moesaic bench wide`` has models that fill a device.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from benchmarks.brownout import set_thresholds
from benchmarks.common.suite import DEMO, RunningSuite, running_suite
from benchmarks.engine.bench import EngineWorkload
from benchmarks.engine.sides import COMPLETIONS, openai_side
from benchmarks.gpu.mps import WITHOUT
from moesaic.cli.terminal.outcome import CommandError, Exit

ON_GPU = {"MOESAIC_DEVICE": "cuda", "MOESAIC_THREADS": "4"}
TEXTS = (
    "What is 347 + 285?",
    "Anna was in the garden. Tom worked as a baker. Then Anna went to the mill.\n\nWhere is Anna?",
    "The history of the town begins with",
    "Continue this story.\n\nAnna had a red hat. Tom had a blue kite. Anna liked the kite.",
)
WORKLOADS = (
    EngineWorkload("generation_1", 1, 128, 128),
    EngineWorkload("generation_8", 8, 128, 128),
    EngineWorkload("generation_32", 32, 128, 128),
    EngineWorkload("prefill", 16, 512, 1),
)
DEGRADED = (0, 0.0)  # way and threshold
ANSWER_S = 120


@dataclass(frozen=True)
class ServedArm:
    """One suite.

    Attributes:
        flags: of ``moesaic up``.
        settings: of its services, besides the device.
        killed: an expert worker that is killed while it answers, and nothing else is measured; empty: none.
    """

    flags: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    killed: str = ""


APART = ("--topology", "disaggregated", "--experts", "2", "--slots-per-layer", "16")
ARMS = {
    "local": ServedArm(("--topology", "local")),
    "disaggregated": ServedArm(APART),
    "disaggregated, over the host": ServedArm(APART, {"UCX_TLS": "tcp"}),
    "gathered": ServedArm(("--topology", "gathered", "--attention", "2")),
    "offload": ServedArm(("--topology", "local", "--offload")),
    "edge": ServedArm(("--topology", "edge", "--agents", "2")),
    # A process that is killed may take the service with it that others share the device by.
    "a death": ServedArm(APART, WITHOUT, killed="expert-0"),
}
QUICK = "local", "disaggregated", "gathered", "a death"
NOTES = (
    "after_a_death: answers that were running when an expert worker was killed, and that were the same",
    "over the host: UCX_TLS=tcp, tensors within frames",
    "one GPU: processes share it, under MPS if the session says so; a death: without MPS",
)


def run(quick: bool) -> Iterator[dict[str, Any]]:
    """Serve the demo model in every arm, and tell after each; ``quick``: in four, once."""
    if not torch.cuda.is_available():
        raise CommandError(
            "serving needs a CUDA device, and a torch that was built for it", Exit.UNHEALTHY
        )
    arms = {name: ARMS[name] for name in (QUICK if quick else ARMS)}
    return served(arms, quick, NOTES)


def served(
    arms: Mapping[str, ServedArm], quick: bool, notes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Serve the demo model in every arm, three times or once; what there is to tell after each."""
    rounds = 1 if quick else 3
    with running_suite("--topology", "local", "--devices", "cpu") as suite:
        expected = asyncio.run(_texts(suite, TEXTS))
    figures: dict[str, Any] = {}
    for name, arm in arms.items():
        figures[name] = _measured(arm, expected, rounds)
        wrong = [
            name for name, figure in figures.items() if "error" in figure or not _right(figure)
        ]
        yield {
            "config": {
                "device": torch.cuda.get_device_name(),
                "rounds": rounds,
                "dtype": "float32",
            },
            "figures": figures,
            "notes": [
                "tokens/s over REST, medians: generated ones, their prompts in the time; prefill: of prompts",
                *notes,
            ],
            "failed": f"no answer, or another than a CPU's: {', '.join(wrong)}" if wrong else None,
        }


def _right(figure: dict[str, Any]) -> bool:
    died = figure.get("after_a_death", {"asked": 0, "same": 0})
    return bool(figure["same_answers_as_a_cpu"]) and died["asked"] == died["same"]


def _measured(arm: ServedArm, expected: list[str], rounds: int) -> dict[str, Any]:
    """Measure one arm; what it could not do is its result."""
    generator, started = torch.Generator().manual_seed(5), time.perf_counter()
    figure: dict[str, Any] = {}
    try:
        with running_suite(*arm.flags, **ON_GPU, **arm.settings) as suite, client_of(suite) as rest:
            figure["start_s"] = round(time.perf_counter() - started, 1)
            figure["same_answers_as_a_cpu"] = asyncio.run(_texts(suite, TEXTS)) == expected
            if arm.killed:
                figure["after_a_death"] = asyncio.run(_after_a_death(suite, arm.killed))
                return figure
            figure |= rates(rest, DEMO.name, WORKLOADS, generator, rounds)
            if "gathered" not in arm.flags and "--offload" not in arm.flags:
                figure["degraded"] = _degraded(suite, rest, generator)
            return figure
    # Later arms may still be measured, whatever this was.
    except Exception as error:
        return figure | {"error": f"{type(error).__name__}: {error}"[-400:]}


def client_of(suite: RunningSuite) -> httpx.Client:
    """Make a client of a suite's gateway."""
    return httpx.Client(base_url=f"http://127.0.0.1:{suite.port}", timeout=ANSWER_S)


async def _texts(
    suite: RunningSuite, prompts: Sequence[str], begun: asyncio.Event | None = None
) -> list[str]:
    """Collect greedy answers beyond their end: where they are longest, differences show.

    They are streamed; ``begun`` is set by the first text.
    """

    async def answer(client: httpx.AsyncClient, prompt: str) -> str:
        asked = {"model": DEMO.name, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
        body, text = {**asked, "prompt": prompt, "stream": True}, ""
        async with client.stream("POST", COMPLETIONS, json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "choices" not in event:
                    return f"{text}<{event}>"
                text += "".join(choice["text"] for choice in event["choices"])
                if text and begun is not None:
                    begun.set()
        return text

    url = f"http://127.0.0.1:{suite.port}"
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
        return list(await asyncio.gather(*(answer(client, prompt) for prompt in prompts)))


async def _after_a_death(suite: RunningSuite, killed: str) -> dict[str, int]:
    """Count the answers that stay the same although an expert worker dies in their middle."""
    prompts = [f"The {number}th man went to London and" for number in range(8)]
    expected, begun = await _texts(suite, prompts), asyncio.Event()
    running = asyncio.create_task(_texts(suite, prompts, begun))
    await asyncio.wait([running, asyncio.create_task(begun.wait())], return_when="FIRST_COMPLETED")
    os.kill(int(suite.processes[killed]["pid"]), signal.SIGKILL)
    texts = await running
    same = sum(one == other for one, other in zip(texts, expected, strict=True))
    return {"asked": len(prompts), "same": same}


def rates(
    client: httpx.Client,
    model: str,
    workloads: tuple[EngineWorkload, ...],
    generator: torch.Generator,
    rounds: int,
) -> dict[str, float]:
    """Measure tokens a second by workload, each met once before."""
    side = openai_side(client, model)
    found = {}
    for workload in workloads:
        times = []
        for _ in range(rounds + 1):
            prompts = workload.prompts(generator)
            started = time.perf_counter()
            side.generate(prompts, workload.output_tokens)
            times.append(time.perf_counter() - started)
        found[workload.name] = round(workload.counted_tokens / sorted(times[1:])[rounds // 2], 1)
    return found


def _degraded(
    suite: RunningSuite, client: httpx.Client, generator: torch.Generator
) -> dict[str, float]:
    """Measure share and rate of an answer under brownout, after which all is exact again."""
    way, threshold = DEGRADED
    asyncio.run(set_thresholds(suite, way, threshold))
    workload = WORKLOADS[2]
    asked = {"model": DEMO.name, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        body = {
            **asked,
            "prompt": workload.prompts(generator),
            "max_tokens": workload.output_tokens,
        }
        started = time.perf_counter()
        answer = client.post(COMPLETIONS, json=body).raise_for_status().json()
        taken = time.perf_counter() - started
    asyncio.run(set_thresholds(suite, way, 1.0))
    return {
        "share": answer["moesaic"]["quality"]["degraded_share"],
        workload.name: round(workload.counted_tokens / taken, 1),
    }
