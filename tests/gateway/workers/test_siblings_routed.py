"""Siblings and a saturated router: they wait for the worker that the first of them got, as long as it lives."""

import asyncio

from moesaic.v1 import attention_pb2 as pb

BODY = {
    "input": "a story",
    "questions": [{"type": "predicate", "instructions": f"It has {i} words."} for i in range(20)],
}
FULL = {"router_saturation_flops": 1, "limits": {"MAX_WAIT_S": 0.05}}  # one request fills a worker


async def test_siblings_wait_for_a_saturated_worker_rather_than_part(open_house, scripts) -> None:
    scores = scripts.scores(-1.0, -2.0)
    async with open_house(scores, scores, scores, **FULL) as house:
        response = await house.client.post("/v1/decisions", json=BODY)
        shares = [len(worker.submits) for worker in house.workers]

    assert response.status_code == 200
    assert sorted(shares) == [0, 0, 20]


async def test_siblings_that_wait_for_a_worker_that_is_lost_go_to_another(
    open_house, scripts
) -> None:
    async def script(submit: pb.Submit, emit) -> None:
        if submit.attempt > 1:
            await scripts.scores(-1.0, -2.0)(submit, emit)

    full = {**FULL, "limits": {"MAX_WAIT_S": 60}}
    async with open_house(script, script, **full) as house:
        asking = asyncio.ensure_future(house.client.post("/v1/decisions", json=BODY))
        await house.until(lambda: any(worker.submits for worker in house.workers))
        lost, other = sorted(house.workers, key=lambda worker: -len(worker.submits))
        router = house.gateway.workers.routing.router
        await house.until(lambda: router.num_queued == len(BODY["questions"]) - 1)
        assert not other.submits
        await lost.kill()
        response = await asking

    assert response.status_code == 200, response.text
    assert len(lost.submits) == 1
    assert len(other.submits) == 20
