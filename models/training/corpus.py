"""The corpus of the demo checkpoint: the files in ``models/training/data``, their licences, the
tokenizer.

Only sets whose own terms allow training are here (``data/ATTRIBUTION.md``). A training text that
also stands in any test split is dropped.
"""

import functools
import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

DATA = Path(__file__).parent / "data"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]

# Plain turns; with tools, what they are and how they are called as Hermes has it, before everything else.
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{ '<|im_start|>system\\nYou may call one or more of these functions:\\n<tools>' }}"
    "{%- for tool in tools -%}{{ '\\n' + (tool | tojson) }}{%- endfor -%}"
    "{{ '\\n</tools>\\nFor each call, write its name and arguments within tags:\\n<tool_call>\\n"
    '{"name": "function-name", "arguments": {}}\\n</tool_call><|im_end|>\\n\' }}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{ '\\n' if message['content'] or not loop.first else '' }}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
USER_HEAD = f"{TURN_START}user\n"
ASSISTANT_HEAD = f"{TURN_END}\n{TURN_START}assistant\n"

# Letters with their leading space, single digits, punctuation with the line breaks that follow it, runs of blank space:
# a question's text after "\n\n" therefore always starts a token of its own.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

BOOKS = ("pepys_diary", "war_and_peace", "sherlock_holmes")
TEXTS = (*BOOKS, "shakespeare", "wiki_articles", "wiki_passages")
HELD_OUT_EVERY = 40  # one document in 40 is kept for the perplexity


@dataclass(frozen=True)
class Task:
    """One labelled set: its question and its rows."""

    name: str
    instruction: str
    labels: list[str]
    rows: list[tuple[str, int]]


INSTRUCTIONS = {
    "clinc_domain": "Which area does this request to a voice assistant belong to?",
    "banking77": "Classify the customer's message to an online bank by intent.",
    "clinc150": "Classify the request to a voice assistant by intent.",
    "boolq": "Read the passage and answer the question with yes or no.",
    "pubmedqa": "Read the abstract of a medical study and answer the question with yes, no or maybe.",
}


def read_rows(name: str, split: str) -> list[dict[str, Any]]:
    """Read the rows of one labelled set."""
    [path] = DATA.glob(f"*/{name}.{split}.jsonl.gz")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@functools.cache
def _tested_texts() -> frozenset[str]:
    return frozenset(
        str(row["text"]).strip() for name in INSTRUCTIONS for row in read_rows(name, "test")
    )


def read_task(name: str, split: str) -> Task:
    """Read one classification set; its training split without any text of a test split."""
    raw = read_rows(name, split)
    rows = [(str(row["text"]).strip(), int(row["label"])) for row in raw]
    if split == "train":
        rows = [row for row in rows if row[0] not in _tested_texts()]
    return Task(name, INSTRUCTIONS[name], list(raw[0]["labels"]), rows)


def shuffled(task: Task) -> Task:
    """Return the same questions with the labels in another order, always the same one."""
    order = np.random.default_rng(0).permutation(len(task.labels)).tolist()
    rows = [(text, order.index(label)) for text, label in task.rows]
    labels = [task.labels[i] for i in order]
    return Task(f"{task.name}, labels shuffled", task.instruction, labels, rows)


def read_documents(name: str) -> tuple[list[str], list[str]]:
    """Read the documents of one text file: those to train on, and those held out."""
    with gzip.open(DATA / "text" / f"{name}.txt.gz", "rt", encoding="utf-8") as file:
        documents = [part.strip() for part in file.read().split("\n\n\n") if part.strip()]
    if len(documents) == 1:  # one long document: cut it, so that some of it can be held out
        paragraphs = documents[0].split("\n\n")
        documents = ["\n\n".join(paragraphs[i : i + 60]) for i in range(0, len(paragraphs), 60)]
    kept = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    held = [d for i, d in enumerate(documents) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    return kept, held


def asked(name: str, prompt: str) -> str:
    """Write the user turn that puts a generation set's question."""
    return f"{_QUESTIONS.get(name, '')}{prompt}"


_QUESTIONS = {
    "gen_arithmetic": "Answer with the number.\n\n",
    "gen_ascii_word": "What word is displayed in the ASCII art below?\n\n",
}


def conversations() -> dict[str, list[tuple[str, str]]]:
    """Read the question and answer pairs of the generation sets' training splits."""
    answers = {
        "gen_arithmetic": "reference",
        "gen_ascii_word": "reference",
        "gsm8k": "solution",
        "dolly_hhrlhf": "reference",
    }
    pairs = {
        name: [
            (asked(name, str(row["prompt"])), str(row[field]).strip())
            for row in read_rows(name, "train")
        ]
        for name, field in answers.items()
    }
    pairs["prose"] = [
        (f"Continue this text.\n\n{before.strip()}", after.strip())
        for name in BOOKS
        for document in read_documents(name)[0]
        for before, after in zip(
            document.split("\n\n")[:-1:2], document.split("\n\n")[1::2], strict=False
        )
        if 80 <= len(before) <= 600 and 80 <= len(after) <= 1200
    ]
    return pairs


def train_tokenizer(vocab_size: int, curriculum: Iterable[str]) -> Tokenizer:
    """Train a byte-level BPE on the training texts and questions, and on texts of the curriculum."""

    def texts() -> list[str]:
        out = [document for name in TEXTS for document in read_documents(name)[0]]
        for name in INSTRUCTIONS:
            task = read_task(name, "train")
            out += [text for text, _ in task.rows] + [task.instruction] * 20
            # Answers start a turn, without a space before them: make common label words tokens of their own there.
            out += task.labels * (1500 if len(task.labels) <= 26 else 60)
        out += [
            side for pairs in conversations().values() for pair in pairs[:2000] for side in pair
        ]
        return out + list(curriculum)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Encode many texts, ``uint16`` each."""
    return [
        np.array(e.ids, dtype=np.uint16)
        for e in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
