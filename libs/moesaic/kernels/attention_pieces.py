# The pieces of a long context, which few rows attend to side by side. Imports no torch.
#   Order      cut by position, and by the length of the sequence alone: a row's result depends on no row beside it.
"""Pieces of a context: how many keys each has, and how many there are at most."""

SPLIT = 512  # keys of a piece, at least
WIDE = 256  # columns of a value; wider ones (latents) take twice the keys, since each piece writes a row of them
MAX_PIECES = 64  # of a sequence: bounds the scratch of a step, and what is merged


def least_keys(value_dim: int) -> int:
    """Return the number of keys of a piece; it doubles until ``MAX_PIECES`` hold a sequence."""
    return SPLIT if value_dim <= WIDE else 2 * SPLIT


def most_pieces(max_length: int, value_dim: int) -> int:
    """Return the largest number of pieces of a sequence of up to ``max_length`` tokens."""
    return min(MAX_PIECES, max(1, -(-max_length // least_keys(value_dim))))
