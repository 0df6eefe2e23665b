"""A mixed prefill-only workload from real texts: beginnings shared by many prompts, by a few, and by none.

``examples``: classification with examples in the prompt, with sets of several customers per task
(Banking77, CLINC150). ``documents``: questions on Wikipedia articles. ``single``: BoolQ and
PubMedQA, each with a passage of its own. The order is mixed, as of many callers.
"""

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from benchmarks.common.suite import DEMO
from models.training.corpus import Task, read_documents, read_task

EXAMPLES_TOKENS = 1000
DOCUMENT_TOKENS = 1300
MOST_TOKENS = 1900  # of a prompt; the demo model takes 2048
CUSTOMERS = 4  # with examples of their own, per task
BLOCK = 16  # tokens that are cached together
QUESTIONS = (
    "Is this article about a person?",
    "Is this article about science?",
    "Does the article mention a date?",
    "Is a war mentioned?",
    "Is this article about a place?",
)


@dataclass(frozen=True)
class Mix:
    """Numbers of requests of each kind."""

    examples: int
    documents: int
    single: int

    def times(self, factor: int) -> "Mix":
        """Return a mix with this multiple of each kind."""
        return Mix(factor * self.examples, factor * self.documents, factor * self.single)


class Workload:
    """Makes prompts; texts are read and tokenised once."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self._examples = [
            (read_task(name, "train"), read_task(name, "test"))
            for name in ("banking77", "clinc_domain", "clinc150")
        ]
        self._single = [read_task(name, "test") for name in ("boolq", "pubmedqa")]
        self._articles = [text for part in read_documents("wiki_articles") for text in part]

    def prompts(self, mix: Mix, seed: int) -> list[list[int]]:
        """Make one set of prompts as token ids, other ones for each seed."""
        rng = random.Random(seed)
        prompts = [
            *self._with_examples(rng, mix.examples),
            *self._on_documents(rng, mix.documents),
            *(self._on_its_own(rng) for _ in range(mix.single)),
        ]
        rng.shuffle(prompts)
        return [prompt[:MOST_TOKENS] for prompt in prompts]

    def unshared(self, count: int, seed: int) -> list[list[int]]:
        """Make as many prompts without a common beginning: abstracts and passages, and parts of articles."""
        rng = random.Random(seed)
        beginnings: set[tuple[int, ...]] = set()
        prompts: list[list[int]] = []
        while len(prompts) < count:
            prompt = self._passage_first(rng) if len(prompts) % 2 else self._part(rng)
            start = tuple(prompt[:BLOCK])
            if start not in beginnings:
                beginnings.add(start)
                prompts.append(prompt[:MOST_TOKENS])
        rng.shuffle(prompts)
        return prompts

    def cut(self, tokens: int, count: int) -> list[list[int]]:
        """Cut different texts of this number of tokens each."""
        rng = random.Random(tokens)
        long = [doc for doc in map(self._encode, self._articles) if len(doc) > 2 * tokens]
        picked = [rng.choice(long) for _ in range(count)]
        starts = [rng.randrange(len(document) - tokens) for document in picked]
        return [doc[start : start + tokens] for doc, start in zip(picked, starts, strict=True)]

    def _part(self, rng: random.Random) -> list[int]:
        """A part of an article, of any length, and a question."""
        document = self._encode(rng.choice(self._articles))
        start = rng.randrange(max(1, len(document) - BLOCK))
        part = document[start : start + rng.randint(DOCUMENT_TOKENS // 2, DOCUMENT_TOKENS)]
        return [*part, *self._encode(f"\n\n{rng.choice(QUESTIONS)}\nAnswer:")]

    def _passage_first(self, rng: random.Random) -> list[int]:
        task = rng.choice(self._single)
        text, _ = rng.choice(task.rows)
        return self._encode(f"{text}\n\n{task.instruction}\nAnswer:")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def _with_examples(self, rng: random.Random, count: int) -> list[list[int]]:
        prefixes = []
        for train, test in self._examples:
            for _ in range(CUSTOMERS):
                tokens = self._encode(train.instruction)
                while len(tokens) < EXAMPLES_TOKENS:
                    tokens += self._encode(_example(train, rng))
                prefixes.append((tokens, test))
        prompts = []
        for _ in range(count):
            tokens, test = rng.choice(prefixes)
            text, _label = rng.choice(test.rows)
            prompts.append([*tokens, *self._encode(f"\n\n{text}\nAnswer:")])
        return prompts

    def _on_documents(self, rng: random.Random, count: int) -> list[list[int]]:
        prompts: list[list[int]] = []
        for article in rng.sample(self._articles, len(self._articles)):
            document = self._encode(article)[:DOCUMENT_TOKENS]
            for question in QUESTIONS:
                if len(prompts) == count:
                    return prompts
                prompts.append([*document, *self._encode(f"\n\n{question}\nAnswer:")])
        return prompts

    def _on_its_own(self, rng: random.Random) -> list[int]:
        task = rng.choice(self._single)
        text, _ = rng.choice(task.rows)
        return self._encode(f"{task.instruction}\n\n{text}\nAnswer:")


def _example(task: Task, rng: random.Random) -> str:
    text, label = rng.choice(task.rows)
    return f"\n\n{text}\nAnswer: {task.labels[label]}"
