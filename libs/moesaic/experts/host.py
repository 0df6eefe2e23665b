"""Everything that an expert worker has: its gates, its share of the experts, and their epochs."""

import time
from collections.abc import Iterable

import torch

from moesaic.experts.activations import ActivationMeter
from moesaic.experts.answering import LayerAnswers
from moesaic.experts.costs import ExpertBatch
from moesaic.experts.epochs import Epochs
from moesaic.experts.loaded import ExpertFiles
from moesaic.experts.preparing.kept import KeptExperts
from moesaic.experts.preparing.loading import PlacementLoader
from moesaic.experts.warm_up import WarmUp
from moesaic.experts.without_python import AnswersWithoutPython
from moesaic.kernels.held_bytes import Quantization
from moesaic.messages.performance import LoadReport
from moesaic.models.configuration.config import ModelConfig
from moesaic.models.layers.gate import load_gates
from moesaic.models.weights.checkpoint import Checkpoint
from moesaic.transport.frame import FrameLimits


class ExpertHost:
    """The parts of one worker, which share its epochs.

    Attributes:
        loader: prepares placements, on any one thread at a time.
        answers: answers layer requests, on the engine thread.
        warm_up: computes batches before the first request.
        files: the checkpoint's experts.
        epochs: that are prepared, in force, or lately followed by another.
        activations: counts of what batches activate.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        worker_id: str,
        slots_per_layer: int,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization = "none",
        max_expert_bytes: int = 0,
        retire_after_s: float | None = None,
    ) -> None:
        """Read the gates; experts come with the first placement.

        With ``max_expert_bytes``, a placement is refused that would need more memory for experts,
        those of the placement before it included. ``retire_after_s``: see ``Epochs``.
        """
        self._reported_s = time.monotonic()
        self.files = ExpertFiles(checkpoint, config, dtype, device, quantization)
        self.epochs = Epochs(worker_id, retire_after_s)
        self.activations = ActivationMeter(config.moe.num_experts)
        gates = load_gates(checkpoint, config, dtype, device)
        substitution_of = self.files.experts.layer_substitution
        self.answers = LayerAnswers(
            self.epochs, gates, config, dtype, device, self.activations, substitution_of
        )
        self.warm_up = WarmUp(
            gates, config, slots_per_layer, dtype, device, quantization, substitution_of
        )
        self._kept = KeptExperts(lambda expert: self.epochs.note_alive(expert.mlp))
        self.loader = PlacementLoader(
            self.epochs,
            self.files,
            config.digest,
            worker_id,
            slots_per_layer,
            max_expert_bytes,
            self._kept,
        )
        # A CPU has nothing to compile.
        if device.type != "cpu":
            self.loader.on_loaded = self.warm_up.degrade

    @property
    def slots_per_layer(self) -> int:
        """Most slots of a layer that a placement may use here."""
        return self.loader.slots_per_layer

    def answer_without_python(self, limits: FrameLimits) -> AnswersWithoutPython:
        """Register answers from now on, for channels of frames within ``limits``."""
        answers = AnswersWithoutPython(limits)
        self.epochs.asked_elsewhere_s, self.epochs.on_change = answers.asked_s, answers.keep
        self.activations.count_also(answers.take_batches)
        self.answers.without_python = answers
        return answers

    def know_costs(self, batches: Iterable[ExpertBatch]) -> None:
        """Record batches that were measured before the first request."""
        for batch in batches:
            self.answers.costs.note(batch)

    def take_report(self) -> LoadReport:
        """Report the costs, over the time since the last call."""
        now_s = time.monotonic()
        window_s, self._reported_s = now_s - self._reported_s, now_s
        costs = self.answers.costs.take(self.answers.without_python)
        return LoadReport(window_s=window_s, costs=costs)

    def retire(self) -> None:
        """Free what nobody needs any more: see ``Epochs.retire`` and ``KeptExperts.expire``."""
        self.epochs.retire()
        self._kept.expire()
