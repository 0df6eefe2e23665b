"""What the router is told by workers, and what comes of it; scripted workers that speak of blocks."""

import asyncio
from typing import Any

import msgspec
import pytest

from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.flops import flops_of, saturation_of
from moesaic.prefix.blocks import BlockHasher, naming_key
from moesaic.prefix.policies import POLICY_NAMES
from moesaic.services.gateway.admin import GatewayAdmin
from moesaic.services.gateway.workers.routing import AnswerLengths
from moesaic.v1 import attention_pb2 as pb
from moesaic.v1 import gateway_pb2
from moesaic_lab.routing.policies import BASELINES

PROMPT = list(range(100, 140))  # two full blocks and a half
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


@pytest.fixture
def hasher(model_directory: Any) -> BlockHasher:
    return BlockHasher(naming_key("between us"), load_config(model_directory).digest, 16)


def names(hasher: BlockHasher, tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    hasher.extend(hashes, hasher.root(salt), tokens)
    return hashes


async def opened(
    house: Any, hasher: BlockHasher, blocks: dict[int, list[bytes]], rows: int = 4096
) -> None:
    await house.until(lambda: all(worker.num_watches for worker in house.workers))
    fleet = house.gateway.workers.routing.router.fleet
    await house.until(lambda: all(not w.caches for w in fleet.workers.values()))
    # They cached nothing so far, so nobody listens to changes: they connect anew.
    for number, worker in enumerate(house.workers):
        worker.profile = pb.EngineProfile(max_step_tokens=rows, naming=hasher.naming)
        worker.blocks = blocks.get(number, [])
        await worker.kill()
    await house.until(lambda: not house.gateway.workers.accepting)
    for worker in house.workers:
        await worker.start(int(worker.address.rsplit(":", 1)[1]))
    await house.until(
        lambda: (
            len(fleet.workers) == len(house.workers)
            and all(w.caches and w.saturation < 1 << 79 for w in fleet.workers.values())
        )
    )


async def test_a_request_goes_where_its_prefix_is_cached(open_house, scripts, hasher) -> None:
    says = scripts.says("yes")
    async with open_house(says, says, says, block_secret="between us") as house:
        await opened(house, hasher, {1: names(hasher, PROMPT)[:1], 2: names(hasher, PROMPT)})
        for _ in range(3):
            await house.client.post("/v1/completions", json=BODY)
        other = await house.client.post("/v1/completions", json={**BODY, "cache_salt": "mine"})
        asked = [len(worker.submits) for worker in house.workers]

    assert other.status_code == 200
    assert asked[2] >= 3
    assert sum(asked) == 4  # under another salt nothing is known, and whoever is idle will do


async def test_changes_are_followed_and_a_gap_leads_to_a_new_snapshot(
    open_house, scripts, hasher
) -> None:
    says = scripts.says("yes")
    blocks = names(hasher, PROMPT)
    async with open_house(says, says, block_secret="between us") as house:
        await opened(house, hasher, {})
        index = house.gateway.workers.routing.router.fleet.index
        second = house.workers[1]
        at = second.num_watches
        second.tell_blocks(100 * at + 1, blocks, [])
        await house.until(lambda: len(index) == 2)
        second.tell_blocks(100 * at + 2, [], blocks[1:])
        await house.until(lambda: len(index) == 1)
        await house.client.post("/v1/completions", json=BODY)
        second.blocks = blocks
        second.tell_blocks(100 * at + 4, [], [])
        await house.until(lambda: second.num_watches == at + 1)
        await house.until(lambda: len(index) == 2)
        asked = [len(worker.submits) for worker in house.workers]

    assert asked == [0, 1]


async def test_names_under_another_key_are_passed_over(open_house, scripts, hasher) -> None:
    async with open_house(scripts.says("yes"), block_secret="other") as house:
        [worker] = house.workers
        worker.profile = pb.EngineProfile(max_step_tokens=64, naming=hasher.naming)
        worker.blocks = names(hasher, PROMPT)
        await worker.kill()
        await house.until(lambda: not house.gateway.workers.accepting)
        await worker.start(int(worker.address.rsplit(":", 1)[1]))
        await house.until(
            lambda: any(log["event"] == "blocks.named_differently" for log in house.logs)
        )
        await house.until(lambda: bool(house.gateway.workers.accepting))
        response = await house.client.post("/v1/completions", json=BODY)

    assert response.status_code == 200, response.text
    assert len(house.gateway.workers.routing.router.fleet.index) == 0


async def test_what_a_lost_worker_had_is_forgotten_and_its_load_with_it(
    open_house, scripts, hasher
) -> None:
    async with open_house(scripts.silent, scripts.says("yes"), block_secret="between us") as house:
        await opened(house, hasher, {0: names(hasher, PROMPT)})
        fleet = house.gateway.workers.routing.router.fleet
        first = house.workers[0]
        asking = asyncio.ensure_future(house.client.post("/v1/completions", json=BODY))
        await house.until(lambda: bool(first.submits))
        assert fleet.routed
        await first.kill()
        response = await asking
        await house.until(lambda: not fleet.routed)

    assert response.json()["choices"][0]["text"] == "yes"
    assert [worker.load for worker in fleet.workers.values()] == [0] * len(fleet.workers)
    assert len(fleet.index) == 0


async def test_a_filled_worker_gets_more_when_it_has_come_on_or_enough_time_has_passed(
    open_house, scripts, hasher
) -> None:
    release = asyncio.Event()

    async def script(submit: pb.Submit, emit: Any) -> None:
        await release.wait()
        emit(finished=scripts.finished(submit, 0))

    prompts = [[number] * 20 for number in range(3)]
    async with open_house(script, block_secret="between us", limits={"MAX_WAIT_S": 0.5}) as house:
        await opened(house, hasher, {}, rows=8)  # one prompt is more than a step
        [worker] = house.workers
        posts = [
            asyncio.ensure_future(house.client.post("/v1/completions", json={**BODY, "prompt": p}))
            for p in prompts
        ]
        router = house.gateway.workers.routing.router
        await house.until(lambda: router.num_queued == 2 and len(router.fleet.routed) == 1)
        await house.until(lambda: len(worker.submits) == 3)  # after half a second
        release.set()
        answers = [await post for post in posts]

    assert [answer.status_code for answer in answers] == [200] * 3


async def test_a_request_that_waits_can_be_cancelled_and_too_many_are_refused(
    open_house, scripts, hasher
) -> None:
    limits = {"MAX_WAIT_S": 60.0, "QUEUED_PER_REQUEST": 1 / 3}
    settings = {"max_inflight": 3, "block_secret": "between us"}
    async with open_house(scripts.silent, limits=limits, **settings) as house:
        await opened(house, hasher, {}, rows=8)
        router = house.gateway.workers.routing.router
        posts = []
        for number, done in ((1, lambda: router.fleet.routed), (2, lambda: router.num_queued)):
            body = {**BODY, "prompt": [number] * 20}
            posts.append(asyncio.ensure_future(house.client.post("/v1/completions", json=body)))
            await house.until(lambda done=done: bool(done()))
        refused = await house.client.post("/v1/completions", json=BODY)
        posts[1].cancel()
        await house.until(lambda: not router.num_queued)
        posts[0].cancel()
        await house.until(lambda: not router.fleet.routed)

    assert refused.json()["error"]["code"] == "overloaded"
    assert len(house.workers[0].submits) == 1


async def test_those_that_wait_for_the_last_worker_fail_when_it_is_lost(
    open_house, scripts, hasher
) -> None:
    async with open_house(
        scripts.silent, block_secret="between us", limits={"MAX_WAIT_S": 60.0}, recovery_s=0.5
    ) as house:
        await opened(house, hasher, {}, rows=8)
        router = house.gateway.workers.routing.router
        posts = [
            asyncio.ensure_future(house.client.post("/v1/completions", json=BODY)) for _ in range(2)
        ]
        await house.until(lambda: router.num_queued == 1)
        await house.workers[0].kill()
        answers = [await post for post in posts]

    assert [answer.status_code for answer in answers] == [503, 503]


async def test_the_policy_can_be_seen_and_switched_while_requests_come(
    open_house, scripts, hasher
) -> None:
    says = scripts.says("yes")
    async with open_house(says, says, block_secret="between us") as house:
        await opened(house, hasher, {1: names(hasher, PROMPT)})
        admin: Any = GatewayAdmin(house.gateway.workers.routing)
        for policy in (*POLICY_NAMES, *BASELINES):
            request = gateway_pb2.SetPolicyRequest(policy=policy)
            await admin.SetPolicy(request, None)
            response = await house.client.post("/v1/completions", json=BODY)
            assert response.status_code == 200
            state = await admin.GetRouter(gateway_pb2.GetRouterRequest(), None)
            assert state.policy == policy

        assert sorted(worker.committed_blocks for worker in state.workers) == [0, 2]
        assert all(w.accepting and w.saturation_flops > 0 for w in state.workers)
        assert not any(w.remaining_flops or w.num_requests for w in state.workers)


async def test_what_other_gateways_gave_a_worker_and_its_slowness_count(
    open_house, scripts, hasher
) -> None:
    says = scripts.says("yes")
    async with open_house(says, says, block_secret="between us") as house:
        await opened(house, hasher, {})
        routing = house.gateway.workers.routing
        fleet, admin = routing.router.fleet, GatewayAdmin(routing)
        first, second = house.workers
        saturation = {worker.saturation for worker in fleet.workers.values()}.pop()
        first.tell(others_work=pb.OthersWork(num_requests=2, num_tokens=50, flops=1e9))
        await house.until(lambda: any(worker.load for worker in fleet.workers.values()))
        for number in range(3):
            await house.client.post("/v1/completions", json={**BODY, "prompt": [number] * 20})
        told = await admin.GetRouter(gateway_pb2.GetRouterRequest(), None)
        assert [len(worker.submits) for worker in house.workers] == [0, 3]
        assert {w.worker_id: w.others_flops for w in told.workers} == {
            "attention-1": 1e9,
            "attention-2": 0,
        }

        first.tell(others_work=pb.OthersWork())
        second.profile = pb.EngineProfile(max_step_tokens=4096, naming=hasher.naming, slowdown=2.5)
        second.tell_all()
        await house.until(
            lambda: (
                not any(worker.load for worker in fleet.workers.values())
                and len({w.pace for w in fleet.workers.values()}) == 2
            )
        )
        told = await admin.GetRouter(gateway_pb2.GetRouterRequest(), None)

    one, two = sorted(told.workers, key=lambda worker: worker.worker_id)
    assert (one.slowdown, two.slowdown) == (1, 2.5)
    assert one.saturation_flops == saturation
    assert two.saturation_flops == pytest.approx(2.5 * saturation)


@pytest.mark.parametrize(
    ("sweeps", "store_kv", "promised"),
    [
        (False, None, True),
        (True, None, False),
        (True, True, True),
        (False, False, False),
    ],
)
async def test_blocks_are_promised_only_where_scoring_stores_them(
    open_house, scripts, hasher, sweeps: bool, store_kv: bool | None, promised: bool
) -> None:
    async with open_house(scripts.silent, block_secret="between us") as house:
        await opened(house, hasher, {})
        [worker] = house.workers
        worker.profile = pb.EngineProfile(
            max_step_tokens=4096, naming=hasher.naming, sweeps_scores=sweeps
        )
        worker.tell_all()
        routing = house.gateway.workers.routing
        await house.heard(worker)
        body = {"input": "hello " * 40, "labels": ["yes", "no"], "moesaic": {"store_kv": store_kv}}
        asking = asyncio.ensure_future(house.client.post("/v1/classify", json=body))
        await house.until(lambda: bool(worker.submits))
        num_promised = len(routing.router.fleet.index)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    assert bool(num_promised) == promised


def test_answers_are_expected_to_be_as_long_as_of_late_and_never_longer_than_allowed() -> None:
    lengths = AnswerLengths()
    assert lengths.expected(50) == 50
    assert lengths.expected(0) == 1  # a prompt that is only described still gives its logits
    for _ in range(200):
        lengths.add(10)

    assert (lengths.expected(50), lengths.expected(4)) == (10, 4)
    for _ in range(200):
        lengths.add(30)
    assert lengths.expected(50) in (30, 31)


def test_the_model_s_costs_are_those_of_its_active_parameters(model_directory: Any) -> None:
    config = load_config(model_directory)
    flops = flops_of(config)
    # conftest's: 16 wide, 2 layers, 2 heads of 8 with 1 of keys and values, 2 of 4 experts of 8.
    attention = 16 * 8 * (2 + 1 + 1 + 2)
    experts = 16 * 4 + 2 * 3 * 16 * 8

    assert flops.per_token == 2 * 2 * (attention + experts)
    assert flops.head == 2 * 16 * config.vocab_size
    assert flops.span(0, 3) == 3 * flops.per_token + 2 * 4 * 2 * 8 * (1 + 2 + 3)
    long = config.max_positions + 5  # more rows than a prompt can have are several prompts
    assert saturation_of(config, long) == round(
        1.2 * (flops.span(0, config.max_positions) + flops.span(0, 5))
    )


async def test_only_workers_with_the_served_weights_get_requests(open_house, scripts) -> None:
    async with open_house(scripts.says("yes"), scripts.says("no")) as house:
        own = {"config_digest": house.gateway.language.config.answering_digest}
        records = dict(house.fleet.workers)

        def put(name: str, **changes: Any) -> None:
            house.fleet.put(msgspec.structs.replace(records[name], **own | changes))

        def accepting() -> list[str]:
            return [worker.key[0] for worker in house.gateway.workers.accepting]

        def refused() -> list[str]:
            return [e["worker_id"] for e in house.logs if e["event"] == "worker.other_model"]

        async def answered() -> tuple[str, str]:
            answer = (await house.client.post("/v1/completions", json=BODY)).json()
            return answer["system_fingerprint"], answer["choices"][0]["text"]

        house.fleet.drop("attention-2")
        put("attention-1", model_digest="a" * 64)
        await house.until(lambda: house.gateway.workers.model_digest == "a" * 64)
        put("attention-2", model_digest="b" * 64)
        await house.until(lambda: refused() == ["attention-2"])
        assert accepting() == ["attention-1"]
        assert await answered() == (f"fp_{'a' * 12}", "yes")

        house.fleet.drop("attention-1")  # nobody has the first weights any more
        await house.until(lambda: accepting() == ["attention-2"])
        assert await answered() == (f"fp_{'b' * 12}", "no")

        put("attention-1", model_digest="b" * 64, config_digest="another")
        await house.until(lambda: refused() == ["attention-2", "attention-1"])
        assert accepting() == ["attention-2"]
