"""The router beside a model that is naive about everything: sets for blocks, sums for loads, and
brute force over all workers for decisions."""

from dataclasses import dataclass, field
from itertools import takewhile

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from moesaic.prefix.fleet import PACE, Job, OthersWork
from moesaic.prefix.policies import POLICY_NAMES
from moesaic.prefix.router import PrefixRouter
from moesaic_lab.routing.policies import BASELINES
from tests.prefix.fleets import BLOCK, FLOPS, LIMITS, PATHS, SATURATION, chain


@dataclass
class NaiveJob:
    job: Job
    arrived_s: float
    order: tuple[int, int]
    computed: int = 0
    answered: int = 0
    behind: tuple[int, ...] = ()

    def remaining(self) -> int:
        n, expected = self.job.num_tokens, self.job.answer_tokens
        if self.computed < n:
            cost = FLOPS.span(self.computed, n) + FLOPS.head
            positions = [*range(n, n + self.job.sibling_tokens), *range(n, n + expected - 1)]
        else:
            cost = 0
            first = n + self.answered
            positions = list(range(first, first + max(expected - max(self.answered, 1), 1)))
        return cost + sum(FLOPS.span(p, p + 1) + FLOPS.head for p in positions)


@dataclass
class NaiveWorker:
    key: int
    accepting: bool = False
    committed: set[bytes] = field(default_factory=set)
    pending: set[bytes] = field(default_factory=set)
    jobs: dict[int, NaiveJob] = field(default_factory=dict)
    others: int = 0  # FLOPs that other routers gave it
    pace: int = PACE

    def depth(self, hashes: list[bytes]) -> int:
        known = self.committed | self.pending
        return len(list(takewhile(known.__contains__, hashes)))

    def own(self) -> int:
        return sum(job.remaining() for job in self.jobs.values())

    def work(self) -> int:
        return self.own() + self.others

    def load(self) -> int:
        return self.work() * self.pace

    def drop(self, job_id: int) -> None:
        gone = self.jobs.pop(job_id)
        kept = {name for other in self.jobs.values() for name in other.job.hashes}
        self.pending -= set(gone.job.hashes) - kept


class Fleets(RuleBasedStateMachine):
    jobs, workers = Bundle("jobs"), Bundle("workers")

    @initialize()
    def begin(self) -> None:
        self.router = PrefixRouter(FLOPS, LIMITS)
        self.naive: dict[int, NaiveWorker] = {}
        self.waiting: dict[int, NaiveJob] = {}
        self.now_s = 0.0
        self.ids = 0
        for _ in range(2):
            self.join(True)

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    # -- workers

    @rule(target=workers, accepting=st.booleans())
    def join(self, accepting: bool) -> int:
        key = self.new_id()
        self.naive[key] = NaiveWorker(key, accepting)
        self.router.fleet.join(key, SATURATION)
        self.router.fleet.accept(key, accepting)
        return key

    @rule(key=workers, accepting=st.booleans())
    def accept(self, key: int, accepting: bool) -> None:
        if key in self.naive:
            self.naive[key].accepting = accepting
            self.router.fleet.accept(key, accepting)

    @rule(key=consumes(workers))
    def die(self, key: int) -> None:
        lost = self.router.fleet.leave(key)

        assert sorted(lost) == sorted(self.naive.pop(key).jobs)

    @rule(key=workers, stored=PATHS, evicted=PATHS)
    def tell_blocks(self, key: int, stored: list[int], evicted: list[int]) -> None:
        if key not in self.naive:
            return
        worker, bit = self.naive[key], self.router.fleet.workers[key].bit
        gone = chain(evicted)[2:]
        self.router.fleet.index.evict(bit, gone)
        worker.committed -= set(gone)
        self.router.fleet.index.commit(bit, chain(stored))
        worker.committed |= set(chain(stored))
        worker.pending -= worker.committed

    @rule(key=workers)
    def forget_blocks(self, key: int) -> None:
        if key in self.naive:
            self.router.fleet.index.clear(self.router.fleet.workers[key].bit)
            self.naive[key].committed.clear()

    @rule(key=workers, flops=st.sampled_from([0, 100, 700, 900, 5000]))
    def hear_of_others(self, key: int, flops: int) -> None:
        """Another router's work, told by the worker; what was told before no longer counts."""
        if key in self.naive:
            self.naive[key].others = flops
            self.router.fleet.others_have(key, OthersWork(1, 5, flops))

    @rule(key=workers, slowdown=st.sampled_from([0.0, 1.0, 1.5, 4.0]))
    def calibrate(self, key: int, slowdown: float) -> None:
        if key in self.naive:
            self.naive[key].pace = round(PACE * max(1.0, slowdown))
            how = {"saturation": SATURATION, "caches": True}
            self.router.fleet.describe(key, **how, slowdown=slowdown)  # type: ignore[arg-type]

    # -- jobs

    @rule(
        target=jobs,
        path=PATHS,
        tail=st.integers(1, BLOCK),
        answer=st.integers(1, 6),
        sibling=st.integers(0, 3),
        priority=st.integers(0, 1),
    )
    def submit(self, path: list[int], tail: int, answer: int, sibling: int, priority: int) -> int:
        job_id = self.new_id()
        tokens = len(path) * BLOCK + tail % BLOCK or 1
        job = Job(job_id, tokens, chain(path), answer, sibling, priority)
        if len(self.waiting) == LIMITS.max_queued:
            return job_id
        self.router.submit(job, self.now_s)
        self.waiting[job_id] = NaiveJob(job, self.now_s, (priority, job_id))
        return job_id

    @rule(
        target=jobs,
        short=st.lists(st.integers(0, 1), min_size=1, max_size=1),
        long=st.lists(st.integers(0, 1), min_size=5, max_size=5),
        ends=st.booleans(),
    )
    def crowd(self, short: list[int], long: list[int], ends: bool) -> MultipleResults[int]:
        """What fills one worker, occupies another, and makes some wait for the first."""
        ids = [self.submit(path, 3, 1, 0, 0) for path in (long, short, long)]
        self.route()
        if ends:
            self.end(ids[1])
            self.route()
        return multiple(*ids)

    @rule(job_id=consumes(jobs))
    def end(self, job_id: int) -> None:
        here = job_id in self.waiting or any(job_id in w.jobs for w in self.naive.values())

        assert self.router.withdraw(job_id) == here
        self.waiting.pop(job_id, None)
        for worker in self.naive.values():
            if job_id in worker.jobs:
                worker.drop(job_id)

    @rule(job_id=jobs, computed=st.integers(0, 30), answered=st.integers(0, 8))
    def progress(self, job_id: int, computed: int, answered: int) -> None:
        self.router.fleet.progressed(job_id, computed, answered)
        for worker in self.naive.values():
            if naive := worker.jobs.get(job_id):
                naive.computed = max(naive.computed, computed)
                naive.answered = max(naive.answered, answered)
                if answered:
                    naive.computed = naive.job.num_tokens

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(policy=st.sampled_from(["prefix-flops"] * 6 + [*POLICY_NAMES, *BASELINES]))
    def switch(self, policy: str) -> None:
        self.router.set_policy(policy)
        for job in self.waiting.values():
            job.behind = ()

    @rule()
    def route(self) -> None:
        ours = self.router.policy_name in ("prefix-flops", "moe-prefill")
        expected = self.brute_force() if ours else None

        decisions = self.router.route(self.now_s)

        told = [(d.job.job_id, d.worker, d.cached_blocks) for d in decisions]
        if expected is None:
            for decision in decisions:
                self.place(self.waiting[decision.job.job_id], self.naive[decision.worker])
        assert expected is None or told == expected
        accepting = [w for w in self.naive.values() if w.accepting]
        starved = [j for j in self.waiting.values() if self.now_s - j.arrived_s >= 5.0]
        assert not (accepting and starved)

    def place(self, job: NaiveJob, worker: NaiveWorker) -> int:
        depth = worker.depth(list(job.job.hashes))
        usable = min(depth, (job.job.num_tokens - 1) // BLOCK)
        job.computed = usable * BLOCK
        worker.jobs[job.job.job_id] = job
        worker.pending |= set(job.job.hashes) - worker.committed
        del self.waiting[job.job.job_id]
        return depth

    def brute_force(self) -> list[tuple[int, int, int]]:
        out = []
        for job in sorted(self.waiting.values(), key=lambda job: job.order):
            waited = self.now_s >= job.arrived_s + LIMITS.max_wait_s
            allowed = [worker for worker in self.naive.values() if worker.accepting]
            room = [w for w in allowed if waited or self.ready(w) < SATURATION]
            if not room or (not waited and self.is_stuck(job, room)):
                continue
            hashes = list(job.job.hashes)
            deepest = max(worker.depth(hashes) for worker in allowed)
            behind = [worker for worker in allowed if worker.depth(hashes) == deepest]
            candidates = [worker for worker in behind if worker in room]
            if not candidates:
                near = max(worker.depth(hashes) for worker in room)
                patient = self.router.policy_name == "prefix-flops"
                if patient and self.prompt(job, near) > 1.25 * self.prompt(job, deepest):
                    candidates = [worker for worker in room if not self.prefills(worker)]
                    if not candidates:
                        job.behind = tuple(worker.key for worker in behind)
                        continue
                else:
                    candidates = room
            reached = max(worker.depth(hashes) for worker in candidates)
            best = [worker for worker in candidates if worker.depth(hashes) == reached]
            picked = min(best, key=lambda w: (w.load(), self.idx(w)))
            out.append((job.job.job_id, picked.key, self.place(job, picked)))
        return out

    @staticmethod
    def prompt(job: NaiveJob, depth: int) -> int:
        tokens = min(depth, (job.job.num_tokens - 1) // BLOCK) * BLOCK
        return FLOPS.span(tokens, job.job.num_tokens)

    def is_stuck(self, job: NaiveJob, room: list[NaiveWorker]) -> bool:
        """It waits for workers that are as they were when it was last looked at."""
        keys = {worker.key for worker in room}
        there = all(key in self.naive and self.naive[key].accepting for key in job.behind)
        free = [worker for worker in room if not self.prefills(worker)]
        return bool(job.behind) and there and not free and not keys & set(job.behind)

    @staticmethod
    def prefills(worker: NaiveWorker) -> bool:
        return any(job.computed < job.job.num_tokens for job in worker.jobs.values())

    def idx(self, worker: NaiveWorker) -> int:
        return self.router.fleet.workers[worker.key].idx

    @staticmethod
    def ready(worker: NaiveWorker) -> int:
        total = worker.others
        for job in worker.jobs.values():
            n = job.job.num_tokens
            if job.computed < n:
                total += FLOPS.span(job.computed, n) + FLOPS.head
                total += FLOPS.continuation(n, job.job.sibling_tokens)
            else:
                total += FLOPS.continuation(n + job.answered, 1)
        return total

    # -- what always holds

    @invariant()
    def loads_are_the_sums_of_what_remains(self) -> None:
        fleet = self.router.fleet
        for key, naive in self.naive.items():
            shadow = fleet.workers[key]
            assert shadow.remaining == naive.own()
            assert shadow.load == naive.load()
            assert shadow.remaining == sum(r.remaining for r in shadow.jobs.values())
            assert shadow.ready == self.ready(naive) - naive.others
            assert shadow.remaining_tokens >= len(shadow.jobs)
        assert fleet.by_load == sorted((w.load, w.idx) for w in fleet.workers.values())
        if not fleet.routed:
            assert all(
                worker.load == worker.others.flops * worker.pace
                for worker in fleet.workers.values()
            )

    @invariant()
    def the_index_is_what_the_workers_have_and_were_promised(self) -> None:
        fleet = self.router.fleet
        held: dict[bytes, int] = {}
        for key, naive in self.naive.items():
            for name in naive.committed | naive.pending:
                held[name] = held.get(name, 0) | fleet.workers[key].bit
        everyone = sum(worker.bit for worker in fleet.workers.values())
        assert len(fleet.index) == len(held)
        assert held == {name: fleet.index.match([name], everyone)[1] for name in held}

    @invariant()
    def bitsets_are_right(self) -> None:
        fleet = self.router.fleet
        workers = [w for w in fleet.workers.values() if w.accepting]
        assert fleet.accepting == sum(w.bit for w in workers)
        assert fleet.unsaturated == sum(
            w.bit for w in workers if w.ready + w.others.flops < SATURATION
        )


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
