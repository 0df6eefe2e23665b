"""The sources of training rows, and each one's share of the tokens."""

import random
from collections.abc import Callable, Iterator

from models.training import corpus
from models.training.curriculum import (
    arithmetic,
    copying,
    entailment,
    kinds,
    levels,
    measures,
    relevance,
    tales,
    words,
)
from models.training.curriculum.items import Group, Split, alone
from models.training.curriculum.lexicon import Lexicon, lexicon, spelled
from models.training.curriculum.questions import asked_about
from models.training.curriculum.stories import short_story, story
from models.training.labelled import LabelledSet

SHARES = {  # of draws; a draw of text or of a labelled set is longer than others
    "text": 0.030,
    "prose": 0.008,
    "clinc_domain": 0.040,
    "banking77": 0.040,
    "clinc150": 0.060,
    "boolq": 0.006,
    "pubmedqa": 0.004,
    "gen_arithmetic": 0.006,
    "gen_ascii_word": 0.004,
    "gsm8k": 0.003,
    "dolly_hhrlhf": 0.004,
    "copying": 0.120,
    "snippets": 0.100,
    "stories": 0.120,
    "tales": 0.900,
    "rerank": 0.060,
    "sums": 0.060,
    "other arithmetic": 0.100,
    "words": 0.200,
    "measures": 0.140,
    "entailment": 0.080,
    "kinds": 0.015,
    "levels": 0.015,
}
NAMES = 200  # of which exercises draw
START_REPEATS = 1000  # enough to become a token
# To begin with: the curriculum without the labelled sets, many short rows a step, the simplest most.
BASICS = {
    "copying": 0.28,
    "snippets": 0.25,
    "stories": 0.15,
    "tales": 0.03,
    "rerank": 0.05,
    "sums": 0.14,
    "other arithmetic": 0.05,
    "words": 0.12,
    "measures": 0.04,
    "entailment": 0.05,
    "kinds": 0.03,
    "levels": 0.03,
    "text": 0.01,
}
MIXTURES = {"all": SHARES, "basics": BASICS}
Exercise = Callable[[random.Random, Split], Group]


def vocabulary(rng: random.Random, split: Split) -> list[str]:
    """List words to be spelled, sorted and counted: nouns of both splits, names of one."""
    return _nouns(lexicon(split)) + [name.lower() for name in names(rng, split)]


def names(rng: random.Random, split: Split) -> list[str]:
    """List different names of a split, those of the training split partly made up anew."""
    known = sorted({person.name for person in lexicon(split).people})
    drawn = rng.sample(known, NAMES // 2)
    drawn += (
        [spelled(rng).name for _ in range(NAMES // 2)]
        if split == "train"
        else rng.sample(known, NAMES // 2)
    )
    return sorted(set(drawn))


def _nouns(known: Lexicon) -> list[str]:
    nouns = [*known.places, *known.things, *known.goods, *known.animals, *known.jobs]
    return [*nouns, *known.colours, *known.skies, *known.feelings]


def exercises() -> dict[str, tuple[Exercise, ...]]:
    """List the generators of each source of the curriculum."""

    def with_words(make: Callable[..., Group]) -> Exercise:
        return lambda rng, split: make(rng, split, vocabulary(rng, split))

    def with_names(make: Callable[..., Group]) -> Exercise:
        return lambda rng, split: make(rng, split, names(rng, split))

    lists = (words.sort_words, words.reverse_words, words.count_words)
    spelling = (words.spell, words.backwards, words.count_letters, words.end_letter)
    return {
        "copying": (with_words(copying.repeat), copying.look_up, copying.recall),
        "snippets": (lambda rng, split: asked_about(short_story(rng, split)),),
        "stories": (lambda rng, split: asked_about(story(rng, split)),),
        "tales": (tales.continued, tales.continued, tales.requested, tales.plain),
        "rerank": (relevance.judged,),
        "sums": (arithmetic.sums,),
        "other arithmetic": (arithmetic.differences, arithmetic.products, arithmetic.comparisons),
        "words": (*map(with_words, (*lists, *spelling)), words.sort_numbers),
        "measures": (
            measures.weekdays, measures.months, measures.dates, measures.date_order,
            measures.units, measures.units, measures.clock,
        ),
        "entailment": (with_names(entailment.entailment),),
        "kinds": (kinds.kinds,),
        "levels": (with_names(levels.levels),),
    }  # fmt: skip


class Sources:
    """Draws groups of questions from every source but plain text."""

    def __init__(self) -> None:
        self._exercises = exercises()
        self._labelled = {
            name: LabelledSet(corpus.read_task(name, "train")) for name in corpus.INSTRUCTIONS
        }
        self._pairs = corpus.conversations()

    def draw(self, name: str, rng: random.Random, length: int) -> Group:
        """Draw one group of a source, of about ``length`` tokens at most where it can be cut."""
        if name in self._exercises:
            return rng.choice(self._exercises[name])(rng, "train")
        if name in self._labelled:
            return self._labelled[name].group(rng, length)
        return alone(name, *rng.choice(self._pairs[name]))


def sample_texts(count: int) -> Iterator[str]:
    """Write turns of the curriculum's training split, for the tokenizer to learn its words."""
    rng, known = random.Random("tokenizer"), exercises()
    # An answer starts a turn, without a space before it: nouns are tokens of their own there too.
    for word in _nouns(lexicon("train")):
        yield from [word] * START_REPEATS
    for _ in range(count):
        for makers in known.values():
            group = rng.choice(makers)(rng, "train")
            yield group.head
            for question in group.questions:
                yield from (question.tail, question.answer)
