"""Layer requests that are answered without Python: the same answers as ``LayerAnswers`` gives.

A plain request that Python has answered once is registered, with its epoch, layer and basis. From
then on such requests are answered by C functions as they come. All others still come to Python.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.decoder_step import RoutedExpertsKernel
from moesaic.native.library import lib
from moesaic.native.structs import AnswerableArgs, AnswerTally
from moesaic.transport.frame import FrameLimits

_LOG_HEAD = 7  # numbers before the ids of a batch
_MOST_SAMPLES, _SAMPLE = 256, 3  # batches, numbers of each
MAX_REGISTERED = 4096  # of an epoch: one per layer and set of live workers


class AnswersWithoutPython:
    """Registered answers of one worker. Any thread may call.

    Attributes:
        c: C functions for the channels of the requests.
    """

    def __init__(self, limits: FrameLimits) -> None:
        """Answer requests within ``limits``; nothing is registered yet."""
        self.c: int = lib().answers_open(
            max_rows=limits.max_rows,
            max_cols=limits.max_cols,
            max_bytes=limits.max_bytes,
            threads=torch.get_num_threads(),
        )
        self._kept: dict[int, list[Any]] = {}  # by epoch: memory that registered answers point to
        self._keys: dict[int, set[tuple[int, bytes]]] = {}  # by epoch: layers and bases
        self._log = np.empty(lib().answers_log_size(), np.int32)
        self._samples = np.empty((_MOST_SAMPLES, _SAMPLE), np.int64)
        self._changing = threading.Lock()  # may be held for as long as a request is computed
        self._reading = threading.Lock()  # of the log

    def register(
        self,
        epoch: int,
        layer: int,
        basis: Tensor,
        kernel: RoutedExpertsKernel,
        decision: dict[str, Any],
        still: Callable[[], bool],
    ) -> None:
        """Answer such requests from now on.

        Args:
            epoch: epoch of the placement.
            layer: the decoder layer.
            basis: int64 ``[1, n]``, encoded; a second row, of loads, may differ.
            kernel: the gate, and the slots of this worker.
            decision: fields of ``AnswerableArgs`` by name; tensors stand for their addresses.
            still: true if the epoch is answered at all; asked once nobody can drop it unseen.
        """
        first = basis[0].clone()
        key = layer, first.numpy().tobytes()
        with self._changing:
            known = self._keys.setdefault(epoch, set())
            if key in known or len(known) >= MAX_REGISTERED or not still():
                return
            tensors = {name: each for name, each in decision.items() if isinstance(each, Tensor)}
            numbers = {name: each for name, each in decision.items() if name not in tensors}
            addresses = {name: each.data_ptr() for name, each in tensors.items()}
            answerable = AnswerableArgs(
                epoch=epoch,
                layer=layer,
                basis=first.data_ptr(),
                basis_size=len(first),
                moe=kernel.c,
                **addresses,
                **numbers,
            )
            self._keys[epoch].add(key)
            self._kept.setdefault(epoch, []).append((first, kernel, tensors))
            lib().answers_add(answers=self.c, found=answerable)

    def keep(self, epochs: set[int]) -> None:
        """Answer for no other epochs any more. A request that is being answered is waited for."""
        with self._changing:
            for epoch in self._keys.keys() - epochs:
                lib().answers_drop(answers=self.c, epoch=epoch)
                del self._keys[epoch]
                self._kept.pop(epoch, None)

    def asked_s(self, epoch: int) -> float:
        """Monotonic time at which a step last asked for an epoch; 0 if none did."""
        return float(lib().answers_asked(answers=self.c, epoch=epoch)) * 1e-9

    def take_tally(self) -> AnswerTally:
        """Take the counts since the last call."""
        tally = AnswerTally()
        lib().answers_tally(answers=self.c, taken=tally)
        return tally

    def take_samples(self) -> list[tuple[int, int, float]]:
        """Take the last batches that were computed here since the last call, 256 at most.

        Returns:
            Experts activated here, their choices, and the seconds that computing them took.
        """
        with self._reading:
            count = lib().answers_samples(answers=self.c, taken=self._samples.ctypes.data)
            found = self._samples[:count].tolist()
        return [(experts, choices, took_ns * 1e-9) for experts, choices, took_ns in found]

    def take_batches(self) -> list[tuple[int, int, int, int, Tensor]]:
        """Take the batches that this worker counts.

        Returns:
            Epoch, layer, code of the policy, experts of the busiest worker, and ids int32 ``[T, k]``.
        """
        with self._reading:
            log = self._log
            end = lib().answers_log(answers=self.c, taken=log.ctypes.data)
            batches, at = [], 0
            while at < end:
                low, high, layer, code, rows, top_k, busiest = log[at : at + _LOG_HEAD].tolist()
                at += _LOG_HEAD
                ids = torch.from_numpy(log[at : at + rows * top_k].copy()).view(rows, top_k)
                at += rows * top_k
                epoch = (low & 0xFFFFFFFF) | high << 32
                batches.append((epoch, layer, code, busiest, ids))
            return batches
