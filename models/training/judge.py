"""Held-out rows of the curriculum, put to the serving engine as the gateway puts them."""

import math
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from models.training import corpus
from models.training.answers import Answer, Asked, answer_all
from models.training.curriculum import relevance, tales
from models.training.curriculum.arithmetic import final_number
from models.training.curriculum.checker import Fault, FaultKind, faults
from models.training.curriculum.items import NUMBERS, Group, Question
from models.training.curriculum.stories import story
from models.training.labelled import FORMS, LONG_TEXTS, LabelledSet
from models.training.sources import exercises
from moesaic.classification.candidates import Candidates, yes_or_no
from moesaic.classification.forms import best_of, candidates_of
from moesaic.classification.prompts import SYMBOLS
from moesaic.services.gateway.language import Language

FREE = ("tales", "rerank")  # judged in ways of their own
MOST_ANSWER_TOKENS, MOST_STORY_TOKENS, DOCUMENTS = 96, 260, 10
DRAWS_A_ROW = 12  # of a source, before a rare family is given up


@dataclass(frozen=True)
class Row:
    """One question of the test split, and the model's answer.

    Attributes:
        num_labels: answers to choose among; 0 of a free one.
        mass: probability of all labels together, where each is one token.
        right: true if the answer is the one meant.
    """

    family: str
    form: str
    asked: str
    wanted: str
    given: str
    right: bool
    num_labels: int
    mass: float | None = None


@dataclass(frozen=True)
class Continuation:
    """The start of a story of the test split, the model's rest, and what is wrong with it."""

    start: str
    rest: str
    faults: tuple[Fault, ...]


def questions(directory: Path, most_rows: int) -> list[Row]:
    """Ask up to ``most_rows`` questions of each family and form."""
    language, drawn = Language(directory), list(drawn_rows(most_rows))
    asked, candidates = [], []
    for group, question in drawn:
        prompt = tuple(language.dialogue.ask(group.head + question.tail))
        compared = candidates_to(language, question)
        candidates.append(compared)
        asked.append(Asked(prompt, compared, 0 if compared else MOST_ANSWER_TOKENS))
    answers = answer_all(directory, asked)
    return [
        judged(language, group, question, compared, answer)
        for (group, question), compared, answer in zip(drawn, candidates, answers, strict=True)
    ]


def continuations(directory: Path, count: int) -> list[Continuation]:
    """Let the model end stories, and look for what contradicts their beginnings."""
    rng, language = random.Random("continuations"), Language(directory)
    starts = [tales.parted(rng, story(rng, "test"))[0] for _ in range(count)]
    asked = [
        Asked(tuple(language.dialogue.ask(tales.asked(rng, "test", start))), (), MOST_STORY_TOKENS)
        for start in starts
    ]
    rests = [_text(language, answer) for answer in answer_all(directory, asked)]
    return [
        Continuation(start, rest, tuple(faults(start, rest)))
        for start, rest in zip(starts, rests, strict=True)
    ]


def rankings(directory: Path, count: int) -> float:
    """Measure how often the right document of ten comes first, as ``/v1/rerank`` sorts them."""
    rng, language = random.Random("rankings"), Language(directory)
    drawn = [relevance.ranking(rng, "test", DOCUMENTS) for _ in range(count)]
    compared = yes_or_no(language.dialogue)
    asked = [
        Asked(tuple(language.dialogue.ask(relevance.head(r.query) + relevance.tail(d))), compared)
        for r in drawn
        for d in r.documents
    ]
    answers = answer_all(directory, asked)
    first = 0
    for number, ranking in enumerate(drawn):
        own = answers[number * DOCUMENTS : (number + 1) * DOCUMENTS]
        odds = [yes - no for yes, no in own]
        first += odds.index(max(odds)) == ranking.right
    return first / count


def drawn_rows(most_rows: int) -> Iterator[tuple[Group, Question]]:
    """Draw rows of the test split, evenly by family and form."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for source, makers in exercises().items():
        rng = random.Random(f"test {source}")
        for number in range(DRAWS_A_ROW * most_rows if source not in FREE else 0):
            group = makers[number % len(makers)](rng, "test")
            yield from _counted(group, counts, most_rows)
    for name in corpus.INSTRUCTIONS:
        rng, rows = random.Random(f"test {name}"), LabelledSet(corpus.read_task(name, "test"))
        for form in FORMS if name not in LONG_TEXTS else ():
            counts.clear()
            for _ in range(most_rows if form != "sequence" else 0):
                for one in _counted(rows.group(rng, 512, form), counts, most_rows):
                    yield _named(one, form)


def _counted(
    group: Group, counts: dict[tuple[str, str], int], most_rows: int
) -> Iterator[tuple[Group, Question]]:
    for question in group.questions:
        key = (question.family, question.form)
        if counts[key] < most_rows:
            counts[key] += 1
            yield group, question


def _named(one: tuple[Group, Question], form: str) -> tuple[Group, Question]:
    """Tell the ways to ask about a labelled set apart in the tables."""
    group, question = one
    same = question.form if form in ("behind", "relevance") else form
    letters = question.form == "decide" and form == "choice"
    changed = {**vars(question), "form": "letter"} if letters else vars(question)
    family = f"{question.family}, {same}" if form in ("multi", "choice") else question.family
    return group, Question(**{**changed, "family": family})


def candidates_to(language: Language, question: Question) -> Candidates:
    """The answers to compare, as the gateway finds them; none for a free answer."""
    dialogue, labels = language.dialogue, question.labels
    if question.form in ("predicate", "relevance"):
        return yes_or_no(dialogue)
    if question.form == "decide":
        return best_of(dialogue, labels, ("token", "sequence"), SYMBOLS)[1]
    if question.form in ("letter", "number"):
        symbols = SYMBOLS if question.form == "letter" else NUMBERS
        return candidates_of(dialogue, labels, "choice", symbols)
    return ()


def judged(
    language: Language, group: Group, question: Question, compared: Candidates, answer: Answer
) -> Row:
    """Say whether the answer to a question is the one meant."""
    mass = None
    if isinstance(answer, tuple):
        given = question.labels[answer.index(max(answer))]
        if all(len(candidate) == 1 for candidate in compared):
            mass = math.fsum(math.exp(value) for value in answer)
        right = given == question.answer
    else:
        given = _text(language, answer)
        right = _same(question, given)
    asked = group.head + question.tail
    num_labels = len(question.labels)
    return Row(
        question.family, question.form, asked, question.answer, given, right, num_labels, mass
    )


def _same(question: Question, given: str) -> bool:
    """Compare a free answer: of a calculation the result counts, of others the words."""
    wanted = final_number(question.answer)
    if "\n" in question.answer and wanted is not None:
        return final_number(given) == wanted
    return given.strip() == question.answer.strip()


def _text(language: Language, answer: Answer) -> str:
    return language.tokenizer.decode([int(token) for token in answer]).strip()


def families(rows: list[Row]) -> list[dict[str, object]]:
    """Count right answers by family and form, in the order asked."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.family, row.form].append(row)
    return [
        {
            "family": family,
            "form": form,
            "rows": len(own),
            "right": sum(row.right for row in own) / len(own),
            "label_mass": _mean([row.mass for row in own if row.mass is not None]),
        }
        for (family, form), own in sorted(groups.items())
    ]


def choices(rows: list[Row]) -> list[dict[str, object]]:
    """Count right letters by the number of options, which stand in a drawn order."""
    counts: dict[int, list[bool]] = defaultdict(list)
    for row in rows:
        if row.form == "letter":
            counts[row.num_labels].append(row.right)
    return [
        {"options": number, "rows": len(right), "right": sum(right) / len(right)}
        for number, right in sorted(counts.items())
    ]


def consistency(told: list[Continuation]) -> dict[str, object]:
    """Count continuations without any fault, without one of names and places, and faults by kind."""
    kinds = [{fault.kind for fault in one.faults} for one in told]
    named = {"name", "place", "unreadable"}
    return {
        "rows": len(told),
        "consistent": sum(not own for own in kinds) / len(told),
        "names_and_places": sum(not own & named for own in kinds) / len(told),
        "with_fault": {kind: sum(kind in own for own in kinds) for kind in get_args(FaultKind)},
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
