"""Questions about the labelled sets, in every form that the gateway can put them in."""

import random
from dataclasses import dataclass, field

from models.training import corpus
from models.training.curriculum import relevance
from models.training.curriculum.items import Group, Question, by_letter, decide, predicate
from moesaic.classification.prompts import DEFAULT_INSTRUCTION, SYMBOLS, question
from moesaic.classification.wording import PACKAGED

FORMS = {"sequence": 0.50, "choice": 0.16, "behind": 0.10, "multi": 0.12, "relevance": 0.12}
MOST_SIBLINGS, OWN_INSTRUCTION_SHARE, WHOLE_SHARE, TEXT_WEIGHT = 24, 0.7, 0.6, 0.1
# Only packs of so many tokens have room for all labels of the largest sets.
LONG_LENGTH = 1024
YES_NO, LONG_TEXTS = ("yes", "no"), ("boolq", "pubmedqa")


@dataclass
class LabelledSet:
    """Draws groups of questions about one labelled set, every row once before any row twice."""

    task: corpus.Task
    _queue: list[int] = field(default_factory=list)
    _by_label: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.task.rows:
            self._by_label.setdefault(row[1], []).append(row)

    def group(self, rng: random.Random, length: int, form: str = "") -> Group:
        """Draw one group, of a form of ``FORMS``, whose tokens are about ``length`` at most."""
        if not form:
            drawn = rng.choices(list(FORMS), list(FORMS.values()))[0]
            # Where there is room for all labels, they are all asked about.
            whole = self.task.name in LONG_TEXTS or length >= LONG_LENGTH
            form = "sequence" if whole else drawn
        return getattr(self, f"_{form}")(rng, length)  # type: ignore[no-any-return]

    def _rows(self, rng: random.Random, count: int) -> list[tuple[str, int]]:
        while len(self._queue) < count:
            fresh = list(range(len(self.task.rows)))
            rng.shuffle(fresh)
            self._queue += fresh
        taken, self._queue = self._queue[:count], self._queue[count:]
        return [self.task.rows[i] for i in taken]

    def _instruction(self, rng: random.Random) -> str:
        own = rng.random() < OWN_INSTRUCTION_SHARE
        return self.task.instruction if own else DEFAULT_INSTRUCTION

    def _some_labels(self, rng: random.Random, needed: set[int], most: int) -> list[str]:
        others = [i for i in range(len(self.task.labels)) if i not in needed]
        extra = rng.sample(others, min(len(others), max(0, rng.randint(1, most) - len(needed))))
        labels = [self.task.labels[i] for i in [*needed, *extra]]
        rng.shuffle(labels)
        return labels

    def _sequence(self, rng: random.Random, length: int) -> Group:
        """Labels in a row before the text; all of them where they fit, else some."""
        labels = self.task.labels
        fits = len(labels) * 5 < length
        long_texts = self.task.name in LONG_TEXTS
        rows = self._rows(rng, 2 if long_texts else MOST_SIBLINGS * (1 + (length >= LONG_LENGTH)))
        if not (fits and (length >= LONG_LENGTH or rng.random() < WHOLE_SHARE)):
            needed = {label for _, label in rows}
            labels = self._some_labels(rng, needed, min(len(labels), 60))
        elif rng.random() < 0.5:
            labels = rng.sample(labels, len(labels))
        head = question("", labels, self._instruction(rng), "sequence")
        return Group(head, tuple(self._behind_head(row, self._name(row), labels) for row in rows))

    def _choice(self, rng: random.Random, length: int) -> Group:
        """Letters before the text, in a new order each time: they are looked up, not remembered."""
        rows, labels = self._of_few_labels(rng, rng.randint(4, 10), 12)
        head = question("", labels, self._instruction(rng), "choice")
        letters = tuple(SYMBOLS[: len(labels)])
        return Group(
            head,
            tuple(self._behind_head(row, SYMBOLS[labels.index(self._name(row))], letters) for row in rows),
        )  # fmt: skip

    def _behind(self, rng: random.Random, length: int) -> Group:
        """Labels behind the text, as decisions put them: a text and several questions about it."""
        [row] = self._rows(rng, 1)
        questions = []
        for make in (decide, by_letter):
            labels = self._some_labels(rng, {row[1]}, 8)
            if len(labels) > 1:
                instruction = self._instruction(rng)
                questions.append(make(self.task.name, instruction, labels, self._name(row)))
        labels = self._some_labels(rng, {row[1]}, 8)
        said = rng.choice(labels) if rng.random() < 0.5 else self._name(row)
        holds = said == self._name(row)
        questions.append(predicate(self.task.name, f"It is about {said}.", holds, self._name(row)))
        return Group(f"{row[0]}\n\n", tuple(questions), TEXT_WEIGHT)

    def _multi(self, rng: random.Random, length: int) -> Group:
        """One question for each label behind the text."""
        [row] = self._rows(rng, 1)
        labels = self._some_labels(rng, {row[1]}, 4)
        head = PACKAGED.render("multi", instruction=self._instruction(rng), text=row[0], label="")
        start = head.index("Does the label")
        return Group(
            head[:start],
            tuple(
                Question(self.task.name, "predicate",
                         PACKAGED.render("multi", instruction="", text="", label=label).lstrip("\n"),
                         YES_NO[label != self._name(row)], YES_NO, hint=self._name(row))
                for label in labels
            ),
            TEXT_WEIGHT,
        )  # fmt: skip

    def _relevance(self, rng: random.Random, length: int) -> Group:
        """A label as the query, texts as documents."""
        rows, _ = self._of_few_labels(rng, rng.randint(2, 4), 5)
        query = self._name(rows[0])
        return Group(
            relevance.head(query),
            tuple(
                Question(self.task.name, "relevance", relevance.tail(row[0]),
                         YES_NO[self._name(row) != query], YES_NO, hint=self._name(row))
                for row in rows
            ),
        )  # fmt: skip

    def _of_few_labels(
        self, rng: random.Random, count: int, most_rows: int
    ) -> tuple[list[tuple[str, int]], list[str]]:
        """Rows that have one of a few labels, and these labels in a drawn order."""
        few = rng.sample(sorted(self._by_label), min(count, len(self._by_label)))
        rows = [rng.choice(self._by_label[rng.choice(few)]) for _ in range(most_rows)]
        return list(dict.fromkeys(rows)), [self.task.labels[i] for i in few]

    def _name(self, row: tuple[str, int]) -> str:
        return self.task.labels[row[1]]

    def _behind_head(
        self, row: tuple[str, int], answer: str, labels: list[str] | tuple[str, ...]
    ) -> Question:
        hint = self._name(row) if answer != self._name(row) else ""
        return Question(self.task.name, "decide", row[0], answer, tuple(labels), hint)
