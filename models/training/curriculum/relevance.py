"""Queries, and documents of which one answers: as ``/v1/rerank`` asks for each pair."""

import random
from dataclasses import dataclass

from models.training.curriculum.items import Group, Question, Split
from models.training.curriculum.lexicon import lexicon
from models.training.curriculum.questions import about, all_about, told_of
from models.training.curriculum.stories import snippet
from moesaic.classification.wording import PACKAGED

NOTHING = "nothing"  # what a document answers with that does not answer
FAMILIES = ("who", "where", "what", "how many", "when")


@dataclass(frozen=True)
class Ranking:
    """A query and its documents; the document at ``right`` answers it.

    Attributes:
        query: a question.
        documents: texts of a few sentences.
        right: index of the one that answers.
        answer: the word that it answers with.
        about: the person whom the query names, if any.
        subjects: of each document, as ``items.subjects_of`` finds them.
    """

    query: str
    documents: tuple[str, ...]
    right: int
    answer: str
    about: str
    subjects: tuple[tuple[tuple[int, str], ...], ...]


def ranking(rng: random.Random, split: Split, num_documents: int) -> Ranking:
    """Draw a query and documents, some of them about the same person."""
    people = lexicon(split).cast(rng, 2 + num_documents // 2)
    while True:
        pairs = [rng.sample(people, 2) for _ in range(num_documents)]
        tellers = [snippet(rng, split, pair) for pair in pairs]
        right = rng.randrange(num_documents)
        asked = [a for a in all_about(tellers[right]) if a.family in FAMILIES]
        rng.shuffle(asked)
        for question in asked:
            if sum(_answers(question.words, teller.text) for teller in tellers) == 1:
                return Ranking(
                    question.words,
                    tuple(teller.text for teller in tellers),
                    right,
                    question.answer,
                    about(tellers[right], question.words),
                    tuple(told_of(teller) for teller in tellers),
                )


def judged(rng: random.Random, split: Split) -> Group:
    """Make a group of pairs with one query: the right document, and some of the others."""
    drawn = ranking(rng, split, rng.randint(3, 6))
    wrong = [i for i in range(len(drawn.documents)) if i != drawn.right]
    pairs = [drawn.right, *wrong[: rng.randint(1, 3)]]
    rng.shuffle(pairs)
    return Group(head(drawn.query), tuple(_pair(drawn, i) for i in pairs))


def _pair(drawn: Ranking, index: int) -> Question:
    """Ask of one document whether it answers; what it answers with is the hint."""
    right = index == drawn.right
    asked = tail(drawn.documents[index])
    start = asked.index(drawn.documents[index])
    return Question(
        "rerank", "relevance", asked, "yes" if right else "no", ("yes", "no"),
        hint=drawn.answer if right else NOTHING,
        about=drawn.about,
        subjects=tuple((start + end, name) for end, name in drawn.subjects[index]),
    )  # fmt: skip


def head(query: str, instruction: str = PACKAGED.words["relevance"]) -> str:
    """Word the part of a pair's question before its document."""
    whole = PACKAGED.render("relevance", instruction=instruction, query=query, document="\0")
    return whole.partition("\0")[0].rstrip(" ")


def tail(document: str) -> str:
    """Word the part of a pair's question from its document on."""
    whole = PACKAGED.render("relevance", instruction="", query="", document=document)
    return whole[whole.index("Document:") + len("Document:") :]


def _answers(query: str, text: str) -> bool:
    """True if a document tells of everything that the query names: nearly always it answers."""
    named = [word.strip("?.,:") for word in query.split()[1:]]
    known = [w for w in named if w[:1].isupper() or w in _CONTENT]
    return all(word in text for word in known)


_CONTENT = {
    word
    for split in ("train", "test")
    for kind in ("places", "things", "goods", "jobs", "colours", "animals")
    for word in getattr(lexicon(split), kind)
} | {str(n) for n in range(41)}
