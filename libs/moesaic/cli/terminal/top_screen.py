"""The screen of ``moesaic top``, from a state as ``/v1/moesaic/state`` gives it."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

State = dict[str, Any]
MOST_WORKERS = 24
MOST_DECISIONS = 8  # where the screen has no end
LEAST_LINES = 24
ROLES = ("gateway", "scheduler", "attention", "expert", "edge-agent")


def screen(state: State, height: int = 0) -> RenderableType:
    """Lay out a state.

    Args:
        state: the state.
        height: lines of the terminal; 0: as many as needed.
    """
    shown = max(3, (max(height, LEAST_LINES) - 16) // 3) if height else MOST_WORKERS
    parts: list[RenderableType] = [
        _head(state),
        _traffic(state["traffic"]),
        _services(state, shown),
    ]
    if state["requests"]:
        parts.append(_requests(state["requests"][:shown], len(state["requests"])))
    if state["decisions"]:
        parts.append(_decisions(state["decisions"][: shown if height else MOST_DECISIONS]))
    return Group(*parts)


def _head(state: State) -> Text:
    ready = "ready" if state["ready"] else f"not ready: {'; '.join(state['waiting_for'])}"
    brownout = state.get("brownout") or {}
    parts = [
        f"Moesaic {state['model']}",
        ready,
        f"epoch {state['epoch']}",
        f"brownout {brownout.get('mode', 'unknown')}",
        datetime.fromtimestamp(state["at"], UTC).strftime("%H:%M:%S UTC"),
    ]
    return Text("   ".join(parts), style="bold green" if state["ready"] else "bold red")


def _traffic(traffic: State) -> Text:
    parts = [
        f"{traffic['tokens_per_s']:.1f} tokens/s",
        f"{traffic['requests_per_s']:.1f} requests/s",
        f"{traffic['inflight']} in flight",
        f"{traffic['queued']} queued",
    ]
    for name, title in (("ttft", "first token"), ("itl", "between tokens")):
        if found := traffic.get(name):
            parts.append(f"{title} p50 {_ms(found['p50_s'])}, p99 {_ms(found['p99_s'])}")
    return Text("   ".join(parts))


def _services(state: State, most: int) -> Table:
    services = sorted(state["services"], key=lambda each: (ROLES.index(each["role"]), each["id"]))
    rows = []
    for each in services[:most]:
        load = each.get("load") or {}
        used = load.get("kv_blocks_used", 0) / load["kv_blocks"] if load.get("kv_blocks") else None
        thresholds = ""
        if load and load["mode"] != "off":
            thresholds = f"{load['prefill_threshold']:.2f} {load['decode_threshold']:.2f}"
        rows.append(
            (
                each["id"],
                each["state"],
                load.get("running", ""),
                load.get("waiting", ""),
                "" if load.get("rows_per_s") is None else f"{load['rows_per_s']:.0f}",
                _percent(used),
                thresholds,
                each["experts"] or "",
                _percent(each.get("expert_share")),
            )
        )
    left = len(services) - most
    columns = ("process", "state", "run", "wait", "rows/s", "KV", "thresholds", "experts", "load")
    return _table(columns, rows, f"and {left} more" if left > 0 else "")


def _requests(requests: Iterable[State], count: int) -> Table:
    rows = [
        (each["id"], f"{each['age_s']:.1f} s", each["tokens"], each["waits_for"])
        for each in requests
    ]
    return _table(("request", "age", "tokens", "waits for"), rows, f"{count} in flight")


def _decisions(decisions: Iterable[State]) -> Table:
    rows = [
        (
            datetime.fromtimestamp(each["at"], UTC).strftime("%H:%M:%S"),
            f"{each['kind']}: {each['change']}",
            each["measured"] or (each["predicted"] and f"predicted {each['predicted']}"),
        )
        for each in decisions
    ]
    return _table(("time", "decision", "effect"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Table:
    table = Table(
        box=box.SIMPLE,
        padding=(0, 1),
        caption=caption or None,
        caption_justify="left",
        pad_edge=False,
    )
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
