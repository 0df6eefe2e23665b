"""Chat templates written for these tests, in the patterns that model families publish."""

import re
from pathlib import Path

_HEAD = re.compile(r"^\{# template: (\w+) #\}\n", re.MULTILINE)


def read_corpus() -> dict[str, str]:
    """Read all templates, by name."""
    found: dict[str, str] = {}
    for path in sorted((Path(__file__).parent / "corpus").glob("*.jinja")):
        _, *pieces = _HEAD.split(path.read_text(encoding="utf-8"))
        found |= dict(
            zip(pieces[::2], (source.removesuffix("\n") for source in pieces[1::2]), strict=True)
        )
    return found
