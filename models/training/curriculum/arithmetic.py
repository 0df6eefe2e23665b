"""Sums, differences and products, written out one digit a step, and comparisons of numbers."""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from models.training.curriculum.items import Group, Split, alone

T = TypeVar("T", bound=Sequence[object])

# The test wordings put words together that training wordings have, in another order.
SUMS: dict[Split, tuple[str, ...]] = {
    "train": (
        "What is {a} + {b}?",
        "Add {a} and {b}.",
        "{a} + {b} =",
        "How much is {a} plus {b}?",
        "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?",
    ),
    "test": ("Calculate the sum of {a} and {b}.", "What is {a} plus {b}?"),
}
DIFFERENCES: dict[Split, tuple[str, ...]] = {
    "train": (
        "What is {a} - {b}?",
        "Subtract {b} from {a}.",
        "{a} - {b} =",
        "How much is {a} minus {b}?",
        "Calculate {a} - {b}.",
        "What is the difference of {a} and {b}?",
    ),
    "test": ("Calculate the difference of {a} and {b}.", "What is {a} minus {b}?"),
}
PRODUCTS: dict[Split, tuple[str, ...]] = {
    "train": (
        "What is {a} * {b}?",
        "Multiply {a} by {b}.",
        "{a} * {b} =",
        "How much is {a} times {b}?",
        "Calculate {a} * {b}.",
        "What is the product of {a} and {b}?",
    ),
    "test": ("Calculate the product of {a} and {b}.", "What is {a} times {b}?"),
}
LARGER: dict[Split, tuple[str, ...]] = {
    "train": (
        "Which is larger, {a} or {b}?",
        "Which number is larger: {a} or {b}?",
        "What is the larger one of {a} and {b}?",
        "Tell me the larger number: {a} or {b}.",
        "{a} or {b}: which is larger?",
    ),
    "test": ("{a} and {b}: which number is larger?", "Tell me which is larger, {a} or {b}."),
}
WORDS_OF_LENGTH = ("one digit", "two digits", "three digits")


def held_out(*numbers: object) -> bool:
    """Tell whether numbers (or words), in any order, are kept for the test split: one in eight."""
    joined = " ".join(sorted(map(str, numbers)))
    # Neighbouring short texts have related checksums, so a prime mixes their bits first.
    return zlib.crc32(joined.encode()) % 1009 % 8 == 0


def of_split(split: Split, draw: Callable[[], T]) -> T:
    """Draw until the values belong to the split.

    Raises:
        ValueError: there seem to be no such values.
    """
    for _ in range(10_000):
        if held_out(*(values := draw())) == (split == "test"):
            return values
    raise ValueError(f"no values for the {split} split: the choice is too small")


def sums(rng: random.Random, split: Split) -> Group:
    """Ask for a sum of two numbers up to 999."""
    a, b = of_split(split, lambda: (_number(rng), _number(rng)))
    lines, carry = [], 0
    for x, y in _digits(a, b):
        total = x + y + carry
        step = f"{x}+{y}{f'+{carry}' if carry else ''}={total}"
        carry = total // 10
        lines.append(_written(step, total % 10, f", carry {carry}" if carry else ""))
    answer = _finished(lines, carry, "sum", a + b)
    family = f"sum of {WORDS_OF_LENGTH[len(str(max(a, b))) - 1]}"
    return alone(family, _worded(rng, SUMS[split], a, b), answer)


def differences(rng: random.Random, split: Split) -> Group:
    """Ask for a difference that is not below zero."""
    b, a = of_split(split, lambda: sorted((_number(rng), _number(rng))))
    lines, borrow = [], 0
    for x, y in _digits(a, b):
        short = x < y + borrow
        top = x + 10 if short else x
        left = top - y - borrow
        step = f"{top}-{y}{'-1' if borrow else ''}={left}"
        lines.append(_written(step, left, ", borrow 1" if short else ""))
        borrow = int(short)
    answer = _finished(lines, 0, "difference", a - b)
    return alone("difference", _worded(rng, DIFFERENCES[split], a, b), answer)


def products(rng: random.Random, split: Split) -> Group:
    """Ask for a product of a number up to 999 and a digit."""
    a, b = of_split(split, lambda: (_number(rng), rng.randrange(10)))
    lines, carry = [], 0
    for x, _ in _digits(a, 0):
        total = x * b + carry
        # Multiplying and adding the carry at once would be two steps in one.
        step = f"{x}*{b}={x * b}" + (f", {x * b}+{carry}={total}" if carry else "")
        carry = total // 10
        lines.append(_written(step, total % 10, f", carry {carry}" if carry else ""))
    answer = _finished(lines, carry, "product", a * b)
    return alone("product", _worded(rng, PRODUCTS[split], a, b), answer)


def comparisons(rng: random.Random, split: Split) -> Group:
    """Ask for the larger or the smaller of two numbers."""
    a, b = of_split(split, lambda: _pair(rng))
    asked = _worded(rng, LARGER[split], a, b)
    larger = rng.random() < 0.5
    if not larger:
        asked = asked.replace("larger", "smaller")
    return alone("compare numbers", asked, str(max(a, b) if larger else min(a, b)))


def final_number(answer: str) -> str | None:
    """Read the result off an answer: its last line's number, or a bare number."""
    lines = answer.strip().splitlines()
    if not lines:
        return None
    found = re.fullmatch(r"(?:The (?:sum|difference|product) is )?(\d+)\.?", lines[-1].strip())
    return found[1] if found else None


def _number(rng: random.Random) -> int:
    """Draw a number: most have two or three digits."""
    length = rng.choices((1, 2, 3), (1, 4, 5))[0]
    return rng.randrange(10 ** (length - 1) if length > 1 else 0, 10**length)


def _pair(rng: random.Random) -> tuple[int, int]:
    """Draw two different numbers: half of the pairs have digits in common."""
    a = _number(rng)
    b = a
    while b == a:
        b = _number(rng)
        if rng.random() < 0.5:
            digits = list(str(a))
            digits[rng.randrange(len(digits))] = rng.choice("123456789")
            b = int("".join(digits))
    return a, b


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    """Pair the digits of two numbers from the ones up: those that lack are 0."""
    length = max(len(str(a)), len(str(b)))
    return [(a // 10**place % 10, b // 10**place % 10) for place in range(length)]


def _written(step: str, digit: int, over: str) -> str:
    """Write one step, its digit, and what goes over to the next step."""
    return f"{step}, write {digit}{over}."


def _finished(lines: Sequence[str], carry: int, name: str, result: int) -> str:
    """Put the steps, the last carry and the result together."""
    last = [f"write {carry}."] if carry else []
    return "\n".join([*lines, *last, f"The {name} is {result}."])


def _worded(rng: random.Random, wordings: Sequence[str], a: int, b: int) -> str:
    """Fill one of the wordings."""
    return rng.choice(wordings).format(a=a, b=b)
