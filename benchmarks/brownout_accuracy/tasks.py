"""The sets of questions: held-out rows of kinds that the demo model is good at, as its card asks them."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.brownout_accuracy.serving import Ask, Told
from benchmarks.common.suite import DEMO
from models.training import corpus
from models.training.curriculum import relevance
from models.training.curriculum.items import Group, Question
from models.training.judge import MOST_ANSWER_TOKENS, candidates_to, drawn_rows, judged
from moesaic.classification.candidates import yes_or_no
from moesaic.engine.sequences.requests import GenerationTask, ScoringTask
from moesaic.models.configuration.config import load_config
from moesaic.services.gateway.language import Language

Kinds = tuple[tuple[str, str], ...]  # families and forms of the card's table
LABELLED, TOLD = ("clinc_domain", "banking77", "clinc150"), ("who", "what", "how many")
DIGITS = ("one digit", "two digits", "three digits")
CHOICES: dict[str, Kinds] = {
    **{name: ((name, "decide"), (f"{name}, choice", "letter")) for name in LABELLED},
    "predicates": tuple((name, "predicate") for name in LABELLED),
    "multi": tuple((f"{name}, multi", "predicate") for name in LABELLED),
    **{name: ((name, "decide"), (name, "letter")) for name in (*TOLD, "look up", "kinds")},
    "levels": (("levels", "decide"), ("levels", "number")),
}
GENERATED: dict[str, Kinds] = {
    "sums": tuple((f"sum of {digits}", "chat") for digits in DIGITS),
    "products": (("product", "chat"),),
    "dates": (("dates", "chat"),),
    "answers": tuple((name, "chat") for name in TOLD),
}
RERANK = "rerank"
DOCUMENTS = 5  # of a query
HELD_OUT = ("pepys_diary", "war_and_peace", "wiki_passages")
WINDOW = 256  # tokens


@dataclass(frozen=True)
class TaskSet:
    """Rows of one kind.

    Attributes:
        name: name of the set.
        asks: all prompts; a row may have several.
        judge: returns true for each row with right answers.
    """

    name: str
    asks: list[Ask]
    judge: Callable[[Sequence[Told]], list[bool]]


def task_sets(num_rows: int) -> list[TaskSet]:
    """Draw all sets, of about this number of rows each; the same at every call."""
    language = Language(DEMO)
    drawn: dict[tuple[str, str], list[tuple[Group, Question]]] = defaultdict(list)
    for group, question in drawn_rows(num_rows):
        drawn[question.family, question.form].append((group, question))
    sets = []
    for name, kinds in {**CHOICES, **GENERATED}.items():
        each = -(-num_rows // len(kinds))
        sets.append(
            _questions(language, name, [row for kind in kinds for row in drawn[kind][:each]])
        )
    return [*sets, _rerank(language, -(-num_rows // 2))]


def windows(num_windows: int) -> list[Ask]:
    """Cut this number of windows of each held-out text."""
    language, found = Language(DEMO), []
    task = GenerationTask(max_tokens=0, prompt_logprobs=0)
    for name in HELD_OUT:
        text = "\n\n".join(corpus.read_documents(name)[1])
        ids = language.tokenizer.encode(text[: num_windows * WINDOW * 8])
        found += [tuple(ids[at * WINDOW : (at + 1) * WINDOW]) for at in range(num_windows)]
    return [Ask(window, task) for window in found]


def cross_entropy(told: Sequence[Told]) -> float:
    """Mean negative log-probability of the tokens of windows, in nats."""
    logprobs = [each for window in told for each in window.logprobs]
    return -math.fsum(logprobs) / len(logprobs)


def _questions(language: Language, name: str, rows: list[tuple[Group, Question]]) -> TaskSet:
    stops = frozenset(load_config(DEMO).eos_token_ids)
    free = GenerationTask(max_tokens=MOST_ANSWER_TOKENS, stop_token_ids=stops)
    compared = [candidates_to(language, question) for _, question in rows]
    asks = [
        Ask(tuple(language.dialogue.ask(group.head + question.tail)), ScoringTask(c) if c else free)
        for (group, question), c in zip(rows, compared, strict=True)
    ]

    def judge(told: Sequence[Told]) -> list[bool]:
        answers = [
            tuple(t.logprobs) if c else t.tokens for t, c in zip(told, compared, strict=True)
        ]
        return [
            judged(language, group, question, c, answer).right
            for (group, question), c, answer in zip(rows, compared, answers, strict=True)
        ]

    return TaskSet(name, asks, judge)


def _rerank(language: Language, num_queries: int) -> TaskSet:
    """Queries with documents, of which one answers: is it first, as ``/v1/rerank`` sorts them?"""
    rng, task = random.Random("brownout rankings"), ScoringTask(yes_or_no(language.dialogue))
    drawn = [relevance.ranking(rng, "test", DOCUMENTS) for _ in range(num_queries)]
    asks = [
        Ask(tuple(language.dialogue.ask(relevance.head(r.query) + relevance.tail(d))), task)
        for r in drawn
        for d in r.documents
    ]
    return TaskSet(RERANK, asks, partial(_first, [r.right for r in drawn]))


def _first(right: Sequence[int], told: Sequence[Told]) -> list[bool]:
    odds = [yes - no for yes, no in (each.logprobs for each in told)]
    parts = [odds[at * DOCUMENTS : (at + 1) * DOCUMENTS] for at in range(len(right))]
    return [part.index(max(part)) == best for part, best in zip(parts, right, strict=True)]
