"""The parts of a batch that different sources compute, and their sum.

Usually a source gives back one sum for each of its rows. With ``--deterministic`` it gives the result of each
choice by itself, and these are added up here as ``local`` adds them: see ``moesaic.experts.unsummed``.
"""

import torch
from torch import Tensor

from moesaic.errors import ExpertUnavailable
from moesaic.experts.slots import LayerSlots, SlotTable
from moesaic.kernels.grouped_experts import sum_of_choices


class LayerBatch:
    """One layer's rows of one step, and the results that have come for them.

    Attributes:
        hidden: ``[T, H]``.
        weights: float32 ``[T, k]``.
        ids: int32 ``[T, k]``, on the host; -1 is nobody's choice.
    """

    def __init__(
        self, hidden: Tensor, weights: Tensor, ids: Tensor, *, unsummed: bool = False
    ) -> None:
        """Begin without results; with ``unsummed`` choices are added up one by one."""
        self.hidden, self.weights, self.ids = hidden, weights, ids.cpu()
        self.unsummed = unsummed
        size = hidden.shape[1]
        rows = ids.numel() if unsummed else len(ids)
        self._out: Tensor | None = None  # float32 [T, H], or [T * k, H]
        self._shape, self._done = (rows, size), 0

    @property
    def top_k(self) -> int:
        """Choices of a row."""
        return self.ids.shape[1]

    def compute(self, layer: int, table: SlotTable, slot_ids: Tensor) -> None:
        """Compute the choices that have a slot of ``table``; ``slot_ids`` int32 ``[T, k]``, -1 elsewhere."""
        slot_ids = slot_ids.to(self.hidden.device)
        if self.unsummed:
            results, places = table.compute_choices(layer, self.hidden, slot_ids)
            self._place(places[:, 0], results)
        elif self._out is None:
            self._out = table.compute_slots(layer, self.hidden, self.weights, slot_ids)
        else:
            self._out += table.compute_slots(layer, self.hidden, self.weights, slot_ids)

    def compute_loaded(self, layer: int, experts: list[int], slots: LayerSlots) -> None:
        """Compute the choices of ``experts``, which lie in ``slots`` in this order."""
        slot_ids = torch.full_like(self.ids, -1)
        for slot, expert in enumerate(experts):
            slot_ids[self.ids == expert] = slot
        table, rows = SlotTable({layer: slots}), (slot_ids >= 0).any(dim=1).nonzero()[:, 0]
        if self.unsummed or len(rows) == len(self.ids):
            self.compute(layer, table, slot_ids)
            return
        there = rows.to(self.hidden.device)
        sums = table.compute_slots(
            layer, self.hidden[there], self.weights[there], slot_ids[rows].to(there.device)
        )
        self.add(rows, sums)

    def for_peer(self, experts: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Take the rows that choose any of ``experts``.

        Returns:
            Their indices int64 ``[t]``, the rows ``[t, H]``, weights float32 ``[t, k]``, and ids int32 ``[t, k]``
            with -1 for choices of other experts; all on the host.
        """
        mine = torch.isin(self.ids, torch.tensor(experts, dtype=torch.int32))
        rows = mine.any(dim=1).nonzero()[:, 0]
        ids = torch.where(mine, self.ids, -1)[rows].contiguous()
        there = rows.to(self.hidden.device)
        return (
            rows,
            self.hidden[there].cpu().contiguous(),
            self.weights[there].cpu().contiguous(),
            ids,
        )

    def add(self, rows: Tensor, sums: Tensor) -> None:
        """Take the sums of some rows, any float ``[t, H]``; no rows at all: nothing was computed for them."""
        if len(sums):
            out = self._results()
            out.index_add_(0, rows.to(out.device), sums.to(out.device, torch.float32))

    def place(self, rows: Tensor, results: Tensor, places: Tensor) -> None:
        """Take the result of each choice that was computed for some rows.

        Args:
            rows: int64 ``[t]``, their indices here.
            results: float32 ``[n, H]``.
            places: int64 ``[n, 1]``, among the ``t * k`` choices of these rows.
        """
        at = places[:, 0]
        self._place(rows[at // self.top_k] * self.top_k + at % self.top_k, results)

    def total(self, layer: int) -> Tensor:
        """The weighted sum of each row, float32 ``[T, H]``.

        Raises:
            ExpertUnavailable: some choice has no result.
        """
        if not self.unsummed:
            return self._results()
        wanted = int((self.ids >= 0).sum())
        if self._done != wanted:
            raise ExpertUnavailable(layer, cause="results of some choices are missing")
        return sum_of_choices(self._results(), self.weights.cpu(), self.ids)

    def _place(self, places: Tensor, results: Tensor) -> None:
        self._done += len(places)
        out = self._results()
        out[places.to(out.device)] = results.to(out.device, torch.float32)

    def _results(self) -> Tensor:
        if self._out is None:
            device = torch.device("cpu") if self.unsummed else self.hidden.device
            self._out = torch.zeros(self._shape, device=device)
        return self._out
