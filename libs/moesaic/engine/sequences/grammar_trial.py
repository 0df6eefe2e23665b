"""The trial of a grammar: a helper process compiles it first, which it may crash or fill.

``llguidance`` bounds much of what a grammar takes, but not all: a chain of five thousand rules
overflows its stack, which ends the process.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import CheckpointError
from moesaic.helper.helper import Helper
from moesaic.helper.limits import Limits, TooMuch
from moesaic.helper.serving import memory_bytes, serve
from moesaic.models.configuration.fields import read_json
from moesaic.models.configuration.tokenizer_files import TokenizerFiles

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LIMITS = Limits(cpu_s=2.0, memory_bytes=512 << 20)
MASK_S = 0.05  # of CPU, for the tokens that may come next: a step computes one for each answer
NUM_TOKENS = 16  # that are tried
MAX_TOLD = 300  # characters of what the library says: it quotes the grammar, several times over
_FUEL = 4_000_000  # steps for regular expressions, such as those that bound the lengths of strings in calls
_STATES = 10_000  # of a lexer: about 2 KB each, and they stay with the compiled grammar
# Of what a library raises, these say nothing about the grammar.
_NO_VERDICT = (MemoryError, OSError, ImportError, KeyboardInterrupt, SystemExit)


class GrammarTrial:
    """Tries grammars, ``most`` at a time. Safe to use from several threads."""

    def __init__(
        self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int], *, most: int = 1
    ) -> None:
        """Nothing is started before the first grammar."""
        numbers = [str(number) for number in (vocab_size, *eos_token_ids)]
        self._helper = Helper(__name__, [str(tokenizer_path), *numbers], LIMITS, most=most)

    def try_out(self, kind: str, text: str) -> int:
        """Have a grammar compiled and followed for some tokens.

        Returns:
            The bytes that it took.

        Raises:
            ValueError: it is not valid, or takes too much.
            NotReady: the trial was ended from outside, which says nothing about the grammar.
        """
        try:
            answer = self._helper.ask([kind, text])
        except TooMuch as verdict:
            what = f"more than {LIMITS.cpu_s:g} s to compile"
            if verdict.limit != "time":
                what = "too much memory to compile, or is nested too deeply"
            raise ValueError(f"takes {what}; make it smaller") from verdict
        if answer["error"]:
            raise ValueError(answer["error"])
        return int(answer["num_bytes"])


def compiled(tokenizer: "LLTokenizer", kind: Any, text: str) -> "LLMatcher":
    """Compile a grammar in this process.

    Raises:
        ValueError: it is not valid, or too complex.
    """
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    limits = LLParserLimits(
        max_lexer_states=_STATES, initial_lexer_fuel=_FUEL, verbose_errors=False
    )
    matcher = LLMatcher(tokenizer, grammar_from(kind, text), log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(reason(matcher.get_error()))
    return matcher


def reason(message: str) -> str:
    """Cut quotes of the grammar and the parser's state off an error."""
    lines = message.strip().splitlines() or ["is not valid"]
    named = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return next(named, lines[0])[:MAX_TOLD]


def load_tokenizer(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """Load a model's tokenizer for ``llguidance``, with end tokens that no text can hold.

    Args:
        path: of ``tokenizer.json``; the files beside it are read too.
        vocab_size: tokens that the model knows.
        eos_token_ids: its end tokens.

    Raises:
        ValueError: the files cannot be read, or the tokenizer has none of the end tokens.
    """
    from llguidance import LLTokenizer

    try:
        files = TokenizerFiles.read(path.parent, read_json(path))
        known = set(files.ids().values())
        ends = [token_id for token_id in eos_token_ids if token_id in known]
        if not ends:
            raise ValueError(f"the tokenizer has none of the end tokens {[*eos_token_ids]}")
        return LLTokenizer(files.united(vocab_size, ends), n_vocab=vocab_size, eos_token=ends)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def _follow(matcher: "LLMatcher") -> None:
    """Compute the tokens that may come next, and take one of them; some times over."""
    for number in range(NUM_TOKENS):
        started = time.process_time()
        mask = matcher.compute_bitmask()
        if time.process_time() - started > MASK_S:
            raise ValueError("takes too long at each token; make it smaller")
        if matcher.is_error():
            raise ValueError(reason(matcher.get_error()))
        allowed = [i for i, byte in enumerate(mask) if byte]
        if not allowed or matcher.is_stopped():
            return
        at = allowed[number * 7919 % len(allowed)]
        matcher.consume_token(at * 8 + (mask[at] & -mask[at]).bit_length() - 1)


def _main(path: str, vocab_size: str, *eos_token_ids: str) -> None:
    import llguidance  # noqa: F401  # now, not within the limits of a question

    tokenizer = load_tokenizer(Path(path), int(vocab_size), [int(i) for i in eos_token_ids])

    def answer(question: Any) -> dict[str, Any]:
        kind, text = question
        before, error, matcher = memory_bytes("VmRSS:"), "", None
        try:
            matcher = compiled(tokenizer, kind, text)
            _follow(matcher)
        except _NO_VERDICT:
            raise
        except BaseException as failure:  # a panic of the library is none of Exception
            error = reason(str(failure))
        return {"error": error, "num_bytes": max(0, memory_bytes("VmRSS:") - before)}

    serve(answer, LIMITS)


if __name__ == "__main__":
    _main(*sys.argv[1:])
