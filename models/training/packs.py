"""Fill training sequences: several documents a sequence, and many questions behind one shared
instruction.

The labelled sets' instructions (up to 151 labels) are far longer than their texts. Questions of one
task are therefore siblings: they stand behind one copy of the instruction, each sees that and
itself only, and each has the positions it would have alone. What the network computes for a sibling
is exactly what it would compute for the lone prompt.
"""

from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from models.training import corpus
from moesaic.classification.prompts import DEFAULT_INSTRUCTION, SYMBOLS, Method, question_head

LM_WEIGHT, QUESTION_WEIGHT, ANSWER_WEIGHT = 1.0, 0.2, 4.0
SHARES = {  # of training tokens
    "text": 0.27,
    "continue": 0.06,
    "clinc_domain": 0.15,
    "banking77": 0.15,
    "clinc150": 0.24,
    "boolq": 0.02,
    "pubmedqa": 0.015,
    "gen_arithmetic": 0.03,
    "gen_ascii_word": 0.025,
    "gsm8k": 0.02,
    "dolly_hhrlhf": 0.02,
}


Part = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # tokens, sibling, position, weight


@dataclass
class Pack:
    """One training sequence of ``T`` positions.

    A token sees earlier ones of its ``document`` that are shared (sibling 0) or of its own
    ``sibling``. ``weight[t]`` weighs the prediction of ``tokens[t + 1]``.
    """

    tokens: np.ndarray
    document: np.ndarray
    sibling: np.ndarray
    position: np.ndarray
    weight: np.ndarray

    def mask(self) -> np.ndarray:
        """Bool ``[T, T]``, true where the row's token sees the column's."""
        same = self.document[:, None] == self.document[None, :]
        open_ = (self.sibling[None, :] == 0) | (self.sibling[:, None] == self.sibling[None, :])
        return np.tril(same & open_)


class Packer:
    """Draws packs from all sets, in the shares above, deterministically for a seed."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._tokenizer = tokenizer
        documents = [d for name in corpus.TEXTS for d in corpus.read_documents(name)[0]]
        end = np.array([tokenizer.token_to_id(corpus.END_OF_TEXT)], dtype=np.uint16)
        self._stream = np.concatenate(
            [np.concatenate([ids, end]) for ids in corpus.encode(tokenizer, documents)]
        )
        self._pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for name, pairs in corpus.conversations().items():
            asked = corpus.encode(
                tokenizer, [f"{corpus.USER_HEAD}{q}{corpus.ASSISTANT_HEAD}" for q, _ in pairs]
            )
            answered = corpus.encode(tokenizer, [a + corpus.TURN_END for _, a in pairs])
            self._pairs[name] = list(zip(asked, answered, strict=True))
        self._tasks = {name: corpus.read_task(name, "train") for name in corpus.INSTRUCTIONS}
        self._texts = {
            name: corpus.encode(tokenizer, [text + corpus.ASSISTANT_HEAD for text, _ in task.rows])
            for name, task in self._tasks.items()
        }
        self._answers = {
            name: corpus.encode(tokenizer, [label + corpus.TURN_END for label in task.labels])
            for name, task in self._tasks.items()
        }
        self._symbols = corpus.encode(tokenizer, [symbol + corpus.TURN_END for symbol in SYMBOLS])
        self._queues: dict[str, list[int]] = {}

    def _next_rows(self, name: str, total: int, wanted: int) -> list[int]:
        """Rows of one set, every row once before any row twice."""
        queue = self._queues.setdefault(name, [])
        while len(queue) < wanted:
            queue.extend(self._rng.permutation(total).tolist())
        taken, self._queues[name] = queue[:wanted], queue[wanted:]
        return taken

    def pack(self, length: int) -> Pack:
        """Fill one sequence of ``length`` tokens."""
        parts: list[Part] = []
        room = length
        names, shares = zip(*SHARES.items(), strict=True)
        while room > 24:
            name = str(self._rng.choice(names, p=np.array(shares) / sum(shares)))
            if name == "text":
                part: Part | None = self._text(min(room, length // 2))
            elif name in self._pairs:
                part = self._conversation(name, room)
            else:
                part = self._siblings(name, room, length)
            parts.append(part or self._text(room))
            room -= len(parts[-1][0])
        document = np.concatenate(
            [np.full(len(p[0]), i, dtype=np.int32) for i, p in enumerate(parts)]
        )
        tokens, sibling, position, weight = (
            np.concatenate([p[i] for p in parts]) for i in range(4)
        )
        fill = length - len(tokens)
        return Pack(
            np.pad(tokens.astype(np.int64), (0, fill)),
            np.pad(document, (0, fill), constant_values=-1),
            np.pad(sibling, (0, fill)),
            np.pad(position, (0, fill)),
            np.pad(weight, (0, fill)),
        )

    def _text(self, room: int) -> Part:
        start = int(self._rng.integers(0, len(self._stream) - room))
        tokens = self._stream[start : start + room]
        weight = np.full(room, LM_WEIGHT, dtype=np.float32)
        weight[-1] = 0
        return tokens, np.zeros(room, dtype=np.int32), np.arange(room), weight

    def _conversation(self, name: str, room: int) -> Part | None:
        [row] = self._next_rows(name, len(self._pairs[name]), 1)
        asked, answered = self._pairs[name][row]
        tokens = np.concatenate([asked, answered])[:room]
        if len(asked) + min(8, len(answered)) > room:
            return None
        weight = np.full(len(tokens), QUESTION_WEIGHT, dtype=np.float32)
        weight[len(asked) - 1 :] = 1.5
        weight[-1] = 0
        return tokens, np.zeros(len(tokens), dtype=np.int32), np.arange(len(tokens)), weight

    def _siblings(self, name: str, room: int, length: int) -> Part | None:
        task = self._tasks[name]
        short_labels = len(task.labels) <= len(SYMBOLS)
        chance = self._rng.random()
        method: Method = "choice" if name == "clinc_domain" and chance < 0.2 else "sequence"
        whole = self._rng.random() < (0.5 if short_labels else 0.35)
        count = 4 if method == "choice" and not whole else 24
        rows = self._next_rows(name, len(task.rows), count)
        labels = list(range(len(task.labels)))
        if not whole:
            golden = {task.rows[row][1] for row in rows}
            others = [i for i in labels if i not in golden]
            most = len(others) if short_labels else min(len(others), 60)
            extra = self._rng.permutation(others)[: int(self._rng.integers(0, most + 1))]
            labels = [int(i) for i in self._rng.permutation([*golden, *extra])]
        instruction = task.instruction if self._rng.random() < 0.7 else DEFAULT_INSTRUCTION
        head = corpus.USER_HEAD + question_head(
            [task.labels[i] for i in labels], instruction, method
        )
        prefix = np.array(
            self._tokenizer.encode(head, add_special_tokens=False).ids, dtype=np.uint16
        )
        tokens, sibling = [prefix], [np.zeros(len(prefix), dtype=np.int32)]
        position, weight = [np.arange(len(prefix))], [np.zeros(len(prefix), dtype=np.float32)]
        room -= len(prefix)
        for number, row in enumerate(rows, start=1):
            asked, label = self._texts[name][row], task.rows[row][1]
            answer = (
                self._symbols[labels.index(label)]
                if method == "choice"
                else self._answers[name][label]
            )
            size = len(asked) + len(answer)
            if size > room:
                self._queues[name].extend(rows[number - 1 :])
                break
            tokens += [asked, answer]
            sibling.append(np.full(size, number, dtype=np.int32))
            position.append(np.arange(len(prefix), len(prefix) + size))
            own = np.full(size, QUESTION_WEIGHT, dtype=np.float32)
            own[len(asked) - 1 : -1] = (
                ANSWER_WEIGHT  # the prediction of each answer token, and of the turn's end
            )
            own[-1] = 0
            weight.append(own)
            room -= size
        if len(tokens) == 1:
            return None
        weight[0][-1] = 0
        return (
            np.concatenate(tokens),
            np.concatenate(sibling),
            np.concatenate(position),
            np.concatenate(weight),
        )
