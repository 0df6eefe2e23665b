"""Sizes of memory as people write them, such as 40M; pure."""

import re

from moesaic.cli.terminal.outcome import CommandError, Exit

UNITS = {
    "B": 1,
    **{
        name: 1000**power
        for power, letter in enumerate("KMGT", 1)
        for name in (letter, f"{letter}B")
    },
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)")


def read_size(flag: str, text: str) -> int:
    """Read a size in bytes: K, M and G are powers of 1,000, and KiB, MiB and GiB of 1,024.

    Raises:
        CommandError: ``text`` is no size, or less than a byte; names ``flag``.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise CommandError(
            f"{flag} {text}: it must be a number with a unit (K, M, G; KiB, MiB, GiB; or B), "
            "such as 40M",
            Exit.USAGE,
        )
    size = int(float(found[1]) * unit)
    if size < 1:
        raise CommandError(f"{flag} {text}: it must be more than 0, such as 40M", Exit.USAGE)
    return size


def read_memory(text: str, agents: int) -> tuple[int, ...]:
    """Read ``--memory``: one size for all agents, or one for each.

    Returns:
        Bytes by agent; empty if ``text`` is.

    Raises:
        CommandError: a size is wrong, or their number is.
    """
    if not text:
        return ()
    sizes = tuple(read_size("--memory", size) for size in text.split(","))
    if len(sizes) == 1:
        return sizes * agents
    if len(sizes) != agents:
        raise CommandError(
            f"--memory {text}: these are {len(sizes)} sizes for {agents} agents; give one for all, "
            f"one for each, or --agents {len(sizes)}",
            Exit.USAGE,
        )
    return sizes
