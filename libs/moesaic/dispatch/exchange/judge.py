"""Which way next, for one attention worker: what links cost, what was learned, and what operators see
of it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import structlog
from torch import Tensor

from moesaic.dispatch.exchange import metrics
from moesaic.dispatch.exchange.choice import Choice, ExchangeChooser
from moesaic.dispatch.exchange.costs import Case, LinkCosts, Shape, predict
from moesaic.dispatch.exchange.measure import measure_links
from moesaic.dispatch.exchange.sending import Nodes, Reach
from moesaic.dispatch.exchange.trials import Slot
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
    def of(cls, nodes: Nodes, layer: int, members: int, rows: int, hidden: Tensor) -> "Question":
        """Equally many workers on either side make a kind, whatever the placement; rows, like those of
        ``hidden``, count by their size."""
        width = hidden.shape[1]
        shape = nodes.shape(members, rows, width * hidden.itemsize, width * 4)  # sums are float32
        kind = (members, shape.instances, shape.own_instances, rows.bit_length())
        return cls(kind, layer, rows, shape)


@dataclass(frozen=True)
class Went:
    """How a round left: the way that was gone, after which choice, for which question."""

    question: Question
    choice: Choice
    case: Case
    forced: bool = False  # not by choice: neighbours are elsewhere, or something failed


class Judge:
    """Chooses the way of every exchange, and learns from it."""

    def __init__(self, mode: Mode) -> None:
        """Go the way ``mode`` says; if it is ``auto``, the one that should be the fastest."""
        self.mode = mode
        self.chooser = ExchangeChooser()
        self.senders = 1  # attention nodes that are known of
        self.costs: LinkCosts | None = None  # before they are measured

    @property
    def is_ready(self) -> bool:
        """Whether it can choose."""
        return self.mode != "auto" or self.costs is not None

    def predict(self, question: Question) -> dict[Case, float]:
        """What each way should take; nothing while link costs are not known."""
        return self.chooser.predict(question.kind, self._model(question))

    def choose(self, question: Question, slot: Slot | None) -> Choice:
        """The way to go, in this slot of a trial."""
        if self.mode != "auto":
            return Choice(self.mode, self.predict(question))
        if self.costs is None:  # another worker's rows, before anything is known here
            return Choice("case-2", {})
        choice = self.chooser.choose(question.kind, self._model(question), slot)
        (log.info if choice.changed else log.debug)(
            "exchange.chosen",
            way=choice.case,
            layer=question.layer,
            rows=question.rows,
            members=question.shape.members,
            exploring=choice.exploring,
            predicted_ms={case: round(1e3 * s, 3) for case, s in choice.predicted_s.items()},
        )
        return choice

    def directly(self, question: Question, slot: Slot | None) -> Went:
        """What going directly amounts to, for whatever reason that is done."""
        best = self.chooser.best(question.kind) == "direct"
        exploring = not best and slot is not None and slot.case == "direct"
        choice = Choice("direct", self.predict(question), exploring)
        forced = self.mode != "auto" or not (best or exploring)
        return Went(question, choice, "direct", forced)

    def count(self, went: Went) -> None:
        """Count an exchange of this node."""
        chosen = "exploring" if went.choice.exploring else "faster"
        why = "forced" if went.forced else "told" if self.mode != "auto" else chosen
        metrics.ROUNDS.labels(went.case, why).inc()

    def learn(self, went: Went, taken_s: float, slot: Slot | None, now_s: float) -> None:
        """Note what one of this worker's own exchanges took, from its rows to their sums.

        Args:
            went: how it was done.
            taken_s: how long that took, waiting for neighbours included.
            slot: of the trial in which it was done; ``None`` if it shows nothing there.
            now_s: when it was over.
        """
        question, case = went.question, went.case
        model_s, predicted_s = self._model(question), went.choice.predicted_s
        if model_s and predicted_s:
            metrics.PREDICTED.labels(case).inc(predicted_s[case])
            metrics.TAKEN.labels(case).inc(taken_s)
            self.chooser.learn(question.kind, case, model_s[case], taken_s, slot, now_s)

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
        if self.costs is None:
            return {}
        return predict(replace(question.shape, senders=self.senders), self.costs)
