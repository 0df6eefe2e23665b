"""The picture and the table of the page about traces, made from the trace of one request.

``python -m tests.telemetry.trace_picture`` starts a suite of the demo model with two expert workers and a collector. It
asks for an answer of 20 tokens, draws ``trace.svg``, and prints the table for ``traces.md``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.suites import ROOT, SERVED_PROMPT, running
from tests.telemetry.collector import AT_ONCE, TakenSpan, collecting
from tests.waiting import eventually

PICTURE = ROOT / "docs/operate/trace.svg"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
COLOURS = {"gateway": "#3b6fb6", "attention": "#c26a1b"}
EXPERTS = "#4a9a5b"
# In pixels.
LEFT, WIDE, ROW, RIGHT, TOP = 250, 640, 20, 170, 40
SHOWN = ("steps", "rows", "computed_s", "expert_wait_s", "layers", "worker_id")


@dataclass(frozen=True)
class Drawn:
    """A span as a row: its depth in the tree, and its times in milliseconds since the request."""

    taken: TakenSpan
    depth: int
    begin_ms: float
    end_ms: float

    @property
    def name(self) -> str:
        """Its name, with the expert worker whose time it is."""
        worker = self.taken.attributes.get("moesaic.worker_id", "")
        return f"{self.taken.name} {worker}" if self.taken.name == "experts" else self.taken.name

    @property
    def service(self) -> str:
        """The role that sent it."""
        return self.taken.service.removeprefix("moesaic-")

    @property
    def facts(self) -> str:
        """Its numbers, for the table."""
        found: dict[str, Any] = {}
        for name in SHOWN:
            value = self.taken.attributes.get(f"moesaic.{name}")
            if value is not None:
                found[name.removesuffix("_s").replace("_", " ")] = (
                    f"{value * 1e3:.1f} ms" if name.endswith("_s") else value
                )
        return ", ".join(f"{name} {value}" for name, value in found.items())


def recorded() -> list[TakenSpan]:
    """Spans of one request to a suite that has answered some before."""
    body: dict[str, Any] = {"model": "demo", "max_tokens": 20, "ignore_eos": True}
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    with TemporaryDirectory() as directory, collecting() as collector:
        flags = f"--otlp-endpoint={collector.address}", "--trace-share=0"
        with running(Path(directory), *flags, settings=AT_ONCE) as suite, suite.client() as client:
            suite.until_serving()
            for number in range(8):
                words = body | {"prompt": f"{number} {SERVED_PROMPT}"}
                client.post("/v1/completions", json=words).raise_for_status()
            words = body | {"prompt": f"Now {SERVED_PROMPT}"}
            client.post("/v1/completions", json=words, headers=header).raise_for_status()

            def whole() -> list[TakenSpan]:
                found = collector.of(TRACE)
                names = {each.name for each in found}
                return found if {"POST /v1/completions", "run"} <= names else []

            return eventually(whole)


def rows(taken: list[TakenSpan]) -> Iterator[Drawn]:
    """Order spans as a tree, the earlier of siblings first."""
    begin_ns = min(each.times[0] for each in taken)

    def below(parent: str, depth: int) -> Iterator[Drawn]:
        for each in taken:
            if each.span.parent_span_id.hex() == parent:
                begin, end = ((at - begin_ns) / 1e6 for at in each.times)
                yield Drawn(each, depth, begin, end)
                yield from below(each.span.span_id.hex(), depth + 1)

    yield from below(PARENT, 0)


def drawing(shown: list[Drawn]) -> str:
    """Draw a row for each span, on one scale of milliseconds."""
    scale = WIDE / max(each.end_ms for each in shown)
    height, width = TOP + ROW * len(shown) + 10, LEFT + WIDE + RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, (name, colour) in enumerate(
        [*COLOURS.items(), ("expert worker, as told", EXPERTS)]
    ):
        left = 10 + 110 * number
        parts.append(f'<rect x="{left}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17}" y="20">{name}</text>')
    for number, each in enumerate(shown):
        y = TOP + ROW * number
        x, long = LEFT + each.begin_ms * scale, max(1.0, (each.end_ms - each.begin_ms) * scale)
        colour = EXPERTS if each.taken.name == "experts" else COLOURS[each.service]
        if number % 2:
            parts.append(f'<rect y="{y}" width="{width}" height="{ROW}" fill="#f4f4f4"/>')
        parts.append(f'<text x="{10 + 14 * each.depth}" y="{y + 14}">{escape(each.name)}</text>')
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 4}" width="{long:.1f}" height="{ROW - 8}" fill="{colour}"/>'
        )
        told = f"{each.end_ms - each.begin_ms:.1f} ms"
        parts.append(f'<text x="{x + long + 5:.1f}" y="{y + 14}" fill="#444">{told}</text>')
    return "\n".join([*parts, "</svg>", ""])


def table(shown: list[Drawn]) -> str:
    """Write the same as a table of Markdown; times are milliseconds since the request."""
    lines = ["| span | service | begins | ends | some attributes |", "|---|---|--:|--:|---|"]
    for each in shown:
        name = f"{'· ' * each.depth}`{each.taken.name}`"
        times = f"{each.begin_ms:.1f} | {each.end_ms:.1f}"
        lines.append(f"| {name} | {each.service} | {times} | {each.facts} |")
    return "\n".join(lines)


def main() -> None:
    """Record, draw and print."""
    shown = list(rows(recorded()))
    PICTURE.write_text(drawing(shown), encoding="utf-8")
    print(table(shown))


if __name__ == "__main__":
    main()
