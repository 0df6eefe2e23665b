"""Proposals for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.7  # from 0 to 1; a proposal less like the name would mislead


def nearest(name: str, names: Iterable[str]) -> str:
    """Find the name most like ``name``; empty if none is like it."""
    return next(iter(get_close_matches(name, sorted(names), 1, LIKENESS)), "")


def proposal(name: str, names: Iterable[str]) -> str:
    """Write ``, did you mean --slots-per-layer?``, to follow a complaint; empty if no name is near."""
    found = nearest(name, names)
    return f", did you mean {found}?" if found else ""
