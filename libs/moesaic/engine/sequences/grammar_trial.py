"""The trial of a grammar: a child process compiles it first, which it may crash or fill.

``llguidance`` bounds much of what a grammar takes, but not all: a chain of five thousand rules
overflows its stack, which ends the process. The system holds the child to bounds of time and memory;
a child that dies is replaced.
"""

import json
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILE_S = 2.0  # of CPU
MASK_S = 0.05  # of CPU, for the tokens that may come next: a step computes one for each answer
NUM_TOKENS = 16  # that are tried
MEMORY_BYTES = 512 << 20
ANSWER_S = 30.0  # on a machine that has other things to do
_STATES = 10_000  # of a lexer: about 2 KB each, and they stay with the compiled grammar


class GrammarTrial:
    """Runs the child, which tries one grammar at a time. Safe to use from several threads."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Nothing is started before the first grammar."""
        numbers = [str(number) for number in (vocab_size, *eos_token_ids)]
        self._command = [sys.executable, "-m", __name__, str(tokenizer_path), *numbers]
        self._child: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None  # of the child
        self._lock = threading.Lock()

    def try_out(self, kind: str, text: str) -> int:
        """Have a grammar compiled and followed for some tokens.

        Returns:
            The bytes that it took.

        Raises:
            ValueError: it is not valid, or takes too much.
        """
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                self._end()
                child = self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                self._end = weakref.finalize(self, _end, child)
            answer = self._ask(child, json.dumps([kind, text]))
        if answer["error"]:
            raise ValueError(answer["error"])
        return int(answer["num_bytes"])

    def _ask(self, child: "subprocess.Popen[str]", line: str) -> dict[str, Any]:
        assert child.stdin is not None  # both are pipes
        assert child.stdout is not None
        too_late = threading.Timer(ANSWER_S, child.kill)
        too_late.start()
        try:
            child.stdin.write(f"{line}\n")
            child.stdin.flush()
            told = child.stdout.readline()
        except BrokenPipeError:
            told = ""
        finally:
            too_late.cancel()
        if told:
            answer: dict[str, Any] = json.loads(told)
            return answer
        status = child.wait()
        self._child = None
        self._end()
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return {"error": f"takes more than {COMPILE_S:g} s to compile; make it smaller"}
        return {
            "error": "takes too much memory to compile, or is nested too deeply; make it smaller"
        }


def _end(child: "subprocess.Popen[str]") -> None:
    child.kill()
    with suppress(OSError), child:  # closes the pipes
        pass


def compiled(tokenizer: "LLTokenizer", kind: Any, text: str) -> "LLMatcher":
    """Compile a grammar in this process.

    Raises:
        ValueError: it is not valid, or too complex.
    """
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    limits = LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
    matcher = LLMatcher(tokenizer, grammar_from(kind, text), log_level=0, limits=limits)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def load_tokenizer(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> "LLTokenizer":
    """Load a model's tokenizer for ``llguidance``.

    Raises:
        ValueError: the file cannot be read.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(str(path), n_vocab=vocab_size, eos_token=list(eos_token_ids))


def _follow(matcher: "LLMatcher") -> None:
    """Compute the tokens that may come next, and take one of them; some times over."""
    for number in range(NUM_TOKENS):
        started = time.process_time()
        mask = matcher.compute_bitmask()
        if time.process_time() - started > MASK_S:
            raise ValueError("takes too long at each token; make it smaller")
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        allowed = [i for i, byte in enumerate(mask) if byte]
        if not allowed or matcher.is_stopped():
            return
        at = allowed[number * 7919 % len(allowed)]
        matcher.consume_token(at * 8 + (mask[at] & -mask[at]).bit_length() - 1)


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _main(path: str, vocab_size: str, *eos_token_ids: str) -> None:
    tokenizer = load_tokenizer(Path(path), int(vocab_size), [int(i) for i in eos_token_ids])
    most = _memory_bytes("VmSize:") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        kind, text = json.loads(line)
        before = _memory_bytes("VmRSS:")
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)  # whose signal ends the process
        error, matcher = "", None
        try:
            matcher = compiled(tokenizer, kind, text)
            _follow(matcher)
        except Exception as failure:
            error = str(failure) or "is not valid"
        signal.setitimer(signal.ITIMER_PROF, 0)
        num_bytes = max(0, _memory_bytes("VmRSS:") - before)
        print(json.dumps({"error": error, "num_bytes": num_bytes}), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
