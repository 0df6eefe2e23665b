"""Structured output: a grammar allows some tokens next, so that the whole answer fits it.

The package ``llguidance`` does the work. Workers need not have it; they then refuse such requests.
Compiling may take seconds and belongs in a thread; masks take well below a millisecond.

Tenants take turns to have grammars compiled, by the time that their grammars have taken. The rules are
those of ``moesaic.fairness``. Besides, a tenant has one grammar compiled at a time, so that another's
need not wait for the end of a heavy one.

Compiled grammars are kept. Tenants share the room: when it is full, the tenant that holds the most
gives up what it has not used for the longest time. So nobody's flood drives out the grammars of others.
"""

import asyncio
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from moesaic.engine.sequences.grammar_trial import GrammarTrial, load_tokenizer, reason
from moesaic.engine.sequences.grammar_trial import compiled as compile_here
from moesaic.errors import InvalidInput, Overloaded
from moesaic.fairness import Claim, Shares, who_gives_way

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GrammarKind = Literal["json_schema", "regex", "grammar", "choice"]
Source = tuple[str, str]  # kind and text
T = TypeVar("T")

NUM_THREADS = 2
MAX_WAITING = 32  # of all tenants; the longest takes two seconds
LONG_MS = 2000  # a request whose grammars have taken so long is a long one
# Callers tend to send the same few grammars. The trial of one tells how much memory it takes, but too little where it
# finds free room, or grows as it is used: so each counts as ``LEAST_BYTES`` at least.
KEPT_BYTES = 128 << 20
LEAST_BYTES = 1 << 20
BYTES_PER_CHARACTER = 400
NOBODY = Claim()
_MISSING = "is missing"


class GrammarCache(Generic[T]):
    """Values by their source, in at most ``most_bytes``. A value counts for every tenant that uses it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: dict[Source, tuple[T, int]] = {}
        self._used_by: dict[str, OrderedDict[Source, None]] = {}  # the latest use comes last

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(num_bytes for _, num_bytes in self._values.values())

    def get(self, source: Source, tenant: str) -> T | None:
        """Find a value, which ``tenant`` uses now."""
        if source not in self._values:
            return None
        self._use(source, tenant)
        return self._values[source][0]

    def put(self, source: Source, tenant: str, value: T, num_bytes: int) -> None:
        """Keep a value, as long as there is room."""
        self._values[source] = value, num_bytes
        self._use(source, tenant)
        while self.num_bytes > self._most_bytes:
            self._give_up(max(self._used_by, key=self._held_by))

    def _use(self, source: Source, tenant: str) -> None:
        used = self._used_by.setdefault(tenant, OrderedDict())
        used[source] = None
        used.move_to_end(source)

    def _held_by(self, tenant: str) -> int:
        return sum(self._values[source][1] for source in self._used_by[tenant])

    def _give_up(self, tenant: str) -> None:
        used = self._used_by[tenant]
        source, _ = used.popitem(last=False)
        if not used:
            del self._used_by[tenant]
        if not any(source in others for others in self._used_by.values()):
            del self._values[source]


@dataclass(eq=False)
class _Entry(Generic[T]):
    source: Source
    claim: Claim
    compiled: asyncio.Future[T]
    wanted_by: int = field(default=0)  # requests of the tenant


class GrammarQueue(Generic[T]):
    """Grammars that wait, and those that threads compile now. Lives on one event loop."""

    def __init__(self, compile_one: Callable[[Source, str], T]) -> None:
        """``compile_one`` compiles a source for a tenant, on any thread."""
        self._compile_one = compile_one
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._waiting: list[_Entry[T]] = []
        self._running: list[_Entry[T]] = []
        self._shares = Shares()
        self._arrivals = 0

    async def compiled(self, source: Source, claim: Claim) -> T:
        """Have a grammar compiled. Requests of one tenant for the same grammar share one compilation.

        Raises:
            Overloaded: too many grammars wait, and this one has to give way.
        """
        entry = self._entry(source, claim)
        entry.wanted_by += 1
        try:
            return await asyncio.shield(entry.compiled)
        finally:
            entry.wanted_by -= 1
            if not entry.wanted_by and entry in self._waiting:
                self._waiting.remove(entry)

    def _entry(self, source: Source, claim: Claim) -> _Entry[T]:
        for entry in (*self._running, *self._waiting):
            if entry.source == source and entry.claim.party == claim.party:
                return entry
        claim = claim._replace(arrival=self._arrivals)
        free = MAX_WAITING - len(self._waiting)
        leaving = who_gives_way(claim, 1, free, self._waiting, lambda _: 1, among_requests=False)
        full = f"{len(self._waiting)} grammars wait to be compiled"
        if leaving is None:
            raise Overloaded(full)
        for entry in leaving:
            self._waiting.remove(entry)
            entry.compiled.set_exception(Overloaded(full))
        self._arrivals += 1
        entry = _Entry(source, claim, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._start_next()
        return entry

    def _start_next(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._running) < NUM_THREADS:
            busy = {entry.claim.tenant for entry in self._running}
            ready = [entry for entry in self._waiting if entry.claim.tenant not in busy]
            if not ready:
                return
            entry = self._shares.in_turn(ready, LONG_MS)[0]
            self._waiting.remove(entry)
            self._running.append(entry)
            work = partial(self._compile_one, entry.source, entry.claim.tenant)
            running = loop.run_in_executor(self._threads, work)
            running.add_done_callback(partial(self._ended, entry, loop.time()))

    def _ended(self, entry: _Entry[T], started_s: float, running: asyncio.Future[T]) -> None:
        self._running.remove(entry)
        took_ms = round(1000 * (asyncio.get_running_loop().time() - started_s)) + 1
        self._shares.note(entry.claim, took_ms)
        left = [waiting.claim for waiting in self._waiting]
        self._shares.served([(entry.claim, took_ms)], left, LONG_MS)
        _pass_on(running, entry.compiled)
        self._start_next()


def _pass_on(done: asyncio.Future[T], to: asyncio.Future[T]) -> None:
    if done.cancelled():
        to.cancel()
    elif (error := done.exception()) is not None:
        to.set_exception(error)
        # If nobody waits any longer, nobody need hear of it.
        to.exception()
    else:
        to.set_result(done.result())


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
            # Its text has our paths.
            with suppress(ValueError):
                self._read = load_tokenizer(self._path, self._vocab_size, self._eos_token_ids)
        return self._read


def _grammar(compiled: "LLMatcher | str", field: str) -> Grammar:
    if compiled is _MISSING:
        fix = "needs the package llguidance, which the attention worker does not have"
        raise InvalidInput(field, fix, code="unsupported_parameter")
    if isinstance(compiled, str):
        raise InvalidInput(field, compiled)
    return Grammar(compiled, field)
