"""Windows of edge servers, drawn so that the rows of one prompt are alike and those of one task akin."""

from collections.abc import Sequence

import numpy as np

from moesaic.messages.activation import ActivationWindow, LayerActivations
from moesaic.placement.traffic.statistics import Floats

LAYERS, NUM_EXPERTS, TOP_K = (1, 3, 4), 24, 4


def window(
    origin: str, tokens: Floats, rows: int, layers: Sequence[int] = LAYERS, window_s: float = 10.0
) -> ActivationWindow:
    """``tokens``: ``[L, E]``."""
    return ActivationWindow(
        worker_id=origin,
        generation=1,
        model_digest="m",
        num_experts=tokens.shape[1],
        epoch=1,
        window_s=window_s,
        layers=[
            LayerActivations(
                layer=layer,
                rows=rows,
                batches=min(rows, 1),
                tokens=[int(count) for count in counts],
                active_batches=[int(count > 0) for count in counts],
                pair_total=0,
            )
            for layer, counts in zip(layers, tokens, strict=True)
        ],
    )


class Tasks:
    """Four tasks, whose prompts choose experts by a distribution of their own, near to that of the task."""

    def __init__(self, seed: int, kinship: float = 20.0) -> None:
        self._rng = np.random.default_rng(seed)
        self._liking = self._rng.dirichlet(np.ones(NUM_EXPERTS), size=(4, len(LAYERS)))
        self._kinship = kinship

    def distance(self, one: Sequence[float], other: Sequence[float]) -> float:
        """Total variation distance of two mixtures."""
        first, second = (np.tensordot(mix, self._liking, 1) for mix in (one, other))
        return float(0.5 * np.abs(first - second).sum(axis=-1).mean())

    def draw(self, mix: Sequence[float], prompts: float, rows: int = 120) -> tuple[Floats, int]:
        """The prompts that come in one window: tokens ``[L, E]``, and rows."""
        tokens, total = np.zeros((len(LAYERS), NUM_EXPERTS)), 0
        for task in self._rng.choice(len(mix), size=self._rng.poisson(prompts), p=mix):
            length = int(np.clip(self._rng.lognormal(np.log(rows), 0.7), 8, 4000))
            liking = self._rng.gamma(self._liking[task] * self._kinship + 1e-3)
            liking /= liking.sum(axis=-1, keepdims=True)
            # No row chooses an expert twice, so that one in many choices would be refused otherwise.
            tokens += np.minimum(self._rng.multinomial(length * TOP_K, liking), length)
            total += length
        return tokens, total
