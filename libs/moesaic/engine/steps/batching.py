"""Continuous batching with chunked prefill: decides which rows the next step computes. Pure.

Generations that have begun go first, a row each, so that they keep their pace. What remains of the
row budget computes prompts: tenants take turns (``fairness``), and within a tenant requests go by
``priority`` and by arrival, long ones and others in turn. With a hasher, full blocks are found by
their content, so a request starts behind the longest beginning that is there already.

==================================================  ===========================
What is decided                                     Where
==================================================  ===========================
Which requests can never run                        ``admission``
Which leave a full queue for a newcomer             ``admission``
Which waiting sequences begin, at whose cost        ``admission``
When a step is for light tenants alone              ``sharing``
Which generations go on, how many rows prompts get  ``sharing`` by ``pace``
Which sequence gives its blocks to one that grows   ``queues``
When scoring that stores no KV has its turn         ``sweeps``
==================================================  ===========================
"""

import itertools
from collections import Counter
from collections.abc import Collection

from moesaic.engine.sequences.blocks import BlockPool, blocks_for
from moesaic.engine.sequences.requests import Request, RequestKey
from moesaic.engine.sequences.sequence import AnySequence, Chunk, ScoringSequence, sequence_of
from moesaic.engine.steps.admission import Admission, EngineLimits, check_request, displaced_by
from moesaic.engine.steps.pace import RowCosts, StepPace
from moesaic.engine.steps.queues import (
    BatcherTally,
    Party,
    PlannedStep,
    Running,
    WaitingQueue,
)
from moesaic.engine.steps.sharing import LightSteps, PromptRoom, StepSharing, light_parties
from moesaic.engine.steps.sweeps import ROWS_ALONE, Slice, Sweeps
from moesaic.fairness import Shares
from moesaic.prefix.blocks import BLOCK_SIZE, BlockHasher
from moesaic.prefix.flops import ModelFlops

RECENT_STEPS = 32  # in which a tenant counts as one that has work
MOST_REMEMBERED = 256  # tenants


class Batcher:
    """Holds all requests of one engine, from submission to their last event.

    Attributes:
        only_standard: requests that may not be degraded have no turn for now.
        prefill_threshold: of the steps that are planned now. Below 1, prompts leave no KV for others.
        lacks_blocks: of the last step, some sequence had to wait for KV blocks.
    """

    def __init__(
        self,
        limits: EngineLimits,
        num_blocks: int,
        hasher: BlockHasher | None = None,
        num_layers: int = 1,
        flops: ModelFlops = ROWS_ALONE,
        step_target_s: float = 0.0,
    ) -> None:
        """Begin with nothing to do.

        Args:
            limits: of the engine.
            num_blocks: KV blocks that there are.
            hasher: names blocks of ``BLOCK_SIZE`` tokens; None: nothing is shared.
            num_layers: decoder layers, which a sweep passes one by one.
            flops: measures rows, and the slices of sweeps.
            step_target_s: a step should take this long; 0: as long as it does.
        """
        self.limits, self.only_standard, self.prefill_threshold = limits, False, 1.0
        self.lacks_blocks = False
        rows = limits.max_num_batched_tokens
        self.sweeps = Sweeps(limits.sweep_blocks, num_layers, rows, flops)
        self.pool, self.waiting, self.tally = BlockPool(num_blocks), WaitingQueue(), BatcherTally()
        self._running = Running(self.pool, self.waiting, self.tally)
        self._costs = RowCosts(flops)
        most = rows * self._costs.at(limits.max_model_len, True)
        self.pace, self._light_steps = StepPace(step_target_s, most), LightSteps(step_target_s)
        self._shares = Shares()
        self._last_step: dict[str, int] = {}  # that had rows of a tenant
        self._hasher = hasher
        self._arrivals, self._steps = itertools.count(), itertools.count(1)

    def submit(self, request: Request) -> list[AnySequence]:
        """Queue a request.

        Returns:
            Those that leave the queue for it, which are forgotten.

        Raises:
            InvalidInput: it can never run here.
            Overloaded: the queue is full, and nothing in it has to give way to the request.
        """
        check_request(request, self.limits, self.pool.num_blocks)
        swept = self.limits.sweeps(request.task)
        sequence = sequence_of(request, next(self._arrivals), swept=swept)
        queues = self.waiting, self.sweeps.waiting
        displaced = displaced_by(sequence.claim, len(sequence.tokens), queues, self.limits)
        for other in displaced:
            self.finish(other)
        self.tally.displaced += len(displaced)
        if self._hasher is not None:
            sequence.root = self._hasher.root(request.cache_salt)
            self._hasher.extend(sequence.hashes, sequence.root, sequence.tokens)
        (self.sweeps.waiting if swept else self.waiting).add(sequence)
        return displaced

    def cancel(self, key: RequestKey) -> bool:
        """Forget a request wherever it is; false if it is not here."""
        for sequence in self.unfinished():
            if sequence.request.key == key:
                self.finish(sequence)
                return True
        return False

    def finish(self, sequence: AnySequence) -> None:
        """Forget ``sequence`` and free its blocks."""
        if isinstance(sequence, ScoringSequence) and sequence.swept:
            self.sweeps.drop(sequence)
            return
        sequence.release(self.pool)
        if sequence in self.running:
            self._running.stop(sequence)
        else:
            self.waiting.remove(sequence)

    def unfinished(self) -> list[AnySequence]:
        """List all sequences."""
        swept = (*self.sweeps.running, *self.sweeps.waiting)
        return [*self.running, *self.waiting, *swept]

    @property
    def running(self) -> list[AnySequence]:
        """Sequences that have begun, sweeps aside, by rank."""
        return self._running.sequences

    @property
    def num_running(self) -> int:
        """Number of sequences that have begun."""
        return len(self.running) + len(self.sweeps.running)

    @property
    def num_waiting(self) -> int:
        """Number of sequences that have not begun, or have to begin again."""
        return len(self.waiting) + len(self.sweeps.waiting)

    def expired(self, now_s: float) -> list[AnySequence]:
        """List the sequences whose deadline has passed."""
        return [
            sequence
            for sequence in self.unfinished()
            if sequence.request.deadline_s is not None and sequence.request.deadline_s <= now_s
        ]

    def schedule(self) -> PlannedStep | Slice:
        """Decide the next step, which may have nothing to run. Blocks are taken; nothing else
        changes until the step is reported done."""
        if (piece := self.sweeps.next_slice(self.holds)) is not None:
            return piece
        planned = self.plan()
        return planned if planned.chunks else self.sweeps.next_slice(self.holds) or planned

    def holds(self, sequence: AnySequence) -> bool:
        """True if ``sequence`` has no turn, since it may not be degraded."""
        return self.only_standard and sequence.request.min_threshold > 0

    def _with_turn(self, sequences: list[AnySequence]) -> list[AnySequence]:
        return [s for s in sequences if not self.holds(s)] if self.only_standard else sequences

    def plan(self) -> PlannedStep:
        """Decide the next step of all but sweeps, whose turn comes after it."""
        if self._light_steps.is_due:
            tokens, most = self.waiting.tokens, self.pace.rows()
            light = light_parties(self.running, tokens, most, self._costs)
            planned = PlannedStep(is_light=True)
            if light and self._fill(planned, light).chunks:
                return planned
        return self._fill(PlannedStep(), None)

    def commit(self, chunk: Chunk) -> None:
        """Take note that the rows of ``chunk`` were computed; its sequence is still here."""
        sequence = chunk.sequence
        if isinstance(sequence, ScoringSequence) and chunk.candidate is not None:
            sequence.pending.remove(chunk.candidate)
            return
        sequence.computed += len(chunk.token_ids)
        if self._hasher is None or (isinstance(sequence, ScoringSequence) and sequence.swept):
            return
        # KV that was computed in a degraded way, or after such, is for nobody else.
        full = int(min(sequence.computed, sequence.account.clean)) // BLOCK_SIZE
        # Tokens were generated meanwhile.
        if full > len(sequence.hashes):
            self._hasher.extend(sequence.hashes, sequence.root, sequence.tokens)
        for idx in range(sequence.num_published, full):
            self.pool.publish(sequence.blocks[idx], sequence.hashes[idx])
        sequence.num_published = max(full, sequence.num_published)

    def took(self, planned: PlannedStep, seconds: float) -> None:
        """Take note of how long a planned step took."""
        answers_cost = self._costs.of(planned.chunks) - planned.prompt_cost
        self.pace.took(planned.prompt_cost, seconds, answers_cost)
        has_prompts = planned.prompt_rows > 0
        self._light_steps.took(seconds, is_light=planned.is_light, has_prompts=has_prompts)

    def failed(self, planned: PlannedStep) -> None:
        """Take note that a planned step failed, perhaps since it took too long."""
        answers_cost = self._costs.of(planned.chunks) - planned.prompt_cost
        self.pace.failed(planned.prompt_cost, answers_cost)

    @property
    def _quantum(self) -> int:
        """Rows of prompts that one step may have."""
        return min(self.limits.max_num_batched_tokens, self.pace.rows())

    def _fill(self, planned: PlannedStep, parties: Collection[Party] | None) -> PlannedStep:
        """Plan rows of these parties, or of everyone."""
        # Places and blocks of those without a turn are of use to others.
        for sequence in [s for s in self.running if self.only_standard and self.holds(s)]:
            self._running.preempt(planned, sequence)
        budget, step = self.limits.max_num_batched_tokens, next(self._steps)
        running = self._with_turn(self._running.of(parties))
        served = sum(step - last < RECENT_STEPS for last in self._last_step.values())
        sharing = StepSharing(running, self.pace, self._costs, in_turn=served > 1)
        has_prompts = not all(sequence.decodes for sequence in self.running)
        # Kept for the candidate that is next, or it would wait as long as generations come.
        whole = max((sequence.least_rows for sequence in running), default=0)
        for sequence in sharing.going_on:
            # Not preempted meanwhile
            if budget > whole and sequence in self.running:
                sequence.last_step = step
                budget -= self._add(planned, sequence, 1)
        if self.waiting or has_prompts:
            quantum = self._quantum
            self._add_prompts(planned, sharing, budget, quantum, parties)
            self._note_shares(planned, quantum)
        else:
            self._shares.start_anew()
        self.sweeps.others_had(planned.chunks)
        self._last_step |= dict.fromkeys({c.sequence.claim.tenant for c in planned.chunks}, step)
        if len(self._last_step) > MOST_REMEMBERED:
            recent = {t: last for t, last in self._last_step.items() if step - last < RECENT_STEPS}
            self._last_step = recent
        return planned

    def _add_prompts(
        self,
        planned: PlannedStep,
        sharing: StepSharing,
        most: int,
        quantum: int,
        parties: Collection[Party] | None,
    ) -> None:
        """Add the rows that are due; if there are any at all, a candidate may run whole, with ``most``."""
        sequences = [s for s in self._running.of(parties) if not s.decodes]
        max_num_seqs = self.limits.max_num_seqs
        if self.waiting and (len(self._running) < max_num_seqs or self._running.are_unequal):
            sequences += self.waiting.of(parties)
        sequences = self._with_turn(sequences)
        if not sequences:
            self.lacks_blocks = False
            return
        tally = self.tally if self._hasher is not None else None
        admission = Admission(planned, self._running, max_num_seqs, tally, self.prefill_threshold)
        running = self.running
        num_rows, cost = 0, 0.0
        tenants = {sequence.claim.tenant for sequence in sequences} if most > 0 else set()
        rooms = {tenant: sharing.prompts(tenant) for tenant in tenants}

        def left(room: PromptRoom, each: float) -> int:
            return min(most - num_rows, room.left(num_rows, cost, each))

        for sequence in self._shares.in_turn(sequences, quantum):
            if not rooms:
                break
            room = rooms.get(sequence.claim.tenant)
            if room is None or not (sequence in running or admission.admit(sequence)):
                continue
            budget, begun = left(room, self._costs.next_row(sequence)), len(planned.chunks)
            rows = self._add(planned, sequence, budget)
            if not rows and isinstance(sequence, ScoringSequence) and not num_rows:
                rows = self._add(planned, sequence, min(most, sequence.longest_pending))
            if rows:
                num_rows += rows
                cost += self._costs.of(planned.chunks[begun:])
                rooms = {tenant: room for tenant, room in rooms.items() if left(room, 1.0) > 0}
        # Else nobody had a chance.
        if tenants:
            self.lacks_blocks = admission.lacks_blocks and bool(self.running)

    def _note_shares(self, planned: PlannedStep, quantum: int) -> None:
        """Remember what each claim was given, and which would have taken more."""
        planned_rows: Counter[int] = Counter()
        for chunk in planned.chunks:
            rows = len(chunk.token_ids)
            planned_rows[id(chunk.sequence)] += rows
            if not chunk.sequence.decodes:
                planned.prompt_rows += rows
                planned.prompt_cost += self._costs.of([chunk])
                self._shares.note(chunk.sequence.claim, rows)
        waiting = [sequence.claim for sequence in self.waiting]
        if planned.prompt_rows or waiting:
            prompts = (sequence for sequence in self.running if not sequence.decodes)
            waiting += [s.claim for s in prompts if s.rows_left > planned_rows[id(s)]]
        given = [(c.sequence.claim, round(self._costs.of([c]))) for c in planned.chunks]
        self._shares.served(given, waiting, quantum)

    def _add(self, planned: PlannedStep, sequence: AnySequence, budget: int) -> int:
        """Put the next rows of ``sequence`` into the plan.

        Returns:
            How many these are.
        """
        if isinstance(sequence, ScoringSequence):
            chunks = sequence.chunks(budget)
            planned.copies.extend(sequence.copies(chunks))
        else:
            reach = min(len(sequence.tokens), sequence.computed + budget)
            if not self._running.grow(planned, sequence, blocks_for(reach)):
                return 0
            chunks = [sequence.chunk(budget)]
        planned.chunks.extend(chunks)
        return sum(len(chunk.token_ids) for chunk in chunks)
