"""Evaluation of the trained network: accuracy on the test splits, perplexity on held-out text, exact
answers."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

from models.training import corpus
from models.training.network import Network
from moesaic.classification.prompts import SYMBOLS, Method, question

TREE_TOKENS = 1536  # tokens of one evaluation pass
FIRST_WIDTH = 6  # labels that are scored at once
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

    def run(self, network: Network) -> "Passed":
        """One forward pass over all nodes."""
        device = next(network.parameters()).device
        tokens = torch.tensor(self.tokens, device=device)
        mask = torch.from_numpy(self.mask())[None, None].to(device)
        depths = torch.tensor(self.depths, device=device)[None]
        hidden, _, ids = network(tokens[None], mask, depths)
        return Passed(network, tokens, torch.tensor(self.parents, device=device), hidden[0], ids)


@dataclass(frozen=True)
class Passed:
    """A tree after its forward pass; ``ids`` are the expert ids of each layer, ``[T, k]``."""

    network: Network
    tokens: Tensor  # int64 [T]
    parents: Tensor  # int64 [T]
    hidden: Tensor  # [T, H]
    ids: list[Tensor]

    def next_logprobs(self, nodes: Sequence[int]) -> Tensor:
        """Return the log-probabilities of all tokens behind each node, float32 ``[len(nodes), V]``."""
        return self.network.logits(self.hidden[list(nodes)]).float().log_softmax(dim=-1)

    def logprobs(self) -> Tensor:
        """Each node's own log-probability given its ancestors, float32 ``[T]``; 0 for roots."""
        inner, row_of = torch.unique(self.parents.clamp(min=0), return_inverse=True)
        own = self.next_logprobs(inner.tolist())[row_of, self.tokens]
        return torch.where(self.parents >= 0, own, 0.0)


@dataclass(frozen=True)
class Accuracy:
    """Count of right answers, of all asked, by one method."""

    name: str
    method: Method
    rows: int
    accuracy: float


@torch.no_grad()
def classify(
    network: Network, tokenizer: Tokenizer, task: corpus.Task, method: Method, most_rows: int
) -> Accuracy:
    """Measure the accuracy over a test split, each row asked as the gateway asks it.

    A label's log-probability is at most that of its first token. So the labels with the likeliest
    first tokens are scored first, and the others only if they could still win.
    """
    rows = task.rows[:: max(1, len(task.rows) // most_rows)] if most_rows else task.rows
    head = corpus.USER_HEAD + question("", task.labels, task.instruction, method)
    answers = [SYMBOLS[i] for i in range(len(task.labels))] if method == "choice" else task.labels
    end = "" if method == "choice" else corpus.TURN_END
    asking = Asking(
        network,
        corpus.encode(tokenizer, [head])[0],
        corpus.encode(tokenizer, [text + corpus.ASSISTANT_HEAD for text, _ in rows]),
        corpus.encode(tokenizer, [answer + end for answer in answers]),
    )
    bounds = asking.bounds(f"{task.name} ({method})")
    order = bounds.argsort(axis=1)[:, ::-1]
    open_rows, chosen, width = list(range(len(rows))), np.zeros(len(rows), dtype=int), FIRST_WIDTH
    while open_rows:
        tried = {row: order[row, :width].tolist() for row in open_rows}
        scores = asking.scores(tried)
        still_open = []
        for row in open_rows:
            best = int(np.argmax(scores[row]))
            chosen[row] = tried[row][best]
            others = bounds[row, order[row, width:]]
            if others.size and others.max() > scores[row][best]:
                still_open.append(row)
        open_rows, width = still_open, 4 * width
    right = int((chosen == np.array([label for _, label in rows])).sum())
    return Accuracy(task.name, method, len(rows), right / len(rows))


@dataclass(frozen=True)
class Asking:
    """One question put to many texts: token ids of its head, the texts, the possible answers."""

    network: Network
    head: np.ndarray
    texts: list[np.ndarray]
    candidates: list[np.ndarray]

    def bounds(self, title: str) -> np.ndarray:
        """Log-probability of each candidate's first token, ``[texts, candidates]``."""
        out = np.zeros((len(self.texts), len(self.candidates)))
        first = [int(candidate[0]) for candidate in self.candidates]
        sizes = {row: len(text) for row, text in enumerate(self.texts)}
        for group in track(list(_groups(len(self.head), sizes)), description=title):
            tree, ends = self._tree(group)
            out[group] = tree.run(self.network).next_logprobs(ends)[:, first].cpu().numpy()
        return out

    def scores(self, tried: dict[int, list[int]]) -> dict[int, list[float]]:
        """Log-probability of the whole of some candidates, for some texts."""
        out = {}
        sizes = {
            row: len(self.texts[row]) + sum(len(self.candidates[c]) for c in candidates)
            for row, candidates in tried.items()
        }
        for group in _groups(len(self.head), sizes):
            tree, ends = self._tree(group)
            paths = {
                row: [tree.extend(end, self.candidates[c]) for c in tried[row]]
                for row, end in zip(group, ends, strict=True)
            }
            logprobs = tree.run(self.network).logprobs()
            for row in group:
                out[row] = [float(logprobs[nodes].sum()) for nodes in paths[row]]
        return out

    def _tree(self, group: list[int]) -> tuple[Tree, list[int]]:
        """A tree of these texts, and the last node of each."""
        tree = Tree()
        base = tree.extend(-1, self.head)[-1]
        return tree, [tree.extend(base, self.texts[row])[-1] for row in group]


def _groups(shared: int, sizes: dict[int, int]) -> Iterator[list[int]]:
    """Rows that fit one pass together."""
    group: list[int] = []
    room = TREE_TOKENS - shared
    for row, size in sizes.items():
        if group and size > room:
            yield group
            group, room = [], TREE_TOKENS - shared
        group.append(row)
        room -= size
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
    """Measure the shares of each task's tokens that chose each expert.

    Returns:
        Names of the tasks, and shares, float64 ``[tasks, L, E]``.
    """
    shape = network.shape
    shares = np.zeros((len(samples), shape.num_layers, shape.num_experts))
    for index, texts in enumerate(samples.values()):
        for text in texts:
            tree = Tree()
            tree.extend(-1, corpus.encode(tokenizer, [text])[0][:WINDOW])
            for layer, chosen in enumerate(tree.run(network).ids):
                shares[index, layer] += np.bincount(
                    chosen.flatten().cpu(), minlength=shape.num_experts
                )
    return list(samples), shares / shares.sum(axis=-1, keepdims=True)


def entropy_bits(shares: np.ndarray) -> np.ndarray:
    """Shannon entropy over the last axis."""
    bits: np.ndarray = -(shares * np.log2(np.maximum(shares, 1e-12))).sum(axis=-1)
    return bits


def task_distances(shares: np.ndarray) -> np.ndarray:
    """Jensen-Shannon distance (0 to 1) between tasks in each layer, ``[L, tasks, tasks]``."""
    mixed = (shares[:, None] + shares[None, :]) / 2
    own = entropy_bits(shares)
    divergence = entropy_bits(mixed) - (own[:, None] + own[None, :]) / 2
    distances: np.ndarray = np.sqrt(np.maximum(divergence, 0)).transpose(2, 0, 1)
    return distances
