"""A sandbox for chat templates: they reach nothing outside, and their time and memory are bounded.

A template is a program that comes with a model. Everything in it that can take long or grow is counted: rounds of
loops, calls, and the characters that operators and methods make. Features that cannot be counted are left out.
"""

import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # rounds of loops and calls, in one rendering
MAX_MADE = 64_000_000  # characters and elements that are made on the way
MAX_CHARACTERS = 4_000_000  # of one text
MAX_BITS = 4096  # of a number
MAX_WIDTH = 1000  # of what is padded or indented
RENDER_S = 1.0  # of CPU
_LOOK_EVERY = 16  # steps between two looks at the clock
_UNBOUNDED = (
    "batch",
    "center",
    "format",
    "pprint",
    "round",
    "slice",
    "urlize",
    "wordwrap",
    "xmlattr",
)
_PADDING = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_WIDE = re.compile(
    r"\d{4}|\{[^{}]*:[^{}]*\{"
)  # a width in a format, or one that comes from elsewhere


class TooMuch(jinja2.TemplateRuntimeError):
    """A template takes more than any template needs."""


class Budget:
    """The budgets that one rendering has left."""

    def __init__(self) -> None:
        self._steps = self._made = 0
        self._until_s = time.thread_time() + RENDER_S

    def step(self) -> None:
        """Count one round of a loop, or one call."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooMuch(f"it takes more than {MAX_STEPS} steps")
        if self._steps % _LOOK_EVERY == 0 and time.thread_time() > self._until_s:
            raise TooMuch(f"it takes more than {RENDER_S:g} s")

    def make(self, size: int) -> None:
        """Count a text or a list of this size, before it is made."""
        self._made += size
        if size > MAX_CHARACTERS or self._made > MAX_MADE:
            raise TooMuch(f"it makes texts of more than {MAX_CHARACTERS} characters")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with budgets: one rendering a thread at a time, within ``budgeted``."""

    intercepted_binops = frozenset({"*", "+", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        self._local = threading.local()
        for name in _UNBOUNDED:
            del self.filters[name]
        del self.globals["lipsum"]
        self._join, self._indent = self.filters["join"], self.filters["indent"]
        self.filters |= {"join": self._joined, "indent": self._indented, "replace": self._replaced}
        self.filters |= {
            "counted of": self._counted,
            "text of": self._text,
            "weighed": self._weighed,
        }

    @contextmanager
    def budgeted(self) -> Iterator[None]:
        """Render one template."""
        self._local.budget = Budget()
        try:
            yield
        finally:
            del self._local.budget

    @property
    def _budget(self) -> Budget:
        budget: Budget = self._local.budget
        return budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute, unless the result is larger than a template may need."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if abs(bits) + right.bit_length() > MAX_BITS:
                raise TooMuch("it makes numbers that are too long")
        elif operator == "%" and isinstance(left, str):
            if _WIDE.search(left) or "*" in left:
                raise TooMuch("it pads texts")
            self._budget.make(len(left))
        elif operator == "+":
            self._budget.make(_size(left) + _size(right))
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    self._budget.make(_size(sized) * max(0, times))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that templates may call, with arguments of any other name."""
        self, obj = __self, __obj
        self._budget.step()
        method = getattr(obj, "__wrapped__", obj)  # Jinja's sandbox wraps some
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            self._budget.make(len(text))
            if name == "replace":
                return self._replaced(text, *args, **kwargs)
            if name == "join" and args:
                return self._joined_by(text, *args)
            if name in _PADDING and any(isinstance(arg, int) and arg > MAX_WIDTH for arg in args):
                raise TooMuch("it pads texts")
            if name in ("format", "format_map", "translate") and _WIDE.search(text):
                raise TooMuch("it pads texts")
        return self._weighed(super(Sandbox, self).call(__context, obj, *args, **kwargs))

    def _counted(self, iterable: Iterable[Any]) -> Iterator[Any]:
        for item in iterable:
            self._budget.step()
            yield item

    def _text(self, parts: list[Any]) -> str:
        texts = [str(self._weighed(part)) for part in parts]
        self._budget.make(sum(map(len, texts)))
        return "".join(texts)

    def _weighed(self, value: Any) -> Any:
        """Return the value, unless writing it out or comparing it would not end."""
        left = [value]
        while left:
            held = left.pop()
            if isinstance(held, (list, tuple, dict)):
                self._budget.step()
                inner = held.values() if isinstance(held, dict) else held
                left += [item for item in inner if isinstance(item, (list, tuple, dict))]
        return value

    def _replaced(self, text: Any, old: Any, new: Any, count: int | None = None) -> str:
        whole, part, by = str(text), str(old), str(new)
        self._budget.make(len(whole) + whole.count(part) * len(by))
        return whole.replace(part, by, -1 if count is None else count)

    def _joined(self, value: Iterable[Any], d: str = "", attribute: Any = None) -> Any:
        items = list(self._counted(value))
        if attribute is not None:
            items = [self.getattr(item, str(attribute)) for item in items]
        return self._joined_by(str(d), items)

    def _joined_by(self, separator: str, value: Iterable[Any]) -> str:
        texts = [str(item) for item in self._counted(value)]
        self._budget.make(sum(map(len, texts)) + len(separator) * len(texts))
        return str(separator).join(texts)

    def _indented(self, text: str, width: int | str = 4, *args: Any, **kwargs: Any) -> Any:
        each = len(width) if isinstance(width, str) else width
        self._budget.make(len(text) + str(text).count("\n") * each)
        return self._indent(text, width, *args, **kwargs)


class _Counting(NodeTransformer):
    """Puts counters between the parts of a template; none of it can be computed beforehand."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count the rounds."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted of")
        return node

    def visit_List(self, node: nodes.Literal) -> nodes.Node:
        """Weigh the parts that are put together."""
        self.generic_visit(node)
        return _filtered(node, "weighed")

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """The same, where it is no target of an assignment."""
        self.generic_visit(node)
        return _filtered(node, "weighed") if node.ctx == "load" else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Count the characters."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "text of")


def _filtered(node: nodes.Node, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0
