"""Ranks of one attention instance, each with a GPU of its own: the parts that they tell each other are there."""

import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from benchmarks.parity.cases import CASES, ParityCase, Served, build_reference, prompt_of
from moesaic.dispatch.local import LocalDispatcher
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.division import divide
from moesaic.models.layers.decoder import Decoder
from moesaic.models.tensor_parallel import group as group_module
from moesaic.models.tensor_parallel.follower import Follower
from moesaic.models.tensor_parallel.group import RankGroup
from moesaic.models.tensor_parallel.leader import lead
from moesaic.models.weights.checkpoint import Checkpoint
from tests.fake_device.cuda import fake_device
from tests.fake_device.ranks import Threads, device_of

pytestmark = pytest.mark.suite
RANKS = 2
# Grouped queries with sinks and biases; latents, dense layers and shared experts.
CHOSEN = [c for c in CASES if c.name == "base" and c.family in ("gpt_oss", "deepseek_v3")]


def steps(served: Served) -> Tensor:
    """Return the logits of a prompt, and of a token behind it beside another sequence."""
    tokens = prompt_of(9, seed=1)
    prompt = served.forward([(tokens[:6], 0, [5])], wanted=[2])
    return torch.cat([prompt, served.forward([(tokens[6:7], 6, [5]), (tokens[7:], 0, [3])])]).cpu()


def _lost(error: Exception) -> NoReturn:
    raise error


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_ranks_on_gpus_give_what_one_on_a_cpu_gives(
    case: ParityCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    build_reference(case, tmp_path)
    served, config = Served(tmp_path), load_config(tmp_path)
    expected = steps(served)
    monkeypatch.setattr(group_module, "dist", Threads(RANKS))

    def part(rank: int) -> tuple[Decoder, RankGroup]:
        torch.cuda.set_device(device_of(rank))
        how = Checkpoint(tmp_path), config, torch.float32, device_of(rank)
        store: Any = None
        group = RankGroup(rank, RANKS, store, device_of(rank), _lost)
        return Decoder.load(*how, division=divide(config, rank, RANKS)), group

    def follow() -> None:
        decoder, group = part(1)
        Follower(decoder, group).run()

    with fake_device(devices=RANKS):
        following = threading.Thread(target=follow, daemon=True)
        following.start()
        own, group = part(0)
        served.decoder = lead(own, group)
        served.cache = served.decoder.new_kv_cache(served.cache.num_blocks, served.cache.block_size)
        experts = LocalDispatcher(Checkpoint(tmp_path), config, torch.float32, device_of(0))

        async def moe(layer: int, hidden_states: Tensor) -> Tensor:
            return await experts.dispatch(experts.begin_step(), layer, hidden_states)

        served.moe = moe
        with torch.inference_mode():
            found = steps(served)
        group.close()
        following.join()

    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
