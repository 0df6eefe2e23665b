"""Answers of a generating request: begun at the workers, growing, as text."""

from collections.abc import AsyncGenerator, Iterable, Sequence

from moesaic.models.text.tokenizer import StreamDecoder
from moesaic.services.gateway.admission import Admitted
from moesaic.services.gateway.fields.generating import ChatWire, GenerationWire
from moesaic.services.gateway.fields.unsupported import few
from moesaic.services.gateway.generate.bad_words import bad_words_of
from moesaic.services.gateway.generate.choices import Ending, GrowingChoice, Piece
from moesaic.services.gateway.generate.runs import AnswerLimits, LogprobCounts, runs_of
from moesaic.services.gateway.generate.speech import PLAIN, Speech, unenforced_names
from moesaic.services.gateway.generate.structure import grammar_of
from moesaic.services.gateway.replies.accounts import Provenance, Usage, provenance_of, usage_of
from moesaic.services.gateway.workers.run import Run
from moesaic.v1.attention_pb2 import Finished, Grammar, Tokens

PER_ANSWER_CHARS = 30  # what making one costs, as text


async def begin(
    admitted: Admitted[GenerationWire],
    prompts: Sequence[Sequence[int]],
    field: str,
    logprobs: LogprobCounts,
    default_max_tokens: int | None = None,
    speech: Speech = PLAIN,
) -> "Answers":
    """Make the runs of a request and charge its tenant for them; workers get them by ``Answers.pieces``.

    Args:
        admitted: the request.
        prompts: token ids of each prompt.
        field: field of the body that the prompts are from.
        logprobs: counts of log-probabilities to tell.
        default_max_tokens: tokens of an answer where neither the body nor the model says fewer; None: all that fit.
        speech: what the answers may be made of.

    Raises:
        InvalidInput: a prompt does not fit, or the fields contradict each other.
        TenantLimited: the tenant may not have so many tokens now.
    """
    gateway, body = admitted.gateway, admitted.body
    asked, asked_by = body.answer_tokens, body.answer_tokens_field
    defaults = (default_max_tokens, gateway.defaults.max_tokens)
    default = min((most for most in defaults if most is not None), default=None)
    limits = AnswerLimits(gateway.max_tokens, asked, default, asked_by)
    bad_words = await bad_words_of(gateway.language, body.bad_words)

    def prepared() -> Answers:
        grammar = _grammar(admitted, speech)
        runs = runs_of(admitted, prompts, field, limits, logprobs, bad_words, grammar)
        return Answers(admitted, runs, speech)

    size = admitted.record.num_bytes + len(prompts) * body.n * PER_ANSWER_CHARS
    answers = await gateway.language.work(size, prepared)
    admitted.record.charge_tokens(limits.bound * len(answers.runs))
    return answers


def _grammar(admitted: Admitted[GenerationWire], speech: Speech) -> Grammar | None:
    """Make the grammar of the answers, and note the keywords that it does not enforce for the answer's header."""
    asked, unenforced = grammar_of(admitted.body), dict[str, set[str]]()
    grammar = speech.grammar(asked.grammar, admitted.gateway.language.marker_id, unenforced)
    if unenforced and isinstance(admitted.body, ChatWire):
        asked.unenforced.extend(unenforced_names(admitted.body.tools or [], unenforced))
    admitted.record.ignored = few([*admitted.record.ignored, *asked.unenforced])
    return grammar


class Answers:
    """The answers to one request, growing."""

    def __init__(
        self, admitted: Admitted[GenerationWire], runs: Sequence[Run], speech: Speech = PLAIN
    ) -> None:
        self.runs = runs
        self._thinks = speech.dialect.thinks
        self._admitted = admitted
        self._finished: dict[int, Finished] = {}  # by run
        body, language = admitted.body, admitted.gateway.language
        ending = Ending(
            body.stops,
            frozenset(body.stop_token_ids),
            body.include_stop_str_in_output,
            body.min_tokens,
        )

        def decoder() -> StreamDecoder:
            skips = body.skip_special_tokens
            return language.decoder(skip_special_tokens=skips, kept=speech.markers)

        self.choices = [
            GrowingChoice(i, decoder(), ending, speech.reader()) for i in range(len(runs))
        ]
        self.prompt_tokens = sum(len(run.prompt) for run in runs[:: body.n])
        admitted.record.prompt_tokens = self.prompt_tokens

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """Carry the request out and give each piece, until every choice has its finish reason."""
        record = self._admitted.record
        async with self._admitted.execution(self.runs) as execution:
            try:
                while events := await execution.next_events():
                    pieces = []
                    for i, event in events:
                        choice = self.choices[i]
                        if choice.finished:
                            continue  # a stop string was found earlier in this batch
                        if isinstance(event, Tokens):
                            pieces.append(choice.feed(event))
                            if choice.finished:
                                execution.cancel(self.runs[i])
                        elif isinstance(event, Finished):
                            self._finished[i] = event
                            pieces.append(choice.finish(event))
                    if pieces:  # not if only the prompts' log-probabilities came
                        together = list(joined(pieces))
                        counts = [len(piece.token_ids) for piece in together]
                        record.note_tokens(sum(counts), max(counts))
                        yield together
            finally:
                record.attempts = sum(run.attempt for run in self.runs)
                record.cached_tokens = self._cached_tokens
                record.completion_tokens = self.usage.completion_tokens  # end tokens too

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        usage = usage_of(self.prompt_tokens, completion_tokens, self._cached_tokens)
        if self._thinks:
            num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
            usage.completion_tokens_details = {"reasoning_tokens": num_reasoning}
        return usage

    @property
    def provenance(self) -> Provenance:
        """Origin of the tokens, as far as workers told it: one that was stopped at a stop string does not."""
        wanted = self._admitted.body.moesaic.provenance
        return provenance_of(self._finished.values(), self.runs, self._cached_tokens, wanted)

    @property
    def _cached_tokens(self) -> int:
        """Count a prompt with several answers once, as the answer that found the least of it."""
        cached = 0
        n = self._admitted.body.n
        for first in range(0, len(self.runs), n):
            told = [self._finished.get(first + k) for k in range(n)]
            found = min(finished.cached_tokens if finished else 0 for finished in told)
            cached += min(found, len(self.runs[first].prompt))
        return cached


def joined(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Join pieces of one choice that arrived together: a chunk each would only cost time."""
    joined: dict[int, Piece] = {}
    for piece in pieces:
        first = joined.setdefault(piece.index, piece)
        if first is not piece:
            first.text += piece.text
            first.token_ids += piece.token_ids
            first.parts += piece.parts
            first.logprobs = [*first.logprobs, *piece.logprobs]
            first.finish_reason, first.stop_reason = piece.finish_reason, piece.stop_reason
    return joined.values()
