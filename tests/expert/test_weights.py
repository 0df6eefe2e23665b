"""Experts come and go beside the engines."""

from contextlib import AsyncExitStack, closing
from typing import Any

import torch

from moesaic.cluster.placements import decode_placement, encode_placement
from moesaic.experts.host import ExpertHost
from moesaic.experts.loaded import LoadedExpert
from moesaic.experts.pace import LoadPace
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.models.configuration.config import load_config
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.services.expert.settings import ExpertSettings
from moesaic.services.expert.weights import give_experts

CPU, FP32 = torch.device("cpu"), torch.float32
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def from_nowhere(layer: int, expert: int) -> LoadedExpert:
    raise AssertionError(f"no peer gave expert {expert} of layer {layer}")


async def test_they_do_while_every_other_thread_of_both_workers_is_held_up(
    tiny_model: Any,
) -> None:
    config, checkpoint = load_config(tiny_model.directory), Checkpoint(tiny_model.directory)
    model, secret = str(tiny_model.directory), "the secret"
    async with AsyncExitStack() as parts:
        hosts = [ExpertHost(checkpoint, config, name, 8, FP32, CPU) for name in ("a", "b")]
        exchanges = [
            await give_experts(
                ExpertSettings(model=model, secret=secret, worker_id=name), config, host, parts
            )
            for name, host in zip(("a", "b"), hosts, strict=True)
        ]

        def placement(epoch: int, slots: list[list[int]]) -> Placement:
            placed = Placement(
                epoch=epoch,
                model_digest=config.digest,
                num_experts=8,
                workers=[
                    PlacedWorker(
                        worker_id=name,
                        generation=1,
                        admin_address="",
                        data_address="",
                        weights_address=address,
                    )
                    for name, (address, _) in zip(("a", "b"), exchanges, strict=True)
                ],
                layers=list(config.moe_layers),
                slots=[slots for _ in config.moe_layers],
            )
            return decode_placement(encode_placement(placed))  # as a request brings it

        serving, swapped = placement(1, HALVES), placement(2, HALVES[::-1])
        for host in hosts:
            host.prepare(serving)
            host.epochs.commit(1)
        for host, (_, peers) in zip(hosts, exchanges, strict=True):
            assert peers is not None
            # In one go, on the very thread on which all else would run: it waits for the experts.
            with closing(peers.pulling(serving, LoadPace())) as pulling:
                result = host.prepare(swapped, pulling.or_else(from_nowhere))
            assert result.loaded == pulling.pulled == 4 * len(config.moe_layers)
