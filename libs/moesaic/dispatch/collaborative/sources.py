"""Sources for the experts of a batch that are not in slots here. Pure.

The peers that hold an expert are compared, and the files of this machine beside them. A peer that gets rows
of several experts gets one message, so its round trip counts once. The experts with the fewest holders
choose first; each takes the source that would then be done first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moesaic.dispatch.collaborative.costs import LinkProfile

# A message more has to be worth it: it keeps this process and a peer busy.
ANOTHER_MESSAGE = 4 / 3
FILES = -1  # the source that stands for this machine's own files


@dataclass(frozen=True)
class FileCost:
    """Costs of this machine's own files.

    Attributes:
        load_s: reading one expert that is not in memory.
        row_s: computing one row.
    """

    load_s: float
    row_s: float = 0.0


@dataclass
class _Work:
    """Work of one source, if it were chosen."""

    rows: int = 0
    experts: list[int] = field(default_factory=list)


def choose_sources(
    rows_of: Mapping[int, int],
    holders: Mapping[int, Sequence[int]],
    peers: Mapping[int, LinkProfile],
    files: FileCost | None,
    row_bytes: int,
) -> dict[int, list[int]]:
    """Divide experts among those that can compute them.

    Args:
        rows_of: rows of each expert that is wanted.
        holders: peers that hold each of them, by their index; may be missing or empty.
        peers: costs of the peers that can be reached now.
        files: costs of the files here; None: they cannot be used.
        row_bytes: bytes of a row and its sum together, on a link.

    Returns:
        Experts by source, ascending: a peer's index, or ``FILES``. Experts without any source are left out.
    """
    work: dict[int, _Work] = {}
    reachable = {
        expert: [peer for peer in holders.get(expert, ()) if peer in peers] for expert in rows_of
    }

    def done_s(source: int, rows: int) -> float:
        before = work.get(source, _Work())
        price = 1.0 if source in work else ANOTHER_MESSAGE
        if source == FILES:
            assert files is not None
            num_loads = len(before.experts) + 1
            return num_loads * files.load_s + (before.rows + rows) * files.row_s
        return price * peers[source].seconds(before.rows + rows, row_bytes)

    for expert in sorted(rows_of, key=lambda e: (len(reachable[e]), -rows_of[e], e)):
        possible = list(reachable[expert]) + ([FILES] if files is not None else [])
        if not possible:
            continue
        rows = rows_of[expert]
        best = min(possible, key=lambda s: (done_s(s, rows), s == FILES, s))
        chosen = work.setdefault(best, _Work())
        chosen.rows += rows
        chosen.experts.append(expert)
    return {source: sorted(work[source].experts) for source in sorted(work)}
