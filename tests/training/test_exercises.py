"""The exercises of the curriculum have right answers, and a test split of their own."""

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from models.training.curriculum import (
    arithmetic,
    entailment,
    kinds,
    levels,
    measures,
    words,
)
from models.training.curriculum.items import Group, Question, Split

VOCABULARY = [
    "apple", "pear", "plum", "fig", "garden", "kettle", "candle", "window", "bridge", "anchor",
    "basket", "button", "cherry", "copper", "feather", "hammer", "island", "jacket", "ladder",
    "mirror", "needle", "orchard", "pebble", "ribbon", "saddle", "teapot", "umbrella", "velvet",
    "wagon", "yarn", "zebra", "banner", "acorn", "beetle", "carpet", "dragon", "engine", "flower",
    "guitar", "helmet", "insect", "jungle", "kitten", "lantern", "magnet", "napkin", "onion",
    "parrot", "quilt", "rocket", "spider", "tunnel", "turtle", "violin", "walnut",
]  # fmt: skip
NAMES = ["Tom", "Ana", "Mara", "Jon", "Lena", "Otto", "Ida", "Nils", "Vera", "Karl"]
MONTHS = list(measures.MONTHS)

Make = Callable[[random.Random, Split], Group]
ARITHMETIC: dict[str, Make] = {
    "sums": arithmetic.sums,
    "differences": arithmetic.differences,
    "products": arithmetic.products,
    "comparisons": arithmetic.comparisons,
}
LISTS: dict[str, Make] = {
    name: partial(getattr(words, name), vocabulary=VOCABULARY)
    for name in (
        "spell", "backwards", "count_letters", "end_letter", "sort_words", "reverse_words",
        "count_words",
    )
}  # fmt: skip
LISTS["sort_numbers"] = words.sort_numbers
MEASURES: dict[str, Make] = {
    name: getattr(measures, name)
    for name in ("weekdays", "months", "dates", "date_order", "units", "clock")
}
ENTAILMENT: dict[str, Make] = {
    kind.__name__: partial(kind, names=NAMES) for kind in (*entailment.KINDS, entailment.entailment)
}
OTHERS: dict[str, Make] = {"kinds": kinds.kinds, "levels": partial(levels.levels, names=NAMES)}
EVERY: dict[str, Make] = {**ARITHMETIC, **LISTS, **MEASURES, **ENTAILMENT, **OTHERS}


def groups(make: Make, split: Split, count: int = 400) -> list[Group]:
    rng = random.Random(5)
    return [make(rng, split) for _ in range(count)]


def both(make: Make) -> list[Question]:
    return [q for s in ("train", "test") for g in groups(make, s) for q in g.questions]


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


def in_order(text: str, choice: list[str]) -> list[str]:
    return [word for word in re.findall(r"\w+", text) if word in choice]


@pytest.mark.parametrize("name", EVERY)
def test_no_test_row_is_among_training_rows(name: str) -> None:
    train, test = (
        {g.head + q.tail for g in groups(EVERY[name], split, count) for q in g.questions}
        for split, count in (("train", 3000), ("test", 500))
    )
    assert not train & test


@pytest.mark.parametrize("name", EVERY)
def test_rows_depend_on_the_seed_alone_and_answers_are_among_the_labels(name: str) -> None:
    for split in ("train", "test"):
        made = groups(EVERY[name], split)
        assert made == groups(EVERY[name], split)
        assert all(not g.head or g.head.endswith("\n\n") for g in made)
        assert all(q.answer in q.labels for g in made for q in g.questions if q.labels)
        assert all("{" not in g.head + q.tail + q.answer for g in made for q in g.questions)


@pytest.mark.parametrize("name", [*ENTAILMENT, *OTHERS])
def test_no_answer_is_right_most_of_the_time(name: str) -> None:
    for split in ("train", "test"):
        answers: dict[str, Counter[str]] = {}
        for group in groups(EVERY[name], split, 600):
            for q in group.questions:
                answers.setdefault(q.form, Counter())[q.answer] += 1
        for form in answers.keys() - {"chat"}:
            assert max(answers[form].values()) < 0.6 * answers[form].total(), (form, answers[form])


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_right_and_its_splits_share_no_numbers(name: str) -> None:
    for split in ("train", "test"):
        for group in groups(ARITHMETIC[name], split, 1500):
            (q,) = group.questions
            a, b = numbers(q.tail)
            assert arithmetic.held_out(a, b) == (split == "test")
            right = {
                "sums": a + b,
                "differences": abs(a - b),
                "products": a * b,
                "comparisons": min(a, b) if "smaller" in q.tail else max(a, b),
            }[name]
            assert arithmetic.final_number(q.answer) == str(right)
            check_steps(q.answer, right)


def worked_out(step: str) -> int:
    """Calculate from left to right: no step has products beside sums."""
    first, *rest = re.findall(r"[-+*]|\d+", step)
    result = int(first)
    for sign, number in zip(rest[::2], map(int, rest[1::2]), strict=True):
        result = {"+": result + number, "-": result - number, "*": result * number}[sign]
    return result


def check_steps(answer: str, right: int | None = None) -> None:
    steps = re.findall(r"(\d+(?: ?[-+*] ?\d+)+) ?= ?(\d+)", answer)
    assert steps or "\n" not in answer
    for left, value in steps:
        assert worked_out(left) == int(value), answer
    written = re.findall(r"write (\d)", answer)
    assert not written or int("".join(reversed(written))) == right


def test_an_answer_without_a_result_has_no_final_number() -> None:
    assert arithmetic.final_number("") is None
    assert arithmetic.final_number("7 + 5 = 12, write 2, carry 1.") is None


@pytest.mark.parametrize("name", LISTS)
def test_letters_and_lists_are_right(name: str) -> None:
    for q in both(LISTS[name]):
        given = in_order(q.tail, VOCABULARY)
        letters = list(given[0]) if given else []
        right = {
            "spell": lambda x=letters: ", ".join(x),
            "backwards": lambda x=letters: ", ".join(x[::-1]),
            "end_letter": lambda x=letters, t=q.tail: x[0 if " first " in t else -1],
            "sort_words": lambda x=given: ", ".join(sorted(x)),
            "reverse_words": lambda x=given: ", ".join(x[::-1]),
            "sort_numbers": lambda t=q.tail: ", ".join(map(str, sorted(numbers(t)))),
        }
        if name in right:
            assert q.answer == right[name]()
        elif name == "count_letters":
            assert re.findall(r"\b(\w) \d", q.answer) == letters
            assert numbers(q.answer) == [*range(1, len(letters) + 1), len(letters)]
        else:
            assert in_order(q.answer, VOCABULARY) == given
            assert numbers(q.answer) == [*range(1, len(given) + 1), len(given)]


@pytest.mark.parametrize("name", ["sort_words", "reverse_words", "count_words"])
def test_lists_held_out_are_never_trained_on(name: str) -> None:
    for split in ("train", "test"):
        for group in groups(LISTS[name], split):
            given = in_order(group.questions[0].tail, VOCABULARY)
            assert arithmetic.held_out(*given) == (split == "test")


@pytest.mark.parametrize(
    ("name", "circle"), [("weekdays", list(measures.DAYS)), ("months", MONTHS)]
)
def test_days_and_months_are_right(name: str, circle: list[str]) -> None:
    for q in both(MEASURES[name]):
        start = circle.index(in_order(q.tail, circle)[0])
        if name == "months" and re.search("days|How long", q.tail):
            assert str(measures.MONTHS[circle[start]]) in q.answer
            continue
        steps = (numbers(q.tail) or [1])[0]
        sign = -1 if re.search("before|earlier", q.tail) else 1
        right = circle[(start + sign * steps) % len(circle)]
        assert in_order(q.answer, circle)[-1] == right


def test_dates_and_clock_times_are_right() -> None:
    over = 0
    for q in both(measures.dates):
        month = MONTHS.index(in_order(q.tail, MONTHS)[0])
        total, length = sum(numbers(q.tail)), measures.MONTHS[MONTHS[month]]
        over += total > length
        right = (total, month) if total <= length else (total - length, (month + 1) % 12)
        assert q.answer.endswith(f"It is {right[0]} {MONTHS[right[1]]}.")
    assert 100 < over < 300
    for q in both(measures.date_order):
        found = re.findall(r"(\d+) ([A-Z]\w+)", q.tail)
        ranked = sorted(found, key=lambda d: MONTHS.index(d[1]) * 40 + int(d[0]))
        assert q.answer == " ".join(ranked[0 if "earlier" in q.tail else 1])
    for q in both(measures.clock):
        hour, minute = map(int, re.search(r"(\d+):(\d+)", q.tail).groups())
        later = hour * 60 + minute + int(re.search(r"(\d+) minutes", q.tail)[1])
        assert q.answer.endswith(f"It is {(later // 60 - 1) % 12 + 1}:{later % 60:02d}.")


def test_units_are_right() -> None:
    for q in both(measures.units):
        said = set(re.findall("[a-z]+", q.tail))
        size = next(v for (big, small), v in measures.UNITS.items() if {f"{big}s", small} <= said)
        assert numbers(q.answer)[-1] == numbers(q.tail)[0] * size
        check_steps(q.answer)


def stated(q: Question) -> str:
    start = min(q.tail.index(name) for name in NAMES if name in q.tail)
    return re.split(r"[.?]", q.tail[start:])[0]


def verdict(q: Question) -> str:
    if q.form != "letter":
        return q.answer
    return re.search(rf"\n{q.answer}\. (\w+)", q.tail)[1]


def link(sentence: str) -> tuple[str, str, str] | None:
    """Find who is more than whom, and of what, in a sentence about two people."""
    subject, quality = re.search(r"(\w+) is (?:the )?(\w+)", sentence).groups()
    other = next(name for name in in_order(sentence, NAMES) if name != subject)
    for more, less, _ in entailment.QUALITIES:
        if quality in (more, less):
            return (subject, other, more) if quality == more else (other, subject, more)
    return None


def test_orders_follow() -> None:
    for group in groups(ENTAILMENT["orders"], "train") + groups(ENTAILMENT["orders"], "test"):
        known = {link(sentence) for sentence in group.head.strip().rstrip(".").split(". ")}
        for _ in range(3):
            known |= {(a, d, q) for a, b, q in known for c, d, r in known if (b, q) == (c, r)}
        people = {name for name in NAMES if name in group.head}
        for q in group.questions:
            if "est of them" in q.tail:
                best = stated(q).split()[0]
                others = people - {best}
                beats = all(any(k[:2] == (best, o) for k in known if k) for o in others)
                assert verdict(q) == ("yes" if beats else "no")
                continue
            a, b, quality = link(stated(q))
            right = "yes" if (a, b, quality) in known else "unknown"
            assert verdict(q) == ("no" if (b, a, quality) in known else right)


def test_the_last_one_who_got_a_thing_has_it() -> None:
    for group in groups(ENTAILMENT["gifts"], "train") + groups(ENTAILMENT["gifts"], "test"):
        last = group.head.strip().split(". ")[-1]
        one, two = in_order(last, NAMES)
        owner = one if re.search(r"got|received", last) else two
        for q in group.questions:
            if q.form == "chat":
                assert q.answer == owner
            elif " now" in q.tail:
                assert verdict(q) == ("yes" if stated(q).split()[0] == owner else "no")


def test_levels_are_asked_in_their_order_and_kinds_with_the_right_one() -> None:
    for q in both(OTHERS["levels"]):
        given = re.findall(r"\n\d\. (.+)", q.tail) if q.form == "number" else list(q.labels)
        scale = next(list(s) for s in levels.SCALES.values() if given[0] in s and given[-1] in s)
        assert 3 <= len(given) <= 5
        assert given == [level for level in scale if level in given]
    every = [word for kind in kinds.KINDS.values() for word in kind.split()]
    assert len(every) == len(set(every))
    for split in ("train", "test"):
        for group in groups(OTHERS["kinds"], split):
            (word, *_) = in_order(group.head, every)
            for q in group.questions:
                labels = re.findall(r"\n[A-Z]\. (.+)", q.tail) or list(q.labels)
                right = labels["ABCDEFGHIJ".index(q.answer)] if q.form == "letter" else q.answer
                assert word in kinds.KINDS[right].split()
                assert arithmetic.held_out(word, *labels) == (split == "test")
