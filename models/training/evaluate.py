"""What the trained network can do: accuracy on the test splits, perplexity on held-out text, exact
answers."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from rich.progress import track
from tokenizers import Tokenizer

from models.training import corpus
from models.training.network import Network
from moesaic.classification.prompts import SYMBOLS, Method, question_head

TREE_TOKENS = 1536  # tokens of one evaluation pass
WINDOW = 1024  # tokens of context for the perplexity


class Tree:
    """Token sequences that share beginnings, as one sequence with a mask: every node sees its
    ancestors and itself."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def extend(self, parent: int, tokens: Iterable[int]) -> list[int]:
        """Walk or grow a path below ``parent`` (-1: the root); returns the nodes on it."""
        path = []
        for token in tokens:
            node = self._children.get((parent, int(token)))
            if node is None:
                node = self._children[parent, int(token)] = len(self.tokens)
                self.tokens.append(int(token))
                self.parents.append(parent)
                self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
            path.append(node)
            parent = node
        return path

    def mask(self) -> np.ndarray:
        """Bool ``[T, T]``."""
        visible = np.eye(len(self.tokens), dtype=bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                visible[node] |= visible[parent]
        return visible

    def run(self, network: Network) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Each node's log-probability given its ancestors, float32 ``[T]`` (0 for roots), and
        expert ids per layer."""
        device = next(network.parameters()).device
        tokens = torch.tensor(self.tokens, device=device)
        mask = torch.from_numpy(self.mask())[None, None].to(device)
        hidden, _, ids = network(tokens[None], mask, torch.tensor(self.depths, device=device)[None])
        parents = torch.tensor(self.parents, device=device)
        inner, row_of = torch.unique(parents.clamp(min=0), return_inverse=True)
        logprobs = network.logits(hidden[0, inner]).float().log_softmax(dim=-1)
        own = logprobs[row_of, tokens]
        return torch.where(parents >= 0, own, 0.0), ids


@dataclass(frozen=True)
class Accuracy:
    """Right answers of all asked, by one method."""

    name: str
    method: Method
    rows: int
    accuracy: float


@torch.no_grad()
def classify(
    network: Network, tokenizer: Tokenizer, task: corpus.Task, method: Method, most_rows: int
) -> Accuracy:
    """Accuracy over a test split, each row asked as the gateway asks it."""
    rows = task.rows[:: max(1, len(task.rows) // most_rows)] if most_rows else task.rows
    head = corpus.encode(
        tokenizer, [corpus.USER_HEAD + question_head(task.labels, task.instruction, method)]
    )[0]
    answers = [SYMBOLS[i] for i in range(len(task.labels))] if method == "choice" else task.labels
    end = "" if method == "choice" else corpus.TURN_END
    candidates = corpus.encode(tokenizer, [answer + end for answer in answers])
    texts = corpus.encode(tokenizer, [text + corpus.ASSISTANT_HEAD for text, _ in rows])
    right = 0
    for group in track(
        list(_groups(head, texts, candidates)), description=f"{task.name} ({method})"
    ):
        tree = Tree()
        base = tree.extend(-1, head)[-1]
        paths = []
        for row in group:
            asked = tree.extend(base, texts[row])[-1]
            paths.append([tree.extend(asked, candidate) for candidate in candidates])
        logprobs, _ = tree.run(network)
        for row, options in zip(group, paths, strict=True):
            scores = [float(logprobs[nodes].sum()) for nodes in options]
            right += int(np.argmax(scores)) == rows[row][1]
    return Accuracy(task.name, method, len(rows), right / len(rows))


def _groups(
    head: np.ndarray, texts: list[np.ndarray], candidates: list[np.ndarray]
) -> Iterator[list[int]]:
    """Rows that fit one tree together."""
    group: list[int] = []
    size = len(head)
    below = sum(map(len, candidates))
    for row, text in enumerate(texts):
        if group and size + len(text) + below > TREE_TOKENS:
            yield group
            group, size = [], len(head)
        group.append(row)
        size += len(text) + below
    if group:
        yield group


@torch.no_grad()
def perplexity(
    network: Network, tokenizer: Tokenizer, texts: list[str], most_tokens: int
) -> tuple[float, float]:
    """Perplexity per token, and bits per byte of text, over documents cut into windows."""
    total_nats, total_tokens, total_bytes = 0.0, 0, 0
    for text in texts:
        ids = torch.from_numpy(corpus.encode(tokenizer, [text])[0].astype(np.int64))
        for start in range(0, len(ids) - 1, WINDOW):
            if total_tokens >= most_tokens:
                break
            window = ids[start : start + WINDOW + 1]
            length = len(window) - 1
            mask = torch.ones(length, length).tril().bool()[None, None]
            hidden, _, _ = network(window[None, :-1], mask, torch.arange(length)[None])
            loss = torch.nn.functional.cross_entropy(
                network.logits(hidden[0]).float(), window[1:], reduction="sum"
            )
            total_nats += float(loss)
            total_tokens += length
            total_bytes += len(tokenizer.decode(window[1:].tolist()).encode())
    return math.exp(total_nats / total_tokens), total_nats / math.log(2) / total_bytes


@torch.no_grad()
def routing(
    network: Network, tokenizer: Tokenizer, samples: dict[str, list[str]]
) -> tuple[list[str], np.ndarray]:
    """How often each task's tokens chose each expert: names and shares, float64 ``[tasks, L,
    E]``."""
    shape = network.shape
    shares = np.zeros((len(samples), shape.num_layers, shape.num_experts))
    for index, texts in enumerate(samples.values()):
        for text in texts:
            tree = Tree()
            tree.extend(-1, corpus.encode(tokenizer, [text])[0][:WINDOW])
            _, ids = tree.run(network)
            for layer, chosen in enumerate(ids):
                shares[index, layer] += np.bincount(
                    chosen.flatten().cpu(), minlength=shape.num_experts
                )
    return list(samples), shares / shares.sum(axis=-1, keepdims=True)


def entropy_bits(shares: np.ndarray) -> np.ndarray:
    """Shannon entropy over the last axis."""
    bits: np.ndarray = -(shares * np.log2(np.maximum(shares, 1e-12))).sum(axis=-1)
    return bits


def task_distances(shares: np.ndarray) -> np.ndarray:
    """Jensen-Shannon distance (0 to 1) between tasks, mean over layers, ``[tasks, tasks]``."""
    mixed = (shares[:, None] + shares[None, :]) / 2
    own = entropy_bits(shares)
    divergence = entropy_bits(mixed) - (own[:, None] + own[None, :]) / 2
    distances: np.ndarray = np.sqrt(np.maximum(divergence, 0)).mean(axis=-1)
    return distances
