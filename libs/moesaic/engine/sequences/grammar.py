"""Structured output: a grammar allows some tokens next, so that the whole answer fits it.

The package ``llguidance`` does the work. Workers need not have it; they then refuse such requests.
Compiling may take seconds and belongs in a thread; masks take well below a millisecond.
"""

import importlib.util
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moesaic.engine.sequences.grammar_cache import GrammarCache, Source
from moesaic.engine.sequences.grammar_queue import NUM_THREADS, GrammarQueue
from moesaic.engine.sequences.grammar_trial import GrammarTrial, load_tokenizer, reason
from moesaic.engine.sequences.grammar_trial import compiled as compile_here
from moesaic.errors import InvalidInput
from moesaic.fairness import Claim

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["json_schema", "regex", "grammar", "choice"]

# Callers tend to send the same few grammars. The trial of one tells how much memory it takes, but too little where it
# finds free room, or grows as it is used: so each counts as ``LEAST_BYTES`` at least.
KEPT_BYTES = 128 << 20
LEAST_BYTES = 1 << 20
BYTES_PER_CHARACTER = 400
NOBODY = Claim()
_MISSING = "is missing"


class Grammar:
    """A compiled grammar, shared by requests; ``field`` names where it stood in this request."""

    def __init__(self, compiled: "LLMatcher", field: str) -> None:
        self._compiled, self.field = compiled, field

    def matcher(self) -> "Matcher":
        """Return a matcher at the beginning of an answer."""
        return Matcher(self._compiled.deep_copy(), self.field)


class Matcher:
    """The place of one answer in its grammar."""

    def __init__(self, matcher: "LLMatcher", field: str) -> None:
        self._matcher, self.field = matcher, field
        self._num_taken = 0

    def follow(self, answer: Sequence[int]) -> None:
        """Take the tokens that ``answer`` has gained since the last call."""
        new = list(answer[self._num_taken :])
        if new:
            self._matcher.consume_tokens(new)
            self._num_taken = len(answer)

    def mask(self) -> bytes:
        """Return a bit per token of the vocabulary, lowest first: set if it may come next."""
        return self._matcher.compute_bitmask()

    @property
    def complete(self) -> bool:
        """True if nothing can follow; also after a failure."""
        return self._matcher.is_stopped()

    @property
    def failure(self) -> str:
        """The reason why the grammar cannot be followed any further; empty if it can."""
        return reason(self._matcher.get_error()) if self._matcher.is_error() else ""


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Safe to use from several threads."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``directory`` has the files of the model's tokenizer, which are read when first needed."""
        # In the hub's cache the file is a link, and the other files are not beside its target.
        self._path, self._vocab_size = directory.resolve() / "tokenizer.json", vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._trial = GrammarTrial(self._path, vocab_size, eos_token_ids, most=NUM_THREADS)
        self._kept: GrammarCache[LLMatcher | str] = GrammarCache(KEPT_BYTES)
        self._read: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._queue: GrammarQueue[LLMatcher | str] = GrammarQueue(self._found)

    async def compile_beside(
        self, kind: GrammarKind, text: str, field: str, claim: Claim = NOBODY
    ) -> Grammar:
        """Compile as ``compile`` does, in a thread; tenants take turns.

        Raises:
            InvalidInput, NotReady: as in ``compile``.
            Overloaded: too many grammars wait, and this one has to give way.
        """
        source = kind, text
        kept = self._kept_of(source, claim.tenant)
        if kept is None:
            kept = await self._queue.compiled(source, claim)
        return _grammar(kept, field)

    def compile(self, kind: GrammarKind, text: str, field: str, tenant: str = "") -> Grammar:
        """Compile a JSON schema, a regular expression, a grammar in Lark's or GBNF's notation, or a
        JSON list of choices.

        Raises:
            InvalidInput: it is not valid, or too complex, or cannot be used here; names ``field``.
            NotReady: it could not be tried now, which says nothing about the grammar.
        """
        return _grammar(self._found((kind, text), tenant), field)

    def _found(self, source: Source, tenant: str) -> "LLMatcher | str":
        """Return the compiled grammar, or the mistake in it; the last ones of both are kept."""
        if (kept := self._kept_of(source, tenant)) is not None:
            return kept
        # These say nothing about the grammar, and are not kept.
        if importlib.util.find_spec("llguidance") is None:
            return _MISSING
        if not self._eos_token_ids:
            return "cannot be honoured: this model has no end token"
        tokenizer = self._tokenizer
        if tokenizer is None:
            return "cannot be honoured: llguidance cannot read the tokenizer"
        num_bytes = max(LEAST_BYTES, BYTES_PER_CHARACTER * len(source[1]))
        compiled: LLMatcher | str
        try:
            num_bytes = max(num_bytes, self._trial.try_out(*source))
            compiled = compile_here(tokenizer, *source)
        except ValueError as error:
            compiled, num_bytes = str(error), LEAST_BYTES + len(source[1])
        with self._lock:
            self._kept.put(source, tenant, compiled, num_bytes)
        return compiled

    def _kept_of(self, source: Source, tenant: str) -> "LLMatcher | str | None":
        with self._lock:
            return self._kept.get(source, tenant)

    @property
    def _tokenizer(self) -> "LLTokenizer | None":
        """The tokenizer; None if it cannot be read, which is tried again."""
        if self._read is None:
            with suppress(ValueError):  # its text has our paths
                self._read = load_tokenizer(self._path, self._vocab_size, self._eos_token_ids)
        return self._read


def _grammar(compiled: "LLMatcher | str", field: str) -> Grammar:
    if compiled is _MISSING:
        fix = "needs the package llguidance, which the attention worker does not have"
        raise InvalidInput(field, fix, code="unsupported_parameter")
    if isinstance(compiled, str):
        raise InvalidInput(field, compiled)
    return Grammar(compiled, field)
