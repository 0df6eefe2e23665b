"""Unselected answers of the demo checkpoint: the first rows of every kind, right or wrong."""

from collections import defaultdict
from collections.abc import Sequence

from models.training.judge import Continuation, Row

SHOWN = 20


def render(rows: Sequence[Row], told: Sequence[Continuation]) -> str:
    """Write the page of samples as Markdown."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    sections = [_section(family, _mixed(own)) for family, own in sorted(families.items())]
    return "\n\n".join([_HEAD, *sections, _stories(told)]) + "\n"


_HEAD = f"""# Samples of the demo checkpoint

Up to {SHOWN} rows of each kind that the [card](README.md) measures. They are the first ones drawn from the test
split, not selected. No training row has its names, numbers and sentence patterns. `wrong` marks an answer that differs
from the expected one. `python -m models.training export` writes this page."""


def _mixed(rows: Sequence[Row]) -> list[Row]:
    """The first rows of every form, in turns."""
    forms: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        forms[row.form].append(row)
    longest = max(map(len, forms.values()))
    turns = [own[i] for i in range(longest) for own in forms.values() if i < len(own)]
    return turns[:SHOWN]


def _section(family: str, rows: Sequence[Row]) -> str:
    lines = [f"## {family[0].upper()}{family[1:]}", ""]
    for row in rows:
        mark = "" if row.right else f" (**wrong**: {_quoted(row.wanted)})"
        lines.append(f"- {_quoted(row.asked)} → {_quoted(row.given)}{mark}")
    return "\n".join(lines)


def _stories(told: Sequence[Continuation]) -> str:
    lines = [
        "## Stories continued",
        "",
        "The start was given. The model wrote the part in italics.",
    ]
    for one in told[:SHOWN]:
        found = "; ".join(f"{fault.kind}: {fault.sentence}" for fault in one.faults)
        mark = f" **Fault: {found}**" if found else ""
        lines += ["", f"> {one.start} *{one.rest}*{mark}"]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """One line of code, whatever the text holds."""
    flat = text.replace("\n", " ⏎ ")
    return f"``{flat}``" if "`" in flat else f"`{flat}`"
