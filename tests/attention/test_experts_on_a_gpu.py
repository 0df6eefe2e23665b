"""Workers whose experts come to a CUDA device, the fake one: they start, calibrate and answer as in ``main``."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.attention.mode_contract import serving
from tests.dispatch.gathered.locking import locked_memory
from tests.fake_device.cuda import fake_device
from tests.redis_servers import RedisServers

# Kernels are interpreted: every row costs.
SMALL = {"device": "cuda", "max_num_batched_tokens": 16, "max_num_seqs": 2, "kv_blocks": 8}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_device(), locked_memory(monkeypatch):
        yield


# Every kernel of several whole steps is interpreted: half a minute of a core.
@pytest.mark.slow
@pytest.mark.parametrize(
    "hows",
    [
        [{"dispatch": "local", "offload": True}],
        [{"dispatch": "gathered", "share": "0/2"}, {"dispatch": "gathered", "share": "1/2"}],
    ],
    ids=["offload", "gathered"],
)
async def test_a_worker_answers_as_the_model_does(
    tiny_model: Any, redis_servers: RedisServers, gpu: None, hows: list[dict[str, Any]]
) -> None:
    prompt = [5, 9, 33, 101]
    with redis_servers.lent() as redis:
        async with serving(redis.url, tiny_model, [SMALL | how for how in hows], False) as workers:
            told = await workers[0].answer(prompt, 2)

            assert told == tiny_model.greedy(prompt, 2)
            assert all(worker.slowdown >= 1 for worker in workers)
