"""What a successful step changes: tokens are picked, answers and scores move on, callers are told."""

import torch
from torch import Tensor

from moesaic.engine.batching import Batcher
from moesaic.engine.logprobs import describe_picked, describe_prompt
from moesaic.engine.processors import process
from moesaic.engine.requests import (
    Event,
    FailureEvent,
    FinishEvent,
    FinishReason,
    ProgressEvent,
    ScoreEvent,
    TokenEvent,
    TokenLogprob,
)
from moesaic.engine.sampling import sample
from moesaic.engine.sequences import Answer, Chunk, Score, count_epoch
from moesaic.engine.sweep_rows import Sweep
from moesaic.engine.sweeps import Slice
from moesaic.errors import InvalidInput


class Progress:
    """Moves the work of one batcher on."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher

    def advance(self, chunks: list[Chunk], logits: Tensor, epoch: int, events: list[Event]) -> None:
        """Move the state on after a successful step, and add what there is to tell to ``events``;
        ``logits`` has the wanted rows of all chunks, in order."""
        live = set()  # a request may have been cancelled during the step
        for work in self._batcher.everything():
            live.add(id(work))
            work.stalled_since_s = None  # experts can be reached again, also for who had no turn
        offset, answers, picking = 0, [], []
        for chunk in chunks:
            first, offset = offset, offset + chunk.wanted
            if id(chunk.owner) not in live:
                continue
            if isinstance(chunk.owner, Score):
                self._advance_score(chunk.owner, chunk, logits[first:offset], epoch, events)
            else:
                self._batcher.commit(chunk)
                if chunk.owner.describes_prompt:
                    events.append(describe_prompt(chunk.owner, chunk, logits[first:offset]))
                if chunk.owner.computed < len(chunk.owner.tokens):
                    events.append(ProgressEvent(chunk.owner.request.key, chunk.owner.computed))
                    continue
                if chunk.owner.work.max_tokens:
                    answers.append(chunk.owner)
                    picking.append(offset - 1)
                else:
                    self._finish_answer(chunk.owner, "length", None, events)
        if answers:
            rows = logits if len(picking) == len(logits) else logits[picking]
            picked = sample(
                process(rows, answers),
                [(answer.work.sampling, len(answer.tokens)) for answer in answers],
            )
            logprobs = describe_picked(rows, answers, picked)
            for answer, token, logprob in zip(answers, picked, logprobs, strict=True):
                self._advance_answer(answer, token, logprob, epoch, events)

    def note_slice(self, done: Slice, epoch: int) -> None:
        """Take note of a slice that was computed under ``epoch``."""
        for work in self._batcher.everything():
            work.stalled_since_s = None
        for score in done.sweep.works:
            count_epoch(score.epochs, epoch, 0)

    def tell_sweep(self, sweep: Sweep, events: list[Event]) -> None:
        """Add how far the prompts of a sweep are to ``events``, now and then."""
        for score, computed in self._batcher.sweeps.progress_of(sweep):
            events.append(ProgressEvent(score.request.key, computed))

    def _advance_answer(
        self,
        answer: Answer,
        token: int,
        logprob: TokenLogprob | None,
        epoch: int,
        events: list[Event],
    ) -> None:
        work, index, key = answer.work, answer.num_generated, answer.request.key
        count_epoch(answer.epochs, epoch, 1)
        stopped = token in work.stop_token_ids
        if not stopped:
            answer.tokens.append(token)
            events.append(TokenEvent(key, index, token, logprob, work.patience_s))
        matcher = answer.logit_state.matcher if answer.logit_state else None
        if matcher is not None and not stopped:
            matcher.follow(answer.answer)
            if matcher.failure:
                fix = f"is too complex for the answer that began: {matcher.failure}"
                error = InvalidInput(matcher.field, fix)
                self._batcher.finish(answer)
                events.append(FailureEvent(key, error))
                return
            stopped = matcher.complete
        if stopped or answer.num_generated == work.max_tokens:
            end = (token, logprob) if token in work.stop_token_ids else None
            self._finish_answer(answer, "stop" if stopped else "length", end, events)

    def _finish_answer(
        self,
        answer: Answer,
        reason: FinishReason,
        end: tuple[int, TokenLogprob | None] | None,
        events: list[Event],
    ) -> None:
        """``end``: the end token that was picked, which is no part of ``answer``."""
        self._batcher.finish(answer)
        stop_token_id, stop_logprob = end or (None, None)
        events.append(
            FinishEvent(
                answer.request.key,
                reason,
                prompt_tokens=len(answer.request.token_ids),
                completion_tokens=answer.num_generated + int(stop_token_id is not None),
                epochs=tuple(answer.epochs),
                stop_token_id=stop_token_id,
                stop_logprob=stop_logprob,
                cached_tokens=answer.num_cached or 0,
            )
        )

    def _advance_score(
        self, score: Score, chunk: Chunk, rows: Tensor, epoch: int, events: list[Event]
    ) -> None:
        candidates = score.work.candidates
        self._batcher.commit(chunk)
        if chunk.candidate is None:
            if not chunk.wanted:
                events.append(ProgressEvent(score.request.key, score.computed))
                return
            first = rows[0].log_softmax(dim=-1)
            score.logprobs = [float(first[candidate[0]]) for candidate in candidates]
            score.pending = [i for i, candidate in enumerate(candidates) if len(candidate) > 1]
        else:
            later = torch.tensor(candidates[chunk.candidate][1:])
            gained = rows.log_softmax(dim=-1).gather(1, later.to(rows.device).unsqueeze(1)).sum()
            score.logprobs[chunk.candidate] += float(gained)
        count_epoch(score.epochs, epoch, 1)
        if not score.pending:
            self._batcher.finish(score)
            key = score.request.key
            events.append(ScoreEvent(key, tuple(score.logprobs)))
            events.append(
                FinishEvent(
                    key,
                    "stop",
                    prompt_tokens=len(score.request.token_ids),
                    completion_tokens=0,
                    epochs=tuple(score.epochs),
                    cached_tokens=score.num_cached or 0,
                )
            )
