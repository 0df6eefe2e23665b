"""Small fleets and prompts whose blocks are easy to name."""

from hypothesis import strategies as st

from moesaic.prefix.fleet import Job
from moesaic.prefix.flops import AttentionFlops, ModelFlops
from moesaic.prefix.router import PrefixRouter, RouterLimits

BLOCK = 4
FLOPS = ModelFlops([AttentionFlops(3, 2), AttentionFlops(5, 1, window=6)], 10, head=11)
LIMITS = RouterLimits(block_size=BLOCK, max_blocks=10_000, max_queued=6, max_wait_s=5.0)
SATURATION = 900
# Prompts as paths of a small tree: names of blocks are the paths, as chained hashes are.
PATHS = st.lists(st.integers(0, 1), max_size=5)


def chain(path: list[int]) -> list[bytes]:
    return [bytes(path[: n + 1]) for n in range(len(path))]


def open_router(policy: str = "prefix-flops", workers: int = 2, **options) -> PrefixRouter:
    router = PrefixRouter(FLOPS, LIMITS, policy, **options)  # type: ignore[arg-type]
    for key in range(workers):
        router.fleet.join(key, SATURATION)
        router.fleet.accept(key, True)
    return router


def placed(router: PrefixRouter, *jobs: Job, now_s: float = 0.0) -> list[object]:
    for job in jobs:
        router.submit(job, now_s)
    return [decision.worker for decision in router.route(now_s)]
