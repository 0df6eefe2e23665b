"""Experts of a layer by one kind of id: the model's own, and the united ones of every way.

In memory and on its way between workers an expert has a *weights id* (``Substitution.weights_id``), which means the
same under every placement. A placement numbers only what its own substitution needs: ``E`` experts, and the united ones
behind them.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import structlog
import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.kernels.promised import LayerSubstitution
from moesaic.messages.substitution import Substitution
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.models.weights.experts import ExpertWeights, expert_bytes, load_expert
from moesaic.models.weights.united import UnitedExperts, find_united

log = structlog.get_logger()


SubstitutionOf = Callable[[int, Substitution, Tensor | None, Tensor | None], LayerSubstitution]
"""See ``LogicalExperts.layer_substitution``."""


class LogicalExperts:
    """Reads experts of either kind from a checkpoint and from the files beside it."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        """Read no weights yet."""
        self._checkpoint, self._config = checkpoint, config

    @cached_property
    def _files(self) -> dict[int, UnitedExperts]:
        """Files of united experts by way; looked for when they are first needed."""
        return find_united(self._checkpoint.directory, self._config)

    @property
    def digests(self) -> dict[int, str]:
        """Digests of the united experts that were distilled, by way. Of files that are damaged, none.

        Faults of a file are reported when it is needed.
        """
        try:
            return {way: file.digest for way, file in self._files.items()}
        except CheckpointError as error:
            log.error("united.refused", cause=str(error))
            return {}

    def read(
        self,
        layer: int,
        weights_id: int,
        dtype: torch.dtype | None,
        device: torch.device,
        *,
        lent: bool = False,
    ) -> ExpertWeights:
        """Read one expert; without ``dtype`` as it is stored. It may be ``lent``, see ``load_expert``.

        A united one that was not distilled is the mean of its group.

        Raises:
            CheckpointError: a tensor is missing, mis-shaped or cannot be read.
        """
        way, group = divmod(weights_id, self._config.moe.num_experts)
        if not way:
            return load_expert(
                self._checkpoint, self._config, layer, group, dtype, device, lent=lent
            )
        dtype = dtype or torch.float32
        if (file := self._files.get(way)) is not None:
            return self._in_place(file.read(layer, group, dtype, device), device)
        # Once for each way.
        if layer == self._config.moe_layers[0] and not group:
            log.warning("united.not_distilled", way=way, instead="the mean of each group")
        return self._in_place(self._mean(layer, way, group, dtype, device), device)

    def _in_place(self, united: ExpertWeights, device: torch.device) -> ExpertWeights:
        """Bring a united expert into the form of those that it stands in for."""
        weight_format = self._config.weight_format
        coded = weight_format is not None and device.type == "cpu"
        return united.rounded(weight_format.held) if coded and weight_format else united

    def stored_bytes(self, layer: int, weights_id: int) -> int:
        """Bytes of one expert in files, for progress; of a united one those of an own one."""
        expert = weights_id % self._config.moe.num_experts
        return expert_bytes(self._checkpoint, self._config, layer, expert)

    def layer_substitution(
        self,
        layer: int,
        substitution: Substitution,
        lost: Tensor | None = None,
        homes: Tensor | None = None,
    ) -> LayerSubstitution:
        """Describe how choices of a layer are degraded.

        Args:
            layer: the decoder layer.
            substitution: the way to degrade.
            lost: bool ``[E]``, experts that nobody can serve; None: there are none.
            homes: int ``[E]``, the worker that has each expert; None: one process has all.
        """
        apart = None
        if substitution.rule == "instances" and homes is not None:
            # There may be more workers.
            apart = torch.unique(homes, return_inverse=True)[1].int()
        return LayerSubstitution(self._config.moe.num_experts, substitution, lost, apart)

    def _mean(
        self, layer: int, way: int, group: int, dtype: torch.dtype, device: torch.device
    ) -> ExpertWeights:
        first, config = group * way, self._config
        experts = range(first, min(first + way, config.moe.num_experts))
        read = [
            load_expert(self._checkpoint, config, layer, e, torch.float32, device) for e in experts
        ]

        def mean(tensors: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(tensors)).mean(dim=0).to(dtype)

        both = zip(*(each.numbers(torch.float32) for each in read), strict=True)
        gate_up, down = map(mean, both)
        biases = [each.biases for each in read if each.biases is not None]
        mean_biases = (mean(a for a, _ in biases), mean(b for _, b in biases)) if biases else None
        return ExpertWeights(gate_up, down, mean_biases)
