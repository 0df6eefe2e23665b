"""Experts come and go beside the engines."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import pytest
import torch

from benchmarks.common.placements import placed_worker, placement_of
from moesaic.cluster.placements import decode_placement, encode_placement
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.pace import LoadPace
from moesaic.messages.placement import Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.expert.settings import ExpertSettings
from moesaic.services.expert.weights import give_experts
from moesaic.transport.frame import Frame
from moesaic.transport.ucx import opening
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.transport.ucx.parcels import UcxParcels

CPU, FP32 = torch.device("cpu"), torch.float32
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def from_nowhere(layer: int, expert: int) -> LoadedExpert:
    raise AssertionError(f"no peer gave expert {expert} of layer {layer}")


@pytest.fixture(params=[False, True], ids=["whole frames", "parcels"])
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if experts travel as parcels, as between GPUs, from and to the CPU's memory."""
    if request.param:
        monkeypatch.setattr(opening, "UcxNetwork", network_with_parcels)
    return bool(request.param)


def network_with_parcels(*args: Any, **kw: Any) -> UcxNetwork:
    return UcxNetwork(*args, **{**kw, "device": CPU})


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """Frames whose tensors came apart from them."""
    frames: list[Frame] = []
    fetch = UcxParcels.fetch

    def note(self: UcxParcels, frame: Frame, take: Any) -> None:
        frames.append(frame)
        fetch(self, frame, take)

    monkeypatch.setattr(UcxParcels, "fetch", note)
    return frames


@asynccontextmanager
async def two_workers(tiny_model: Any) -> AsyncIterator[Any]:
    """Two workers that give experts; half of all each, and about to change places."""
    config, checkpoint = load_config(tiny_model.directory), Checkpoint(tiny_model.directory)
    model, secret = str(tiny_model.directory), "the secret"
    async with AsyncExitStack() as parts:
        hosts = [ExpertHost(checkpoint, config, name, 8, FP32, CPU) for name in ("a", "b")]
        exchanges = [
            await give_experts(
                ExpertSettings(model=model, secret=secret, worker_id=name), 0, config, host, parts
            )
            for name, host in zip(("a", "b"), hosts, strict=True)
        ]

        def placement(epoch: int, slots: list[list[int]]) -> Placement:
            placed = placement_of(
                [
                    placed_worker(name, weights_address=address)
                    for name, (address, _) in zip(("a", "b"), exchanges, strict=True)
                ],
                slots,
                config.moe_layers,
                8,
                epoch=epoch,
                model_digest=config.digest,
            )
            return decode_placement(encode_placement(placed))  # as a request brings it

        serving, swapped = placement(1, HALVES), placement(2, HALVES[::-1])
        for host in hosts:
            host.loader.prepare(serving)
            host.epochs.commit(1)
        yield config, hosts, exchanges, serving, swapped


async def test_they_do_while_every_other_thread_of_both_workers_is_held_up(
    tiny_model: Any, apart: bool, fetched: list[Frame]
) -> None:
    async with two_workers(tiny_model) as (config, hosts, exchanges, serving, swapped):
        for host, (_, peers) in zip(hosts, exchanges, strict=True):
            # In one go, on the very thread on which all else would run: it waits for the experts.
            with closing(peers.pulling(serving, LoadPace())) as pulling:
                result = host.loader.prepare(swapped, pulling.or_else(from_nowhere))
            assert result.loaded == pulling.pulled == 4 * len(config.moe_layers)
        assert bool(fetched) == apart
        for layer in config.moe_layers:
            for expert in range(8):
                ways = [host.epochs.held(layer, expert) for host in hosts]
                ways += [hosts[0].files.bring(LoadPace())(layer, expert)]
                held = [way for way in ways if way is not None]
                for way in held:
                    assert torch.equal(way.packed, held[-1].packed)


async def test_a_damaged_expert_is_found_where_it_arrives(
    tiny_model: Any, apart: bool, fetched: list[Frame]
) -> None:
    async with two_workers(tiny_model) as (_, hosts, exchanges, serving, swapped):
        hosts[1].epochs.held(0, 5).packed[100] ^= 1  # since it was read
        read = hosts[0].files.bring(LoadPace())
        from_file = []

        def instead(layer: int, expert: int) -> LoadedExpert:
            from_file.append((layer, expert))
            return read(layer, expert)

        with closing(exchanges[0][1].pulling(serving, LoadPace())) as pulling:
            hosts[0].loader.prepare(swapped, pulling.or_else(instead))

        assert from_file == [(0, 5)]
        assert bool(fetched) == apart
        assert torch.equal(hosts[0].epochs.held(0, 5).packed, read(0, 5).packed)
