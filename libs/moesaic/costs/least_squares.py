"""Solutions of a few equations with a few unknowns, faster than numpy's for so few."""

from collections.abc import Sequence

_SINGULAR = 1e-9  # pivot of equations that say the same


def solve(
    matrix: Sequence[Sequence[float]], wanted: Sequence[float], chosen: Sequence[int]
) -> list[float] | None:
    """Solve ``matrix @ x = wanted`` for the ``chosen`` rows and columns.

    Args:
        matrix: ``[n][n]``, symmetric, with ones on its diagonal.
        wanted: ``[n]``.
        chosen: indices.

    Returns:
        ``[len(chosen)]``; None if two unknowns cannot be told apart.
    """
    rows = [[matrix[i][j] for j in chosen] + [wanted[i]] for i in chosen]
    if not _eliminate(rows):
        return None
    return [row[-1] for row in rows]


def inverse(matrix: Sequence[Sequence[float]], chosen: Sequence[int]) -> list[list[float]]:
    """Invert the ``chosen`` rows and columns of ``matrix``, which ``solve`` can solve."""
    size = len(chosen)
    rows = [
        [matrix[i][j] for j in chosen] + [float(at == column) for column in range(size)]
        for at, i in enumerate(chosen)
    ]
    _eliminate(rows)
    return [row[size:] for row in rows]


def _eliminate(rows: list[list[float]]) -> bool:
    """Turn the left part of ``rows`` into ones on a diagonal; False if that cannot be."""
    size = len(rows)
    for at in range(size):
        best = max(range(at, size), key=lambda i: abs(rows[i][at]))
        rows[at], rows[best] = rows[best], rows[at]
        pivot = rows[at][at]
        if abs(pivot) < _SINGULAR:
            return False
        rows[at] = [each / pivot for each in rows[at]]
        for i in range(size):
            if i != at and (part := rows[i][at]):
                rows[i] = [x - part * y for x, y in zip(rows[i], rows[at], strict=True)]
    return True
