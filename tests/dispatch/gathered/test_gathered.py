"""Experts that come to the rows give the same bits as experts that were there, whatever happens to their sources."""

import mmap
import os
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from benchmarks.common.inprocess import InProcessNetwork
from benchmarks.parity.cases import ParityCase, Served, build_reference, prompt_of
from moesaic.dispatch.gathered.peers import Peer
from moesaic.dispatch.gathered.ring import Fill
from moesaic.errors import CheckpointError, ExpertUnavailable, InvalidInput
from moesaic.experts.loaded import layout_of
from moesaic.experts.pull.frames import PULL_LIMITS, contents_digest
from moesaic.models.configuration.config import load_config
from moesaic.models.layers.step_batch import StepBatch
from moesaic.transport.frame import Frame, FrameKind
from tests.dispatch import dispatcher_contract as contract
from tests.dispatch.gathered.streams import LateStreams, ThreadStreams
from tests.waiting import until

FAMILIES = [
    ParityCase(family, "seven layers", {"num_hidden_layers": 7})
    for family in (
        *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss"),
        *("olmoe", "granitemoe", "granitemoeshared", "ernie4_5_moe", "minimax_m2"),
    )
]


def gathered_from(source: str) -> float:
    return REGISTRY.get_sample_value("moesaic_gather_fetched_bytes_total", {"source": source}) or 0


@pytest.fixture(params=[ThreadStreams, LateStreams])
def twin(request: pytest.FixtureRequest) -> Any:
    """Streams of a device that is a second buffer of the host's."""
    return request.param


class TestGathered(contract.DispatcherContract, contract.OwnStepsContract):
    @pytest.fixture
    async def opened(self, start: Any, deep: Path) -> AsyncIterator[contract.Opened]:
        async with start(deep, 2) as workers:
            yield workers.opened(0)


class TestGatheredOnADevice(contract.DispatcherContract, contract.OwnStepsContract):
    """Its twin on a CPU: every layer is copied to a buffer of its own, and computed there."""

    @pytest.fixture
    async def opened(self, start: Any, deep: Path, twin: Any) -> AsyncIterator[contract.Opened]:
        async with start(deep, 2, streams=twin) as workers:
            yield workers.opened(0)


@pytest.mark.parametrize("window", [1, 2, 7])
@pytest.mark.parametrize(("count", "offload"), [(1, True), (1, False), (2, False), (3, True)])
async def test_buffers_of_a_device_have_the_bits_of_local_experts(
    deep: Path, start: Any, count: int, offload: bool, window: int, twin: Any
) -> None:
    async with start(deep, count, offload=offload, window=window, streams=twin) as workers:
        for rows in (1, 9, 130):
            await workers.step(count - 1, rows)
        for layer in workers.layers:
            for _ in range(2):
                await workers.slice(layer)
        await workers.step()
        times = workers.workers[0].mover.transfer_s
        assert sorted(times) == list(workers.workers[0].plan.gathered_layers)


async def test_a_lost_holder_costs_a_device_no_step(deep: Path, start: Any, twin: Any) -> None:
    async with start(deep, 3, streams=twin) as workers:
        await workers.step()
        before = gathered_from("checkpoint")

        await workers.networks[1].close()

        for upto in (None, 3, None):
            await workers.step(upto=upto)
        assert gathered_from("checkpoint") > before


async def test_a_layer_that_cannot_be_had_leaves_a_device_to_the_next_step(
    deep: Path, start: Any, twin: Any, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(deep, damaged)
    async with start(damaged, 3, linked=False, streams=twin) as workers:
        await workers.step()
        whole = (damaged / "model.safetensors").read_bytes()
        os.truncate(damaged / "model.safetensors", 10_000)
        with pytest.raises(CheckpointError, match="has changed while in use"):
            await workers.step()
        (damaged / "model.safetensors").write_bytes(whole)

        holders = workers.workers[0].holders
        holders.set_peers(workers.peers)
        await holders.complete()

        await workers.step()


@pytest.mark.parametrize("window", [1, 2, 7])
@pytest.mark.parametrize(("count", "offload"), [(1, True), (2, False), (3, False), (3, True)])
async def test_any_window_and_any_sources_give_the_bits_of_local_experts(
    deep: Path, start: Any, count: int, offload: bool, window: int
) -> None:
    async with start(deep, count, offload=offload, window=window) as workers:
        for worker in range(count):
            for rows in (1, 9, 130):
                await workers.step(worker, rows)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
async def test_every_family_gives_the_bits_of_local_experts(
    case: Any, tmp_path: Path, start: Any
) -> None:
    build_reference(case, tmp_path)

    async with start(tmp_path, 2, offload=True) as workers:
        for _ in range(3):
            await workers.step(1)


@pytest.mark.parametrize(
    "form",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"quantization": "int8"},
        {"dtype": torch.bfloat16, "quantization": "int4"},
    ],
)
async def test_other_forms_of_weights_are_gathered_as_well(
    deep: Path, start: Any, form: dict[str, Any]
) -> None:
    async with start(deep, 2, **form) as workers:
        await workers.step()


@pytest.mark.parametrize("window", [1, 2])
async def test_the_slices_of_a_sweep_fetch_each_layer_once(
    deep: Path, start: Any, window: int
) -> None:
    async with start(deep, 2, window=window) as workers:
        await workers.step()
        plan = workers.workers[0].plan
        layer_bytes = plan.ring_bytes // plan.num_buffers
        before = gathered_from("worker-1")
        for _ in range(2):
            for layer in workers.layers:
                for _ in range(3):
                    await workers.slice(layer)
        gathered = gathered_from("worker-1") - before

        # Two sweeps, less what the step left ready; at most what is gathered ahead is more.
        num_gathered = len(plan.gathered_layers)
        assert gathered <= (2 * num_gathered + plan.num_buffers) * layer_bytes
        assert gathered >= (2 * num_gathered - plan.num_buffers) * layer_bytes
        await workers.step()


async def test_slices_and_steps_in_turns_give_the_bits_of_local_experts(
    deep: Path, start: Any
) -> None:
    async with start(deep, 2) as workers:
        for number, layer in enumerate(2 * workers.layers):
            await workers.slice(layer)
            await workers.step(upto=(None, 2)[number % 2])
            await workers.slice(layer)


async def test_a_fill_that_nobody_wants_any_more_never_passes_for_done(
    deep: Path, start: Any
) -> None:
    async with start(deep, 2) as workers:
        fill = Fill(layer=workers.layers[1], buffer=0, after=None, wanted=False)

        workers.workers[0].mover.start(fill)
        await fill.ended()

        assert isinstance(fill.done.exception(), ExpertUnavailable)


async def test_a_lost_holder_costs_no_step(deep: Path, start: Any) -> None:
    async with start(deep, 3) as workers:
        await workers.step()
        before = gathered_from("checkpoint")

        await workers.networks[1].close()

        for _ in range(3):
            await workers.step()
        assert gathered_from("checkpoint") > before
        assert workers.workers[0].holders.missing == [workers.workers[1].plan.share]


async def test_without_peers_the_checkpoint_has_everything(deep: Path, start: Any) -> None:
    async with start(deep, 2, linked=False) as workers:
        await workers.step()
        await workers.step()


async def test_two_holders_of_a_share_both_give(deep: Path, start: Any) -> None:
    async with start(deep, 2) as workers:
        holders, other = workers.workers[0].holders, workers.workers[1]
        twin = InProcessNetwork("twin", b"secret", PULL_LIMITS, workers.hub)
        address = await twin.listen("memory", 0, other.server.answer)
        peers = [workers.peers[1], Peer("twin", 1, address, other.plan.share)]
        before = gathered_from("twin"), gathered_from("worker-1")
        holders.set_peers(peers)
        one_by_one = [(0, 64), (64, 64)], ()
        layer = workers.layers[1]
        await until(lambda: len(holders.divide(other.plan.share, layer, *one_by_one)[0]) == 2)

        await workers.step()
        await workers.step()

        await twin.close()
        assert gathered_from("twin") > before[0]
        assert gathered_from("worker-1") > before[1]
        await workers.step()


async def test_a_peer_with_other_bytes_is_refused_and_made_up_for(deep: Path, start: Any) -> None:
    async with start(deep, 2) as workers:
        server = workers.workers[1].server

        def of_another_processor(request: Frame) -> Any:
            return server.answer(replace(request, digest=request.digest ^ 1))

        workers.answers[1] = of_another_processor

        await workers.step()
        await workers.step()

        assert gathered_from("checkpoint") > 0


@pytest.mark.parametrize("offload", [False, True])
async def test_a_damaged_share_of_a_peer_is_made_up_for(
    deep: Path, start: Any, offload: bool, tmp_path: Path
) -> None:
    name = "moesaic_gather_damaged_pulls_total"
    async with start(deep, 2, offload=offload) as workers:
        before = REGISTRY.get_sample_value(name) or 0.0
        shard, layers = workers.workers[1].shard, workers.workers[1].plan.gathered_layers
        if offload:
            [file] = (tmp_path / "offloaded" / "1").glob("*.packed")
            with mmap.mmap(os.open(file, os.O_RDWR), 0) as content:
                content[-1] ^= 64
        else:
            shard.rows[layers[-1]][-1, -1] ^= 64

        await workers.step()
        await workers.step()

        assert REGISTRY.get_sample_value(name) == before + 1


async def test_a_file_that_was_damaged_at_rest_is_made_anew(
    deep: Path, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for damage in ("none", "a bit", "digests gone"):
        async with start(deep, offload=True) as workers:
            await workers.step()
            await workers.step()
        [file] = (tmp_path / "offloaded").rglob("*.packed")
        if damage == "none":
            first, inode = file.read_bytes(), file.stat().st_ino
            assert file.stat().st_ino == inode
        if damage == "a bit":
            assert file.stat().st_ino == inode  # used again
            file.write_bytes(first[:-1] + bytes([first[-1] ^ 64]))
        if damage == "digests gone":
            assert file.read_bytes() == first
            file.with_suffix(".digests").unlink()
    async with start(deep, offload=True) as workers:
        await workers.step()
    assert file.read_bytes() == first


@pytest.mark.parametrize(
    ("layer", "part"),
    [
        (0, [0, 64]),
        (1, [0, 0]),
        (1, [-64, 64]),
        (1, [0, 63]),
        (1, [0, 1 << 40]),
        (1, [1 << 62, 64]),
        (99, [0, 64]),
    ],
)
async def test_a_pull_of_what_is_not_there_is_refused(
    deep: Path, start: Any, layer: int, part: list[int]
) -> None:
    async with start(deep, 2) as workers:
        config, share = load_config(deep), workers.workers[0].plan.share
        digest = contents_digest(config.digest, layout_of(config, torch.float32, "none"), share)
        pull = Frame(
            kind=FrameKind.REQUEST, layer=1, digest=digest, tensors=[torch.tensor([[0, 64]])]
        )
        await workers.workers[0].server.answer(pull)

        with pytest.raises(InvalidInput):
            await workers.workers[0].server.answer(
                replace(pull, layer=layer, tensors=[torch.tensor([part])])
            )


async def test_a_damaged_file_is_made_up_for(deep: Path, start: Any, tmp_path: Path) -> None:
    async with start(deep, offload=True) as workers:
        await workers.step()
        [file] = (tmp_path / "offloaded").rglob("*.packed")
        os.truncate(file, 100)

        await workers.step()
        await workers.step()


async def test_whole_models_give_the_same_logits(deep: Path, start: Any) -> None:
    served = Served(deep)
    tokens, table = prompt_of(40, seed=1), [0, 1, 2]

    async def logits(dispatcher: Any) -> torch.Tensor:
        batch = StepBatch(tokens, list(range(40)), [40], [table], wanted=[40])
        step, cache = dispatcher.begin_step(), served.decoder.new_kv_cache(3)
        got = await served.decoder.forward(
            batch, cache, lambda layer, hidden: dispatcher.dispatch(step, layer, hidden)
        )
        dispatcher.end_step(step)
        return got

    async with start(deep, 2, offload=True) as workers:
        expected = await logits(workers.local)
        for _ in range(2):
            assert torch.equal(await logits(workers.workers[0].dispatcher), expected)


async def test_a_damaged_checkpoint_fails_the_step_and_says_why(
    deep: Path, start: Any, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(deep, damaged)
    async with start(damaged, 3, linked=False) as workers:
        await workers.step()
        os.truncate(damaged / "model.safetensors", 10_000)

        with pytest.raises(CheckpointError, match="has changed while in use"):
            await workers.step()
