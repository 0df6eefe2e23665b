"""Days, months, dates, clock times and units, with the steps of each answer written out."""

import random
from collections.abc import Sequence

from models.training.curriculum.arithmetic import of_split
from models.training.curriculum.items import Group, Split, alone

Wordings = dict[Split, tuple[str, ...]]

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30, "July": 31,
    "August": 31, "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip
UNITS = {
    ("week", "days"): 7, ("hour", "minutes"): 60, ("minute", "seconds"): 60, ("day", "hours"): 24,
    ("metre", "centimetres"): 100, ("kilometre", "metres"): 1000, ("kilogram", "grams"): 1000,
}  # fmt: skip

NEXT: Wordings = {
    "train": (
        "What {unit} comes {side} {x}?",
        "Which {unit} is right {side} {x}?",
        "Which {unit} comes {side} {x}?",
        "Name the {unit} {side} {x}.",
        "Tell me the {unit} {side} {x}.",
    ),
    "test": ("What is the {unit} {side} {x}?", "Tell me which {unit} comes right {side} {x}."),
}
STEPS: Wordings = {
    "train": (
        "What {unit} is {n} {units} {side} {x}?",
        "Which {unit} is {n} {units} {side} {x}?",
        "Name the {unit} {n} {units} {side} {x}.",
        "Start at {x}. Which {unit} is it {n} {units} {later}?",
        "It is {x} now. What {unit} is it {n} {units} {later}?",
    ),
    "test": (
        "Tell me which {unit} is {n} {units} {side} {x}.",
        "Start at {x}. What {unit} is {n} {units} {later}?",
    ),
}
LENGTH: Wordings = {
    "train": (
        "How many days does {x} have?",
        "How many days are in {x}?",
        "How long is {x}?",
        "Tell me the number of days in {x}.",
        "What is the number of days of {x}?",
    ),
    "test": ("What is the number of days in {x}?", "Tell me how many days {x} has."),
}
DATE: Wordings = {
    "train": (
        "What date is {n} {days} after {x}?",
        "Which date is {n} {days} after {x}?",
        "It is {x}. What date is it {n} {days} later?",
        "Name the date {n} {days} after {x}.",
        "Today is {x}. Which date is {n} {days} later?",
    ),
    "test": (
        "Today is {x}. What date is it {n} {days} later?",
        "Tell me the date {n} {days} after {x}.",
    ),
}
ORDER: Wordings = {
    "train": (
        "Which date is {side}, {x} or {y}?",
        "Which is {side}: {x} or {y}?",
        "{x} or {y}: which date is {side}?",
        "Tell me the {side} date: {x} or {y}.",
        "What is the {side} one of {x} and {y}?",
    ),
    "test": ("Tell me which date is {side}, {x} or {y}.", "{x} and {y}: which is {side}?"),
}
CONVERT: Wordings = {
    "train": (
        "How many {small} are {n} {big}?",
        "How many {small} are there in {n} {big}?",
        "What is {n} {big} in {small}?",
        "Give {n} {big} in {small}.",
        "How many {small} do {n} {big} have?",
    ),
    "test": ("Tell me what {n} {big} are in {small}.", "{n} {big}: how many {small} is that?"),
}
CLOCK: Wordings = {
    "train": (
        "It is {x}. What time is it {n} minutes later?",
        "What time is {n} minutes after {x}?",
        "Which time is it {n} minutes after {x}?",
        "The clock says {x}. What time is it {n} minutes later?",
        "Name the time {n} minutes after {x}.",
    ),
    "test": (
        "The clock says {x}. Which time is {n} minutes later?",
        "Tell me the time {n} minutes after {x}.",
    ),
}


def weekdays(rng: random.Random, split: Split) -> Group:
    """Ask for the day some days before or after another."""
    return _along(rng, split, "day", DAYS, 7)


def months(rng: random.Random, split: Split) -> Group:
    """Ask for the month some months before or after another, or for a month's days."""
    if rng.random() < 0.2:
        name = rng.choice(list(MONTHS))
        leap = ", and 29 in a leap year" if name == "February" else ""
        answer = f"{name} has {MONTHS[name]} days{leap}."
        return _asked(rng, "dates", LENGTH[split], answer, x=name)
    return _along(rng, split, "month", list(MONTHS), 6)


def dates(rng: random.Random, split: Split) -> Group:
    """Ask for the date some days after another: one in four is in the next month."""
    over = rng.random() < 0.25

    def draw() -> tuple[str, int, int]:
        # How long February is depends on the year, so no date leaves it.
        month = rng.choice([m for m in MONTHS if not over or m != "February"])
        n = rng.randint(1, 20)
        last = MONTHS[month]
        day = rng.randint(last - n + 1, last) if over else rng.randint(1, last - n)
        return month, day, n

    month, day, n = of_split(split, draw)
    answer = f"{month} has {MONTHS[month]} days. {day} + {n} = {day + n}. "
    if over:
        after = _after(list(MONTHS), month, 1)
        rest = day + n - MONTHS[month]
        answer += f"{day + n} - {MONTHS[month]} = {rest}. It is {rest} {after}."
    else:
        answer += f"It is {day + n} {month}."
    days = "days" if n > 1 else "day"
    return _asked(rng, "dates", DATE[split], answer, x=f"{day} {month}", n=n, days=days)


def date_order(rng: random.Random, split: Split) -> Group:
    """Ask for the earlier or the later of two dates of one year."""
    names = list(MONTHS)

    def draw() -> list[str]:
        first = _date(rng)
        second = (first[0], rng.randint(1, 28)) if rng.random() < 0.3 else _date(rng)
        return [f"{day} {names[month]}" for month, day in (first, second)]

    x, y = of_split(split, draw)
    while x == y:
        x, y = of_split(split, draw)
    side = rng.choice(("earlier", "later"))
    ordered = sorted((x, y), key=lambda d: (names.index(d.split()[1]), int(d.split()[0])))
    answer = ordered[0 if side == "earlier" else 1]
    return _asked(rng, "dates", ORDER[split], answer, x=x, y=y, side=side)


def units(rng: random.Random, split: Split) -> Group:
    """Ask for an amount in a smaller unit."""

    def draw() -> tuple[str, str, int]:
        big, small = rng.choice(list(UNITS))
        return big, small, rng.randint(2, 99 if UNITS[big, small] >= 100 else 9)

    big, small, n = of_split(split, draw)
    size = UNITS[big, small]
    steps = f"1 {big} is {size} {small}. "
    if size == 24:
        steps += f"{n} * 20 = {n * 20}. {n} * 4 = {n * 4}. {n * 20} + {n * 4} = {n * 24}."
    elif size == 60:
        steps += f"{n} * 6 = {n * 6}. {n} * 60 = {n * 60}."
    else:
        steps += f"{n} * {size} = {n * size}."
    answer = f"{steps} It is {n * size} {small}."
    return _asked(rng, "units", CONVERT[split], answer, n=n, big=f"{big}s", small=small)


def clock(rng: random.Random, split: Split) -> Group:
    """Ask for the time some minutes later, all in fives."""
    hour, minute, n = of_split(
        split,
        lambda: (f"{rng.randint(1, 12)} h", f"{rng.randrange(12) * 5} m", rng.randint(1, 11) * 5),
    )
    h, m = int(hour.split()[0]), int(minute.split()[0])
    answer = f"{m} + {n} = {m + n}. "
    if m + n >= 60:
        answer += f"{m + n} - 60 = {m + n - 60}. It is {h % 12 + 1}:{m + n - 60:02d}."
    else:
        answer += f"It is {h}:{m + n:02d}."
    return _asked(rng, "units", CLOCK[split], answer, x=f"{h}:{m:02d}", n=n)


def _along(
    rng: random.Random, split: Split, unit: str, circle: Sequence[str], furthest: int
) -> Group:
    """Ask for the place some steps along a circle of days or months."""
    side = rng.choice(("after", "before"))
    sign = 1 if side == "after" else -1
    if rng.random() < 0.3:
        # Neighbours are facts, and no others would tell those held out: only wordings are.
        x = rng.choice(circle)
        answer = _after(circle, x, sign)
        return _asked(rng, "dates", NEXT[split], answer, unit=unit, side=side, x=x)
    x, _, n = of_split(split, lambda: (rng.choice(circle), side, rng.randint(2, furthest)))
    passed = [_after(circle, x, sign * i) for i in range(1, n + 1)]
    counted = ", ".join(f"{i} {name}" for i, name in enumerate(passed, 1))
    later = "later" if side == "after" else "earlier"
    values = {"unit": unit, "units": f"{unit}s", "side": side, "later": later, "x": x, "n": n}
    return _asked(rng, "dates", STEPS[split], f"{counted}. It is {passed[-1]}.", **values)


def _after(circle: Sequence[str], name: str, steps: int) -> str:
    """Go some steps along a circle."""
    return circle[(list(circle).index(name) + steps) % len(circle)]


def _date(rng: random.Random) -> tuple[int, int]:
    """Draw a month, counted from 0, and a day that every month has."""
    return rng.randrange(12), rng.randint(1, 28)


def _asked(
    rng: random.Random, family: str, wordings: Sequence[str], answer: str, **values: object
) -> Group:
    """Fill one of the wordings."""
    return alone(family, rng.choice(wordings).format(**values), answer)
