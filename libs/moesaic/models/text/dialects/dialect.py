"""A model's dialect: its reasoning, its calls, and the answer around them, read and bound together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from moesaic.models.text.dialects import harmony
from moesaic.models.text.dialects.call_form import CallForm, new_id
from moesaic.models.text.dialects.functions import ToolFunction
from moesaic.models.text.dialects.reader import Reader, Reading
from moesaic.models.text.dialects.rules import FREE, Rules
from moesaic.models.text.dialects.thinking import Opened, ThinkingTags

TokenId = Callable[[str], int | None]
Body = Callable[[Rules], str]  # the rule of an answer that is no call


@dataclass(frozen=True)
class Wanted:
    """Calls that an answer may have.

    Attributes:
        tools: functions that may be called; none: no call is read.
        needed: the answer must call one of them.
        bound: calls keep to their form, and arguments of strict functions to their schemas.
        many: it may have several calls.
    """

    tools: Sequence[ToolFunction] = ()
    needed: bool = False
    bound: bool = False
    many: bool = True


NOTHING = Wanted()


@dataclass(frozen=True)
class Dialect:
    """Reasoning between tags, then text and calls. Either may be missing."""

    thinking: ThinkingTags | None = None
    calls: CallForm | None = None

    @property
    def can_call(self) -> bool:
        """True if its calls are known."""
        return self.calls is not None

    @property
    def thinks(self) -> bool:
        """True if its reasoning is set apart."""
        return self.thinking is not None

    def markers(self, wanted: Wanted) -> tuple[str, ...]:
        """List the texts that must be left in an answer for it to be read."""
        found = self.calls.markers if self.calls and wanted.tools else ()
        return (*self.thinking[1:], *found) if self.thinking else found

    def left_by(self, prompt: str) -> Opened:
        """Tell how the end of a prompt leaves the reasoning."""
        return self.thinking.left_by(prompt) if self.thinking else "closed"

    def left_within(self, message: str) -> Opened:
        """Find out if reasoning is open at the end of a message's beginning."""
        return self.thinking.left_within(message) if self.thinking else "closed"

    def closing(self, prompt: str) -> str | None:
        """Return the text that ends the open reasoning of a prompt; empty: it is closed; None: there is none."""
        return self.thinking.closing(prompt) if self.thinking else None

    def reader(self, wanted: Wanted, opened: Opened) -> Reader | None:
        """Make a reader of one answer; None: all of it is content."""
        if not self.thinking and not (self.calls and wanted.tools):
            return None
        read = partial(self._read, wanted=wanted, opened=opened)
        return Reader(read, one_call=not wanted.many)

    def new_id(self) -> str:
        """Make the id of a call."""
        return self.calls.new_id() if self.calls else new_id()

    def _read(self, reader: Reader, wanted: Wanted, opened: Opened) -> Reading[None]:
        form = self.calls if wanted.tools else None
        markers = (*form.openings, *form.frames) if form else ()
        marker = ""
        if self.thinking:
            ending = markers if form and form.ends_reasoning else ()
            marker = yield from self.thinking.read(reader, opened, ending)
        while True:
            marker = marker or (yield from reader.passed(partial(reader.emit, "content"), markers))
            if not marker or form is None:
                return
            if marker in form.frames:
                yield from reader.skip_blanks()
                marker = ""
                continue
            blanks = reader.blanks_before
            reader.hold()
            if (yield from form.read_call(reader, wanted.tools)):
                if reader.one_call:
                    return
                yield from reader.skip_blanks()
            else:
                reader.restore()
                reader.emit("content", blanks + marker)
            marker = ""

    def grammar(
        self,
        token_id: TokenId,
        opened: Opened,
        wanted: Wanted,
        body: Body | None,
        unenforced: dict[str, set[str]] | None = None,
    ) -> str | None:
        """Write the grammar of an answer; None: any answer is allowed.

        Args:
            token_id: returns the id of the token with exactly that text, if there is one.
            opened: true if the prompt leaves reasoning open, which then comes before the answer.
            wanted: the calls.
            body: the rule of an answer without calls; None: any text.
            unenforced: filled with the keywords that the grammar does not enforce, by function.
        """
        if body is None and not (wanted.tools and (wanted.needed or wanted.bound)):
            return None
        rules = Rules(token_id, self.markers(wanted))
        before = self.thinking.rule(rules, opened) if self.thinking else ""
        answer = self._answer_rule(rules, wanted, body)
        if unenforced is not None:
            unenforced.update(rules.unenforced)
        return rules.whole(f"{before} {answer}")

    def _answer_rule(self, rules: Rules, wanted: Wanted, body: Body | None) -> str:
        if self.calls is None or not wanted.tools:
            assert body is not None
            return body(rules)
        if body is None and not wanted.needed:
            return self._text_and_calls_rule(rules, self.calls, wanted)
        calls = _calls_rule(rules, self.calls, wanted, many=wanted.many)
        return calls if wanted.needed or body is None else f"({calls} | {body(rules)})"

    def _text_and_calls_rule(self, rules: Rules, form: CallForm, wanted: Wanted) -> str:
        """Write the rule of text with calls in it, which bind from their first marker on."""
        often = "*" if wanted.many else "?"
        trigger = (*form.frames, *form.openings)[0]
        if rules.is_token(trigger):
            calls = _calls_rule(rules, form, wanted, many=wanted.many)
            return f"{rules.add(FREE)} ({calls} {rules.add(FREE)}){often}"
        text = rules.free_until(trigger)
        rules.lead = trigger
        calls = _calls_rule(rules, form, wanted, many=False)
        return f"({text} {calls}){often} {rules.add(FREE)}"


@dataclass(frozen=True)
class Harmony(Dialect):
    """All of it on channels."""

    @property
    def can_call(self) -> bool:
        """Calls are a part of it."""
        return True

    @property
    def thinks(self) -> bool:
        """Reasoning is a part of it."""
        return True

    def markers(self, wanted: Wanted) -> tuple[str, ...]:
        """List the tokens around and within messages."""
        return harmony.MARKERS

    def left_by(self, prompt: str) -> Opened:
        """Leave it to the model: prompts begin no channel."""
        return "free"

    def reader(self, wanted: Wanted, opened: Opened) -> Reader | None:
        """Make a reader of one answer."""
        read = partial(harmony.read_harmony, functions=wanted.tools)
        return Reader(read, one_call=not wanted.many)

    def _answer_rule(self, rules: Rules, wanted: Wanted, body: Body | None) -> str:
        ways = [harmony.call_rule(rules, function) for function in wanted.tools]
        if not wanted.needed:
            ways.append(harmony.final_rule(rules, body(rules) if body else rules.add(FREE)))
        return f"{harmony.thinking_rule(rules)} ({' | '.join(ways)})"


def _calls_rule(rules: Rules, form: CallForm, wanted: Wanted, *, many: bool) -> str:
    ways = [rules.add(form.call_rule(rules, function)) for function in wanted.tools]
    return form.calls_rule(rules, f"({' | '.join(ways)})", many=many)
