"""Queries, and documents of which one answers: as ``/v1/rerank`` asks for each pair."""

import random
from dataclasses import dataclass

from models.training.curriculum.items import Group, Question, Split
from models.training.curriculum.lexicon import lexicon
from models.training.curriculum.questions import all_about
from models.training.curriculum.stories import snippet
from moesaic.classification.wording import PACKAGED

FAMILIES = ("who", "where", "what", "how many", "when")


@dataclass(frozen=True)
class Ranking:
    """A query and its documents; the document at ``right`` answers it."""

    query: str
    documents: tuple[str, ...]
    right: int


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
                return Ranking(question.words, tuple(t.text for t in tellers), right)


def judged(rng: random.Random, split: Split) -> Group:
    """Make a group of pairs with one query: the right document, and some of the others."""
    drawn = ranking(rng, split, rng.randint(3, 6))
    wrong = [i for i in range(len(drawn.documents)) if i != drawn.right]
    pairs = [drawn.right, *wrong[: rng.randint(1, 3)]]
    rng.shuffle(pairs)
    return Group(
        head(drawn.query),
        tuple(
            Question("rerank", "relevance", tail(drawn.documents[i]),
                     "yes" if i == drawn.right else "no", ("yes", "no"))
            for i in pairs
        ),
    )  # fmt: skip


def head(query: str, instruction: str = PACKAGED.words["relevance"]) -> str:
    """Word the part of a pair's question before its document."""
    return PACKAGED.head("relevance", "document", instruction=instruction, query=query).rstrip(" ")


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
