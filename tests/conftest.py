"""Hooks for all tests, and a tiny checkpoint with the network it was exported from as its reference."""

import asyncio
import functools
import gc
import inspect
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from safetensors.torch import save_file

from models.training.network import Network, Shape
from tests.waiting import HANG_S

# Until all tests are known: hardly anything that imports make is garbage.
gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in a shell's background: commands under test would inherit it, and take no Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests start processes by the hundred: each would compile what the one before it has compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Read by processes of pytest-xdist, which start after this: threads of one that spin while they wait would take the
# cores from the other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, be it by torch: here kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# How long an example takes says more of the machine than of what is tested. A commit has one result, so examples are
# the same in each run; ``make nightly`` draws others, by a seed that it prints.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("nightly", deadline=None, print_blob=True)
settings.load_profile("fixed")

TINY = Shape(
    vocab_size=160,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    num_experts=8,
    top_k=2,
    expert_size=16,
    max_positions=512,
)


# Of the examples that a property asks for, one in so many is tried, by tier; ``ALL_EXAMPLES=1`` tries all.
EXAMPLES_PER_TRY = {"quick": 5, "rest": 2, "rest-turn": 2, "all": 2, "nightly": 1}
# Of a test's time limit, what it may wait itself before its process is stopped.
OWN_SHARE = 0.8
# Tests of these folders, and those that use these fixtures of a folder, start whole suites or
# services that live long.
SUITE_FOLDERS = ("clients", "compose", "soak", "system")
SUITE_FIXTURES = {"cli": {"run", "scheduler", "start", "suite"}, "scheduler": {"suite"}}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts suites, and try fewer examples than tests ask for."""
    scaled: set[object] = set()
    per_try = EXAMPLES_PER_TRY.get(config.getoption("--tier", None) or "quick", 5)
    for item in items:
        folder, used = _folder(item), set(getattr(item, "fixturenames", ()))
        if folder in SUITE_FOLDERS or used & SUITE_FIXTURES.get(folder, set()):
            item.add_marker("suite")
        if "ALL_EXAMPLES" not in os.environ and not item.get_closest_marker("gpu"):
            _try_fewer_examples(item, per_try, scaled)
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _ended_in_time(item.obj, _may_wait_s(item))
    items.sort(key=lambda item: _folder(item) != "system")  # the longest first


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and not among modules and tests: they stay, and are most of what there is."""
    gc.freeze()
    gc.enable()


def _may_wait_s(item: pytest.Item) -> float | None:
    """The part of a test's limit that it may wait itself; None: it has no limit."""
    if not item.config.pluginmanager.hasplugin("timeout"):
        return None
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
    return limit_s * OWN_SHARE or None


def _ended_in_time(
    test: Callable[..., Awaitable[None]], seconds: float | None
) -> Callable[..., Awaitable[None]]:
    """Cancel a test that waits too long: the signal of pytest-timeout is not heard where uvloop waits."""

    @functools.wraps(test)
    async def ended(*args: object, **kwargs: object) -> None:
        async with asyncio.timeout(seconds):
            await test(*args, **kwargs)

    return ended


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def _try_fewer_examples(item: pytest.Item, per_try: int, done: set[object]) -> None:
    """Try a property with one in ``per_try`` of the examples that it asks for."""
    machine, test = getattr(item, "cls", None), getattr(item, "function", None)
    chosen = "_hypothesis_internal_use_settings"  # nothing public scales what a test has chosen
    for owner, name in ((machine, "settings"), (test, chosen)):
        asked = getattr(owner, name, None)
        if owner not in done and isinstance(asked, settings):
            setattr(
                owner,
                name,
                settings(asked, max_examples=max(asked.max_examples // per_try, 5)),
            )
            done.add(owner)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test what the suites of processes it used have logged."""
    report = yield
    if report.failed:
        for name, used in getattr(item, "funcargs", {}).items():
            # Not by its class, whose imports the machine of `make gpu` may lack.
            if hasattr(used, "story"):
                with suppress(OSError, ValueError):  # of a suite that has ended
                    report.sections.append((f"suite {name}", used.story()))
    return report


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Compute alike on any number of cores. Small models gain nothing from threads, which wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Give each test the same random numbers, whichever tests ran before it in this process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Real Redis servers of this process of tests."""
    from tests.redis_servers import (
        RedisServers,  # the machine of `make gpu` may lack what it imports
    )

    servers = RedisServers(tmp_path_factory.mktemp("redis"))
    yield servers
    servers.close()


@pytest.fixture
def patient_with_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections made from now on wait for Redis as long as it takes: a busy machine is no outage.

    For tests that assert that nothing was taken for an outage.
    """
    for name in ("COMMAND_TIMEOUT_S", "BLOCK_S"):
        monkeypatch.setattr(f"moesaic.cluster.redis.connection.{name}", HANG_S)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A collector of traces, which has all spans of this process once ``spans.sent`` is over."""
    from tests.telemetry.collector import (
        collecting,  # the machine of `make gpu` may lack what it imports
    )

    monkeypatch.setattr("moesaic.telemetry.otlp.LAST_SPANS_S", HANG_S)
    with collecting() as collector:
        yield collector


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint directory and its reference."""

    directory: Path
    network: Network

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Reference logits ``[T, V]`` of one sequence, by one forward pass without a cache."""
        length = len(tokens)
        mask = torch.ones(length, length).tril().bool()[None, None]
        hidden, _, _ = self.network(torch.tensor(tokens)[None], mask, torch.arange(length)[None])
        return self.network.logits(hidden[0])

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Reference continuation by ``count`` tokens."""
        tokens = list(tokens)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[-count:]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Random weights, scaled so that logits and gates are far from uniform."""
    torch.manual_seed(7)
    network = Network(TINY).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            scale = 3.0 if "gate.weight" in name else 1.5
            parameter.mul_(scale if parameter.ndim > 1 else 1.0)
            parameter.copy_(parameter.bfloat16().float())  # what the exported file holds
    directory = tmp_path_factory.mktemp("tiny-moe")
    config = TINY.hf_config({"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0})
    (directory / "config.json").write_text(json.dumps(config))
    save_file(network.hf_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return TinyModel(directory, network)
