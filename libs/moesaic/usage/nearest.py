"""What somebody meant who wrote a name that there is not."""

from collections.abc import Iterable
from difflib import get_close_matches

LIKENESS = 0.7  # from 0 to 1; below it a proposal would rather mislead


def nearest(name: str, names: Iterable[str]) -> str:
    """The name of ``names`` that is most like ``name``; empty if none is."""
    return next(iter(get_close_matches(name, sorted(names), 1, LIKENESS)), "")


def proposal(name: str, names: Iterable[str]) -> str:
    """``, did you mean --slots-per-layer?``, to be put behind what is wrong; empty if nothing is near."""
    found = nearest(name, names)
    return f", did you mean {found}?" if found else ""
