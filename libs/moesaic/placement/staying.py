"""Moving as little as possible: which instance takes which part of a new placement."""

from collections.abc import Sequence

from moesaic.messages.placement import EMPTY_SLOT

Layer = Sequence[Sequence[int]]  # [N][slots]


def staying(old: Layer, new: Layer) -> list[list[int]]:
    """One layer's new experts, on the instances and in the slots where most of them are already.

    Who serves a set of experts does not matter to instances alike, so sets go to instances with as
    many slots that hold most of them, largest overlap first, ties to the lowest. Greedy, so not
    always the fewest moves; but never more than if each instance took its own set.

    Args:
        old: what instances hold, ``[N][slots]``; -1 is empty.
        new: what they should hold, of the same shape.
    """
    wanted = [{expert for expert in experts if expert != EMPTY_SLOT} for experts in new]
    held = [{expert for expert in experts if expert != EMPTY_SLOT} for experts in old]
    order = sorted(
        (-len(held[n] & wanted[m]), n != m, n, m)
        for n in range(len(new))
        for m in range(len(new))
        if len(new[n]) == len(new[m])
    )
    taken: dict[int, int] = {}
    for _, _, n, m in order:
        if n not in taken and m not in taken.values():
            taken[n] = m
    as_they_are = sum(len(held[n] & wanted[n]) for n in range(len(new)))
    if sum(len(held[n] & wanted[m]) for n, m in taken.items()) < as_they_are:
        taken = {n: n for n in range(len(new))}
    return [_in_place(old[n], new[taken[n]]) for n in range(len(new))]


def _in_place(old: Sequence[int], new: Sequence[int]) -> list[int]:
    """The experts of ``new``, those of ``old`` in their slots."""
    missing = [expert for expert in new if expert != EMPTY_SLOT and expert not in old]
    slots = [expert if expert in new else EMPTY_SLOT for expert in old[: len(new)]]
    slots += [EMPTY_SLOT] * (len(new) - len(slots))
    beyond = [e for e in old[len(new) :] if e in new and e != EMPTY_SLOT]
    for expert in missing + beyond:
        slots[slots.index(EMPTY_SLOT)] = expert
    return slots
