"""Warm-up of an expert worker: made-up requests of one layer, answered as real ones are.

They are answered by ``LayerAnswers`` of their own, with made-up experts under made-up placements: the
epochs, counts and slots of the worker stay as they are. One expert lies in all slots, so memory for one
is enough; the layers of a model are alike, so one of them is, too.
"""

import asyncio
from collections.abc import Mapping, Sequence

import structlog
import torch
from torch import Tensor

from moesaic.errors import InUse
from moesaic.experts.activations import ActivationMeter
from moesaic.experts.answering import LayerAnswers
from moesaic.experts.basis import AssignmentBasis
from moesaic.experts.brownout.logical import SubstitutionOf
from moesaic.experts.epochs import Epochs, Tenure
from moesaic.experts.frames import layer_request
from moesaic.experts.loaded import layout_of
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.coded_matrix import keeps_codes
from moesaic.kernels.held_bytes import Quantization
from moesaic.kernels.linear import activation_dtype
from moesaic.kernels.promised import PromisedRows
from moesaic.kernels.warm_up import MOST_ROWS, half_promised, row_counts, warming
from moesaic.messages.placement import PlacedWorker, Placement
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import Gate

SETTING = "--slots-per-layer"
MOST_WORKERS = 16  # the scheduling of more is compiled when a first batch comes for them
_NOBODY = bytes(16)
log = structlog.get_logger()


class WarmUp:
    """The warm-up of one worker."""

    def __init__(
        self,
        gates: Mapping[int, Gate],
        config: ModelConfig,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization,
        substitution_of: SubstitutionOf,
    ) -> None:
        """Take the gates, by decoder layer, and the form of experts; nothing is computed yet."""
        self._gates, self._config, self._num_slots = gates, config, num_slots
        self._dtype, self._device, self._quantization = dtype, device, quantization
        self._substitution_of = substitution_of
        self._degraded: set[tuple[Substitution, int, int, int]] = set()

    async def run(self, most_rows: int = MOST_ROWS) -> None:
        """Answer requests of up to ``most_rows`` rows, on the engine thread; ends early if cancelled.

        Raises:
            InvalidInput: there is too little memory.
        """
        if not most_rows or not self._gates:
            return
        config, answers = self._config, self._answers()
        with warming(self._device, SETTING, f"a batch of {most_rows} rows beside the slots"):
            table = self._table()
            # One worker can have all of them.
            alone = self._num_slots >= config.moe.num_experts
            for num_workers in row_counts(MOST_WORKERS)[0 if alone else 1 :]:
                self._answer(answers, self._tenure(table, num_workers), 1)
                await asyncio.sleep(0)
            tenure = self._tenure(table, 2)
            for num_rows in row_counts(most_rows):
                self._answer(answers, tenure, num_rows)
                await asyncio.sleep(0)

    def degrade(self, tenure: Tenure) -> None:
        """Answer requests whose rows may be degraded, by the experts of a placement that is not in force yet.

        So no kernel is compiled in the overload that degrades the first rows. Placements alike are met once, and
        those that degrade nothing never. Without memory for it, kernels are compiled when such rows come. It may
        run on any one thread.
        """
        substitution, num_workers = tenure.placement.substitution, len(tenure.placement.workers)
        if substitution == Substitution():
            return
        answers = self._answers()
        by_slots = {len(slots.experts): layer for layer, slots in tenure.table.layers.items()}
        try:
            with warming(self._device, SETTING, f"a degraded batch of {MOST_ROWS} rows"):
                for num_slots, layer in by_slots.items():
                    like = substitution, tenure.placement.num_experts, num_workers, num_slots
                    if like in self._degraded:
                        continue
                    for num_rows in row_counts(MOST_ROWS):
                        promised = half_promised(num_rows, self._device)
                        self._ask(answers, tenure, layer, num_rows, promised)
                    self._degraded.add(like)
        except InUse as error:
            log.warning("kernels.cold", cause=str(error))

    def _answers(self) -> LayerAnswers:
        """Answers that leave no traces."""
        config, meter = self._config, ActivationMeter(self._config.moe.num_experts)
        parts = Epochs(""), self._gates, config, self._dtype, self._device, meter
        return LayerAnswers(*parts, self._substitution_of)

    def _ask(
        self,
        answers: LayerAnswers,
        tenure: Tenure,
        layer: int,
        num_rows: int,
        promised: PromisedRows | None,
        routing: Sequence[Tensor] = (),
    ) -> None:
        """Answer a request that the gate routes, or whose ``routing`` is by its sender."""
        rows = _rows(num_rows, self._config.hidden_size)
        rows = rows.to(activation_dtype(self._dtype, self._device))
        live = tuple(range(len(tenure.placement.workers)))
        loads = None if routing else tuple(0 for _ in live)
        tensors = [rows, AssignmentBasis("aebs", live, loads).encode(), *routing]
        request = layer_request(_NOBODY, 1, layer, 1, tensors, promised=promised)
        answers.compute(tenure, request)

    def _answer(self, answers: LayerAnswers, tenure: Tenure, num_rows: int) -> None:
        """Answer a request that the gate routes, and one that its sender has routed to this worker."""
        layer, top_k = tenure.placement.layers[0], self._config.moe.top_k
        held = tenure.table.layers[layer].experts
        chosen = torch.arange(num_rows * top_k).remainder(len(set(held))).view(num_rows, top_k)
        here = [torch.ones(num_rows, top_k), chosen.int()]
        for routing in ([], here):
            self._ask(answers, tenure, layer, num_rows, None, routing)

    def _table(self) -> SlotTable:
        as_stored = keeps_codes(self._device)
        layout = layout_of(self._config, self._dtype, self._quantization, as_stored=as_stored)
        mlp = layout.view(torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device))
        experts = [slot % self._config.moe.num_experts for slot in range(self._num_slots)]
        slots = LayerSlots(tuple(experts), (mlp,) * len(experts))
        return SlotTable({min(self._gates): slots})

    def _tenure(self, table: SlotTable, num_workers: int) -> Tenure:
        """Place the table on the first of these workers. The second has all other experts."""
        [(layer, slots)] = table.layers.items()
        rest = sorted(set(range(self._config.moe.num_experts)) - set(slots.experts))
        others = [rest, *[[] for _ in range(num_workers)]][: num_workers - 1]
        workers = [_worker(idx) for idx in range(num_workers)]
        placed = [list(slots.experts), *others]
        placement = Placement(
            epoch=1,
            model_digest=self._config.digest,
            num_experts=self._config.moe.num_experts,
            workers=workers,
            layers=[layer],
            slots=[placed],
        )
        return Tenure(placement, 0, table)


def _worker(idx: int) -> PlacedWorker:
    return PlacedWorker(
        worker_id=str(idx), generation=0, admin_address="", data_address="", ridge_rows=1
    )


def _rows(num_rows: int, hidden_size: int) -> Tensor:
    return torch.randn(num_rows, hidden_size, generator=torch.Generator().manual_seed(0))
