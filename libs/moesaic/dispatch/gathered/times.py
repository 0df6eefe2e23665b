"""Times of a step's layers, by the host's clock or by that of a device whose kernels run later."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from moesaic.dispatch.gathered.device import DeviceStreams


class Clock(Protocol):
    """Stamps points of a step."""

    def now(self) -> Any:
        """Stamp this point."""
        ...

    def has_come(self, stamp: Any) -> bool:
        """Tell whether the step has come to a stamped point."""
        ...

    def seconds(self, first: Any, last: Any) -> float:
        """Measure the time between two points; waits for both."""
        ...


class HostClock:
    """Stamps of a step that is computed at once."""

    def now(self) -> float:
        """See ``Clock``."""
        return time.perf_counter()

    def has_come(self, stamp: float) -> bool:
        """See ``Clock``."""
        return True

    def seconds(self, first: float, last: float) -> float:
        """See ``Clock``."""
        return last - first


class DeviceClock:
    """Stamps of a step whose kernels run later: events of their stream."""

    def __init__(self, streams: DeviceStreams) -> None:
        """Stamp the stream of kernels."""
        self.now, self.has_come = streams.record_kernels, streams.has_come
        self.seconds = streams.seconds


class LayerTimes:
    """Stamps of a step's layers: when each was entered, and when its experts were there."""

    def __init__(self, clock: Clock, waited: Callable[[int, float], None]) -> None:
        """``waited`` is told each layer's wait in seconds, once it is over."""
        self.now, self._clock, self._waited = clock.now, clock, waited
        self._layers: list[tuple[Any, Any]] = []
        self._untold: deque[tuple[int, Any, Any]] = deque()
        self._whole: list[tuple[Any, Any, Any]] = []  # of the last whole step: and when it was left

    def begin(self) -> None:
        """Begin a step."""
        self._layers = []
        self._tell()

    def at(self, layer: int, entered: Any, ready: Any = None) -> None:
        """Note a layer that waited from ``entered`` to ``ready``; ``None``: it did not wait."""
        self._layers.append((entered, entered if ready is None else ready))
        if ready is not None:
            self._untold.append((layer, entered, ready))
        self._tell()

    def end(self, num_layers: int) -> bool:
        """End the step; false if it was not of ``num_layers``, and its times are forgotten."""
        if len(self._layers) != num_layers:
            return False
        left = [*(entered for entered, _ in self._layers[1:]), self.now()]
        self._whole = [(*stamps, end) for stamps, end in zip(self._layers, left, strict=True)]
        return True

    @property
    def wait_s(self) -> tuple[float, ...]:
        """Waits of the last whole step's layers."""
        return tuple(self._clock.seconds(entered, ready) for entered, ready, _ in self._whole)

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Times of the last whole step's layers without their waits."""
        return tuple(self._clock.seconds(ready, left) for _, ready, left in self._whole)

    def _tell(self) -> None:
        while self._untold and self._clock.has_come(self._untold[0][2]):
            layer, entered, ready = self._untold.popleft()
            self._waited(layer, self._clock.seconds(entered, ready))
