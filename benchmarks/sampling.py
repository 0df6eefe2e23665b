"""Time of picking tokens from logits of a large vocabulary: the kernel beside torch's own operations, which sort.

Flat logits are those of random weights, where top-p keeps most of the vocabulary; peaked ones have a likeliest token
that many steps of real models have.
"""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.sampling import PickRules, pick_tokens, pick_tokens_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 151_936  # Qwen3's
ROWS = (1, 8, 32)
RULES = {
    "greedy": PickRules(),
    "free": PickRules(1.0),
    "top_k_20": PickRules(1.0, top_k=20),
    "top_p_0.9": PickRules(1.0, top_p=0.9),
    "min_p_0.05": PickRules(1.0, min_p=0.05),
    "all": PickRules(1.0, top_k=20, top_p=0.9, min_p=0.05),
}
WAYS: dict[str, Callable[[Tensor, list[PickRules]], list[int]]] = {
    "sorting": pick_tokens_reference,
    "now": pick_tokens,
}


def run(quick: bool) -> dict[str, Any]:
    """Measure every rule and number of rows, both ways in turns."""
    turns = 3 if quick else 9
    figures = {
        f"{shape}.{name}": _measure(logits, how, turns)
        for shape, logits in (("flat", _flat()), ("peaked", _peaked()))
        for name, how in RULES.items()
    }
    return {
        "config": {
            "device": DEVICE,
            "vocab": VOCAB,
            "rows": list(ROWS),
            "turns": turns,
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": {
            "slowest_ms_a_row": {
                way: max(
                    figure[way][f"{rows}_rows"] for figure in figures.values() for rows in ROWS
                )
                for way in WAYS
            },
            **figures,
        },
        "notes": [
            "milliseconds a row, medians of turns; draws included, changes of logits not",
            "sorting: the same tokens by torch's operations, as where there is no kernel",
            *(["quick: fewer turns, the same code path"] if quick else []),
        ],
    }


def _flat() -> Tensor:
    logits = torch.randn(max(ROWS), VOCAB, generator=torch.Generator().manual_seed(1)) / 2
    return logits.to(DEVICE)


def _peaked() -> Tensor:
    logits = torch.randn(max(ROWS), VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    logits[:, 1000] = 18.0
    return logits.to(DEVICE)


def _measure(logits: Tensor, how: PickRules, turns: int) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    # The first one warms up.
    for turn in range(-1, turns):
        for rows in ROWS:
            rules = [how._replace(draw=row / rows) for row in range(rows)]
            for way, pick in WAYS.items():
                started = time.perf_counter()
                pick(logits[:rows], rules)
                took_ms = (time.perf_counter() - started) * 1e3 / rows
                if turn >= 0:
                    times[way].setdefault(f"{rows}_rows", []).append(took_ms)
    return {
        way: {rows: round(median(each), 3) for rows, each in by_rows.items()}
        for way, by_rows in times.items()
    }
