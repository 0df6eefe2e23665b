"""Progress by a successful step: tokens are picked, sequences move on, and callers are told."""

import torch
from torch import Tensor

from moesaic.engine.computing import Computed
from moesaic.engine.sequences.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    FinishReason,
    PooledEvent,
    ProgressEvent,
    ScoreEvent,
    TokenEvent,
    TokenLogprob,
)
from moesaic.engine.sequences.sampling import describe_picked, describe_prompt, process, sample
from moesaic.engine.sequences.sequence import (
    AnySequence,
    Chunk,
    GenerationSequence,
    ScoringSequence,
    count_epoch,
)
from moesaic.engine.steps.batching import Batcher
from moesaic.engine.steps.queues import PlannedStep
from moesaic.engine.steps.sweeps import Slice
from moesaic.errors import InvalidInput


class Progress:
    """Moves the sequences of one batcher on."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def advance(
        self, planned: PlannedStep | Slice, computed: Computed, events: list[Event]
    ) -> None:
        """Move the sequences of a successful step on.

        Args:
            planned: the step.
            computed: its outcome.
            events: what there is to tell is added here.
        """
        # A request may have been cancelled during the step.
        live = set()
        for sequence in self._batcher.unfinished():
            live.add(id(sequence))
            # Experts can be reached again, also for those without a turn.
            if not self._batcher.holds(sequence):
                sequence.stalled_since_s = None
        if isinstance(planned, Slice):
            self._advance_sweep(planned, computed, events)
        for chunks, rows in computed.wanted:
            self._advance_chunks(chunks, rows, live, computed.epoch, events)

    def _advance_sweep(self, piece: Slice, computed: Computed, events: list[Event]) -> None:
        for sequence in piece.sweep.sequences:
            count_epoch(sequence.epochs, computed.epoch, 0)
        sweeps = self._batcher.sweeps
        if not sweeps.advance(piece, computed.took_s):
            for sequence, tokens in sweeps.progress_of(piece.sweep):
                events.append(ProgressEvent(sequence.request.key, tokens))

    def _advance_chunks(
        self, chunks: list[Chunk], logits: Tensor, live: set[int], epoch: int, events: list[Event]
    ) -> None:
        offset, generations, picking = 0, list[GenerationSequence](), list[int]()
        for chunk in chunks:
            first, offset = offset, offset + chunk.wanted
            if id(chunk.sequence) not in live:
                continue
            if chunk.pools and isinstance(chunk.sequence, ScoringSequence):
                self._advance_pooling(chunk.sequence, chunk, logits[first:offset], epoch, events)
            elif isinstance(chunk.sequence, ScoringSequence):
                self._advance_scoring(chunk.sequence, chunk, logits[first:offset], epoch, events)
            elif self._advance_prompt(chunk.sequence, chunk, logits, first, events):
                generations.append(chunk.sequence)
                picking.append(offset - 1)
        if generations:
            rows = logits if len(picking) == len(logits) else logits[picking]
            self._pick(generations, rows, epoch, events)

    def _advance_prompt(
        self,
        sequence: GenerationSequence,
        chunk: Chunk,
        logits: Tensor,
        first: int,
        events: list[Event],
    ) -> bool:
        """Commit the rows of a generation; its logits begin at ``first``.

        Returns:
            True if its next token is to be picked.
        """
        self._batcher.commit(chunk)
        if sequence.describes_prompt:
            rows = logits[first : first + chunk.wanted]
            events.append(describe_prompt(sequence, chunk, rows))
        if sequence.computed < len(sequence.tokens):
            events.append(ProgressEvent(sequence.request.key, sequence.computed))
            return False
        if not sequence.task.max_tokens:
            self._finish(sequence, "length", events)
            return False
        return True

    def _pick(
        self,
        generations: list[GenerationSequence],
        rows: Tensor,
        epoch: int,
        events: list[Event],
    ) -> None:
        """Pick the next token of each generation; ``rows`` are the logits of each."""
        picked = sample(
            process(rows, generations), [(s.task.sampling, len(s.tokens)) for s in generations]
        )
        logprobs = describe_picked(rows, generations, picked)
        for sequence, token, logprob in zip(generations, picked, logprobs, strict=True):
            self._advance_generation(sequence, token, logprob, epoch, events)

    def _advance_generation(
        self,
        sequence: GenerationSequence,
        token: int,
        logprob: TokenLogprob | None,
        epoch: int,
        events: list[Event],
    ) -> None:
        task, index, key = sequence.task, sequence.num_generated, sequence.request.key
        count_epoch(sequence.epochs, epoch, 1)
        stopped = token in task.stop_token_ids
        if not stopped:
            sequence.tokens.append(token)
            # A worker that is lost, or told to stop, has no last word: what it gave is told with it.
            account = sequence.account
            told = None if index and account.is_exact else account.degradation
            events.append(TokenEvent(key, index, token, logprob, task.patience_s, told))
        matcher = sequence.logit_state.matcher if sequence.logit_state else None
        if matcher is not None and not stopped:
            matcher.follow(sequence.answer_tokens)
            if matcher.failure:
                fix = f"is too complex for the answer that began: {matcher.failure}"
                error = InvalidInput(matcher.field, fix)
                self._batcher.finish(sequence)
                events.append(FailureEvent(key, error))
                return
            stopped = matcher.complete
        if stopped or sequence.num_generated == task.max_tokens:
            end = (token, logprob) if token in task.stop_token_ids else None
            reason: FinishReason = "stop" if stopped else "length"
            self._finish(sequence, reason, events, sequence.num_generated, end)

    def _advance_scoring(
        self, sequence: ScoringSequence, chunk: Chunk, rows: Tensor, epoch: int, events: list[Event]
    ) -> None:
        candidates = sequence.task.candidates
        self._batcher.commit(chunk)
        if chunk.candidate is None:
            if not chunk.wanted:
                events.append(ProgressEvent(sequence.request.key, sequence.computed))
                return
            first = rows[0].log_softmax(dim=-1)
            sequence.logprobs = [float(first[candidate[0]]) for candidate in candidates]
            sequence.pending = [i for i, candidate in enumerate(candidates) if len(candidate) > 1]
        else:
            later = torch.tensor(candidates[chunk.candidate][1:])
            gained = rows.log_softmax(dim=-1).gather(1, later.to(rows.device).unsqueeze(1)).sum()
            sequence.logprobs[chunk.candidate] += float(gained)
        count_epoch(sequence.epochs, epoch, 1)
        if not sequence.pending:
            events.append(ScoreEvent(sequence.request.key, tuple(sequence.logprobs)))
            self._finish(sequence, "stop", events)

    def _advance_pooling(
        self, sequence: ScoringSequence, chunk: Chunk, rows: Tensor, epoch: int, events: list[Event]
    ) -> None:
        self._batcher.commit(chunk)
        if len(rows):
            added = rows.sum(dim=0)
            sequence.pooled = added if sequence.pooled is None else sequence.pooled + added
        key, num_tokens = sequence.request.key, len(sequence.tokens)
        if chunk.start + len(chunk.token_ids) < num_tokens:
            events.append(ProgressEvent(key, sequence.computed))
            return
        # The last row was wanted.
        assert sequence.pooled is not None
        count = num_tokens if sequence.task.pooling == "mean" else 1
        count_epoch(sequence.epochs, epoch, 1)
        events.append(PooledEvent(key, tuple((sequence.pooled / count).tolist())))
        self._finish(sequence, "stop", events)

    def _finish(
        self,
        sequence: AnySequence,
        reason: FinishReason,
        events: list[Event],
        num_tokens: int = 0,
        end: tuple[int, TokenLogprob | None] | None = None,
    ) -> None:
        """End a sequence after ``num_tokens`` and ``end``, the end token that was picked, if any was."""
        self._batcher.finish(sequence)
        stop_token_id, stop_logprob = end or (None, None)
        events.append(
            FinishEvent(
                sequence.request.key,
                reason,
                prompt_tokens=len(sequence.request.token_ids),
                completion_tokens=num_tokens + (end is not None),
                epochs=tuple(sequence.epochs),
                stop_token_id=stop_token_id,
                stop_logprob=stop_logprob,
                cached_tokens=sequence.num_cached or 0,
                degradation=sequence.account.degradation,
            )
        )
