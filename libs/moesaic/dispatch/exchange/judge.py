"""Which way next, for one attention worker: what links cost, what was learned, and what operators see
of it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog
from torch import Tensor

from moesaic.dispatch.exchange import metrics
from moesaic.dispatch.exchange.choice import Choice, ExchangeChooser
from moesaic.dispatch.exchange.costs import Case, LinkCosts, Shape, predict
from moesaic.dispatch.exchange.measure import measure_links
from moesaic.dispatch.exchange.sending import Nodes, Reach
from moesaic.transport.contract import Link, Network

log = structlog.get_logger()

Mode = Literal["auto", "direct", "case-1", "case-2"]


@dataclass(frozen=True)
class Question:
    """One exchange, as far as its duration depends on it."""

    kind: Hashable  # exchanges that should take equally long
    layer: int
    rows: int
    shape: Shape

    @classmethod
    def of(
        cls, reach: Reach, layer: int, nodes: Nodes, members: int, rows: int, hidden: Tensor
    ) -> "Question":
        """Layers that ask the same workers are of one kind; rows, like those of ``hidden``, count by
        their size."""
        epoch, live = reach.placement.epoch, tuple(reach.live)
        kind = (epoch, live, tuple(reach.targets[layer]), members, rows.bit_length())
        width = hidden.shape[1]
        shape = nodes.shape(members, rows, width * hidden.itemsize, width * 4)  # sums are float32
        return cls(kind, layer, rows, shape)


class Judge:
    """Chooses the way of every exchange, and learns from it."""

    def __init__(self, mode: Mode) -> None:
        """Go the way ``mode`` says; if it is ``auto``, the one that should be the fastest."""
        self._mode = mode
        self._chooser = ExchangeChooser()
        self._reported: dict[Hashable, Case] = {}
        self.costs: LinkCosts | None = None  # before they are measured

    @property
    def is_ready(self) -> bool:
        """Whether it can choose."""
        return self._mode != "auto" or self.costs is not None

    def predict(self, question: Question) -> dict[Case, float]:
        """What each way should take; nothing while link costs are not known."""
        return self._chooser.predict(question.kind, self._model(question))

    def choose(self, question: Question) -> Choice:
        """The way to go."""
        if self._mode != "auto":
            return Choice(self._mode, self.predict(question))
        if self.costs is None:  # another worker's rows, before anything is known here
            return Choice("case-2", {})
        choice = self._chooser.choose(question.kind, self._model(question))
        changed = not choice.exploring and self._reported.get(question.kind) != choice.case
        if changed:
            self._reported[question.kind] = choice.case
        (log.info if changed else log.debug)(
            "exchange.chosen",
            way=choice.case,
            layer=question.layer,
            rows=question.rows,
            members=question.shape.members,
            exploring=choice.exploring,
            predicted_ms={case: round(1e3 * s, 3) for case, s in choice.predicted_s.items()},
        )
        return choice

    def learn(self, question: Question, case: Case, choice: Choice, taken_s: float) -> None:
        """Note what going ``case`` took, after ``choice`` had been made."""
        why = "told" if self._mode != "auto" else "exploring" if choice.exploring else "faster"
        metrics.ROUNDS.labels(case, why).inc()
        model_s = self._model(question)
        if model_s and choice.predicted_s:
            metrics.PREDICTED.labels(case).inc(choice.predicted_s[case])
            metrics.TAKEN.labels(case).inc(taken_s)
            self._chooser.learn(question.kind, case, model_s[case], taken_s)

    async def measure(
        self, network: Network, reach: Reach, nodes: Nodes, neighbours: Sequence[Link]
    ) -> None:
        """Learn what links cost, over the links there are.

        Raises:
            MoesaicError: somebody does not answer; nothing has changed.
        """
        self.costs = await measure_links(network, reach, nodes, neighbours)
        for link, cost in (("intra", self.costs.intra), ("inter", self.costs.inter)):
            log.info(
                "link.measured",
                link=link,
                latency_us=round(1e6 * cost.latency_s, 1),
                message_us=round(1e6 * cost.message_s, 1),
                mb_per_s=round(cost.bytes_per_s / 1e6, 1),
            )

    def _model(self, question: Question) -> dict[Case, float]:
        return predict(question.shape, self.costs) if self.costs is not None else {}
