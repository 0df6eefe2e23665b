"""Structured output: a grammar says which tokens may come next, so that the whole answer fits it.

The work is done by the package ``llguidance``, which workers need not have: then such requests are
refused. Compiling may take a second and belongs in a thread; masks take well below a millisecond.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moesaic.errors import InvalidInput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["json_schema", "regex", "grammar", "choice"]

NUM_KEPT = 64  # compiled grammars; callers tend to send the same few


class Grammar:
    """A compiled grammar, shared by the requests that use it."""

    def __init__(self, compiled: "LLMatcher") -> None:
        self._compiled = compiled

    def matcher(self) -> "Matcher":
        """Where an answer begins."""
        return Matcher(self._compiled.deep_copy())


class Matcher:
    """One answer's place in its grammar."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher
        self._num_taken = 0

    def follow(self, answer: Sequence[int]) -> None:
        """Take the tokens that ``answer`` has more than at the last call."""
        new = list(answer[self._num_taken :])
        if new:
            self._matcher.consume_tokens(new)
            self._num_taken = len(answer)

    def mask(self) -> bytes:
        """A bit per token of the vocabulary, lowest first: set where the token may come next."""
        return self._matcher.compute_bitmask()

    @property
    def complete(self) -> bool:
        """Whether nothing can follow. Also after a failure."""
        return self._matcher.is_stopped()

    @property
    def failure(self) -> str:
        """Why the grammar cannot be followed any further; empty if it can."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. Safe to use from several threads."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``directory`` has the model's ``tokenizer.json``, which is read when first needed."""
        self._path, self._vocab_size = directory / "tokenizer.json", vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled = functools.lru_cache(NUM_KEPT)(self._compile)

    def compile(self, kind: GrammarKind, text: str, field: str) -> Grammar:
        """Compile a JSON schema, a regular expression, a grammar in Lark's or GBNF's notation, or a
        JSON list of choices.

        Raises:
            InvalidInput: it is not valid, or too complex, or cannot be used here; names ``field``.
        """
        try:
            return self._compiled(kind, text)
        except ImportError:
            fix = "needs the package llguidance, which the attention worker does not have"
            raise InvalidInput(field, fix, code="unsupported_parameter") from None
        except ValueError as error:
            raise InvalidInput(field, _first_line(str(error))) from error

    def _compile(self, kind: GrammarKind, text: str) -> Grammar:
        from llguidance import LLMatcher, grammar_from

        matcher = LLMatcher(self._tokenizer, grammar_from(kind, text), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return Grammar(matcher)

    @functools.cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise ValueError("cannot be honoured: this model has no end token")
        path = str(self._path.resolve())
        try:
            return LLTokenizer(path, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except ValueError as error:  # its text has our paths
            raise ValueError("cannot be honoured: llguidance cannot read the tokenizer") from error


def _first_line(text: str) -> str:
    """An error without the parser's state behind it."""
    return (text.strip().splitlines() or ["is not valid"])[0][:300]
