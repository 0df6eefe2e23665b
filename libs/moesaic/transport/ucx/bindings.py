"""The part of UCX that Moesaic uses; the only module that imports UCX's bindings.

Workers that know each other's addresses send tagged messages. An idle worker is armed, and its file
descriptor wakes the event loop.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

os.environ.setdefault("UCX_LOG_LEVEL", "error")  # UCX reads it when its library is loaded

from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from moesaic.transport.device_memory import DeviceMemory
from moesaic.transport.frame import Message
from moesaic.transport.rings.channel import Channel
from moesaic.transport.rings.plane import RingPlane
from moesaic.transport.ucx.channel import UcxChannel, UcxPlane
from moesaic.transport.ucx.parcels import PARCEL, UcxParcels, connection_of

log = structlog.get_logger()

UCXError = libucxx.UCXError

_ANY_TAG = libucxx.UCXXTag(0)
_ANY_MASK = libucxx.UCXXTagMask(0)
_PARCEL_TAG, _PARCEL_MASK = libucxx.UCXXTag(PARCEL), libucxx.UCXXTagMask(PARCEL)
_ROUNDS = 32  # of progress before other tasks of the event loop get their turn
_CLOSE_S = 0.5  # for peers to take what was sent, at the end
_STUCK_S = 2.0  # for a peer to take what was sent before its connection was closed
_DRAIN_S, _DRAIN_EVERY_S = 10.0, 0.002  # of a worker that was replaced

# Bindings of destroyed objects, and of memory that hung peers may still use: freeing one would
# destroy it again, or wait for ever. Never freed, not even at the end of the process.
_abandoned: list[Any] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_abandoned))


@dataclass(slots=True)
class _Transfer:
    """A transfer in progress: UCX uses ``memory`` until ``request`` is completed."""

    request: Any
    memory: Any  # a message, or the memory of a tensor
    finish: Callable[[str | None], None]  # takes the error, if any


class UcxWorker:
    """One UCX context and worker, driven by the running event loop."""

    def __init__(
        self,
        options: dict[str, str],
        reports_failure: bool,
        max_bytes: int,
        on_stuck: Callable[[], None] = lambda: None,
        channels: RingPlane | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """Open the transports.

        Args:
            options: UCX's settings, without the prefix UCX_; they win over the environment's.
            reports_failure: use only transports that report a dead peer (in UCX 1.21 shared memory does not).
            max_bytes: a longer message ends its connection unread.
            on_stuck: called once when the peer of a closed connection does not take its messages.
                Where death is not reported UCX can neither cancel them nor sleep: replace and retire
                the worker.
            channels: channels of this event loop, if C functions shall send and receive.
            memory: for parcels, if there shall be any. Then Python sends and receives, as on machines
                without C functions: these know no parcels, and each process has a GPU to wait for.

        Raises:
            UCXError: this machine offers none of the transports, or none for this memory.
        """
        features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        self._context = libucxx.UCXContext(options, features)
        if memory is not None and memory.device.type == "cuda" and not self._context.cuda_support:
            raise UCXError("no transport for CUDA memory")
        self._worker = libucxx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._reports_failure, self._max_bytes = reports_failure, max_bytes
        self._on_stuck: Callable[[], None] | None = on_stuck
        self.address: bytes = self._worker.address.tobytes()
        self._endpoints: dict[int, UcxEndpoint] = {}  # by the tag they receive
        self._transfers: list[_Transfer] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._worker.epoll_file_descriptor, self._progress)
        self._stopped = self._destroyed = False
        # By ``connection_of`` tags
        self._memory, self._parcels = memory, dict[int, UcxParcels]()
        self._channels, self._plane = channels, None
        if channels is not None and memory is None:
            self._plane = UcxPlane.of(
                self._worker.handle, self._worker.epoll_file_descriptor, max_bytes
            )
        self._wakeup: asyncio.Handle | None = self._loop.call_soon(self._progress)

    def connect(
        self,
        address: bytes,
        tags: tuple[int, int],
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
        control: int = -1,
        frames: Channel | None = None,
    ) -> "UcxEndpoint":
        """Open a connection to the worker at ``address``, which uses the same ``tags`` (to send, to receive) reversed.

        ``control`` becomes readable when the peer is gone. ``frames`` carries messages in place of UCX, which then has
        parcels only.

        Raises:
            UCXError: no transport leads there, it is no address, or the tags are in use.
        """
        connection = connection_of(tags[1])
        if connection in self._parcels:
            raise UCXError("another connection drew the same tags")
        far = libucxx.UCXAddress.create_from_buffer(address)
        handle = self._worker.create_endpoint_from_worker_address(far, self._reports_failure)
        endpoint = UcxEndpoint(self, handle, tags, on_message, on_lost)
        self._endpoints[tags[1]] = endpoint
        if self._plane is not None and self._channels is not None:
            endpoint.channel = UcxChannel(self._plane, handle.handle, tags, control)
            self._channels.add(endpoint.channel, on_message, endpoint.lose)
        elif frames is not None and self._channels is not None:
            endpoint.channel = frames
            self._channels.add(frames, on_message, endpoint.lose)
        if self._memory is not None:
            endpoint.parcels = UcxParcels(endpoint, self, tags, self._memory)
            self._parcels[connection] = endpoint.parcels
        self.wake()
        return endpoint

    def remove(self, channel: Channel) -> None:
        """Receive no more of its messages."""
        if self._channels is not None:
            self._channels.remove(channel)

    def wake(self) -> None:
        """Let UCX progress in the next turn of the event loop."""
        if self._wakeup is None and not self._stopped:
            self._wakeup = self._loop.call_soon(self._progress)

    def track(self, request: Any, memory: Any, finish: Callable[[str | None], None]) -> None:
        """Keep ``memory`` until ``request`` is completed, then call ``finish`` with its error, if any."""
        self._transfers.append(_Transfer(request, memory, finish))
        self.wake()

    def receive(self, found: Any, memory: Any, finish: Callable[[str | None], None]) -> None:
        """Receive a message that was probed and taken out of the queue."""
        request = self._worker.tag_recv_with_handle(Array(memory), found)
        self.track(request, memory, finish)

    def drop(self, found: Any) -> None:
        """Be rid of a message that was taken out of the queue."""
        self.receive(found, bytearray(1), _ignore)

    def closing(self, receive_tag: int, request: Any | None) -> None:
        """Drop messages with this tag from now on; ``request`` is the end of its endpoint, if it must be awaited."""
        self._endpoints.pop(receive_tag, None)
        self._parcels.pop(connection_of(receive_tag), None)
        if request is not None:
            self.track(request, None, _ignore)
            self._loop.call_later(_STUCK_S, self._check_closed, request)

    async def close(self) -> None:
        """Close all endpoints, then the worker; wait a little for peers that still receive."""
        for endpoint in list(self._endpoints.values()):
            endpoint.close()
        give_up_at = self._loop.time() + _CLOSE_S
        while self._transfers and self._loop.time() < give_up_at:
            self.wake()
            await asyncio.sleep(0.001)
        self._stop()
        if self._plane is not None:
            self._plane.close()
        if self._transfers:
            _abandoned.append((self._context, self._worker, self._transfers))
        del self._worker, self._context

    def retire(self, cause: str) -> None:
        """Lose all connections; free UCX's resources a while later, or with ``destroy``.

        Until then messages that peers have begun to send are received and dropped. Otherwise each of
        those peers would have to replace its worker as well, and then its own peers theirs.
        """
        self._stop()
        for endpoint in list(self._endpoints.values()):
            endpoint.lose(cause)
        self._loop.call_later(_DRAIN_EVERY_S, self._drain, self._loop.time() + _DRAIN_S)

    def _drain(self, give_up_at: float) -> None:
        if self._destroyed:
            return
        for _ in range(_ROUNDS):
            if not self._move():
                break
        self._finish()
        if self._loop.time() < give_up_at:
            self._loop.call_later(_DRAIN_EVERY_S, self._drain, give_up_at)
        else:
            self.destroy()

    def destroy(self) -> None:
        """Free UCX's resources, which takes 0.1 s, after ``retire``; calling it again changes nothing."""
        if self._destroyed:
            return
        self._destroyed = True
        # The bindings' own destructors would wait for the transfers, which hold the worker.
        endpoints, self._endpoints = list(self._endpoints.values()), {}
        transfers, self._transfers = self._transfers, []
        held = [endpoint.orphan() for endpoint in endpoints]
        held += [transfer.request for transfer in transfers]
        if self._plane is not None:
            self._plane.close()
        _abandoned.append((self._context, self._worker, held))
        # Loaded already
        ucp = ctypes.CDLL("libucp.so.0")
        ucp.ucp_worker_destroy(ctypes.c_void_p(self._worker.handle))
        ucp.ucp_cleanup(ctypes.c_void_p(self._context.handle))
        os.close(self._worker.epoll_file_descriptor)
        del self._worker, self._context

    def _stop(self) -> None:
        """Detach the worker from the event loop."""
        self._on_stuck = None
        self._loop.remove_reader(self._worker.epoll_file_descriptor)
        if self._wakeup:
            self._wakeup.cancel()
        self._stopped = True

    def _check_closed(self, request: Any) -> None:
        self.wake()
        if self._on_stuck and not request.completed:
            on_stuck, self._on_stuck = self._on_stuck, None
            on_stuck()

    def _progress(self) -> None:
        """Progress as long as messages move, then arm; the file descriptor or ``wake`` calls this again."""
        # The file descriptor was faster: two turns would each ask for the next.
        if self._wakeup:
            self._wakeup.cancel()
        self._wakeup = None
        for _ in range(_ROUNDS):
            moved = self._move()
            self._finish()
            if moved:
                continue
            # Else something has come since.
            if self._worker.arm():
                return
        self.wake()

    def _move(self) -> bool:
        if self._plane is None or self._channels is None:
            moved = bool(self._worker.progress_once())
            self._probe()
            return moved
        moved = self._plane.progress()
        if moved:
            self._channels.look()
        return moved

    def _probe(self) -> None:
        """Start to receive the messages that have arrived."""
        mask = _ANY_MASK if self._memory is None else _PARCEL_MASK
        while (found := self._worker.tag_probe(_ANY_TAG, mask)).matched:
            endpoint = self._endpoints.get(found.sender_tag.value)
            if endpoint and found.length > self._max_bytes:
                endpoint.lose(f"a message of {found.length} bytes exceeds {self._max_bytes}")
                endpoint = None
            # One byte suffices to be rid of a message: UCX drops what does not fit.
            memory = bytearray(found.length if endpoint else 1)
            request = self._worker.tag_recv(Array(memory), found.sender_tag)
            finish = partial(endpoint.received, memory) if endpoint else _ignore
            self._transfers.append(_Transfer(request, memory, finish))
        if self._memory is None:
            return
        while (found := self._worker.tag_probe(_PARCEL_TAG, _PARCEL_MASK, True)).matched:
            parcels = self._parcels.get(connection_of(found.sender_tag.value))
            parcels.arrived(found) if parcels else self.drop(found)

    def _finish(self) -> None:
        # Finishing one may start another.
        transfers, self._transfers = self._transfers, []
        for transfer in transfers:
            if not transfer.request.completed:
                self._transfers.append(transfer)
                continue
            try:
                transfer.finish(_error_of(transfer.request))
            except Exception:  # one receiver's fault must not stop the others
                log.exception("message.failed")


class UcxEndpoint:
    """One connection. Reports in later turns of the event loop, and never after ``close``.

    Attributes:
        channel: carries its messages, if C functions do.
        parcels: carries tensors apart from their frames, if both sides can.
    """

    def __init__(
        self,
        worker: UcxWorker,
        handle: Any,
        tags: tuple[int, int],
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._worker, self._handle, self._receive_tag = worker, handle, tags[1]
        self._send_tag = tags[0]
        self._on_message, self._on_lost = on_message, on_lost
        self._open = True
        self.channel: Channel | None = None
        self.parcels: UcxParcels | None = None
        handle.set_close_callback(self.lose, ("the connection broke",))

    def send(self, message: Message) -> None:
        """Start sending; the memory belongs to UCX until the end."""
        if not self._open:
            return
        if self.channel is not None:
            if not self.channel.send(message):
                self.lose("cannot send")
            return
        self.start(message, self._send_tag)

    def start(self, memory: Any, tag: int) -> None:
        """Start sending by UCX itself; the memory belongs to UCX until the end."""
        if not self._open:
            return
        try:
            request = self._handle.tag_send(Array(memory), libucxx.UCXXTag(tag))
        except UCXError as error:
            self.lose(f"cannot send: {error}")
            return
        self._worker.track(request, memory, self._sent)

    def close(self) -> None:
        """Abort messages in flight, both ways; calling it again changes nothing."""
        if not self._open:
            return
        self._detach(drop=True)
        # UCX has closed a broken one itself, and closing it twice crashes.
        request = self._handle.close() if self._handle.alive else None
        self._worker.closing(self._receive_tag, request)

    def orphan(self) -> Any:
        """Note the end of a worker that is being destroyed.

        Returns:
            The binding, which must not be freed.
        """
        if self._open:
            self._detach(drop=False)
            asyncio.get_running_loop().call_soon(self._on_lost, "the network is closed")
        return self._handle

    def received(self, message: Message, error: str | None) -> None:
        """Note the end of a receive."""
        if error:
            self.lose(f"cannot receive: {error}")
        elif self._open:
            self._on_message(message)

    def lose(self, cause: str) -> None:
        """Report the end of the connection, in a later turn of the event loop."""
        asyncio.get_running_loop().call_soon(self._report, cause)
        if self.channel is not None and self._open:
            # A loop that sleeps in a C function would not look.
            self.channel.lose()

    def _detach(self, *, drop: bool) -> None:
        self._open = False
        if self.channel is not None:
            self._worker.remove(self.channel)
        if self.parcels is not None:
            self.parcels.close(drop=drop)
        self._handle.remove_close_callback()

    def _report(self, cause: str) -> None:
        if self._open:
            self.close()
            self._on_lost(cause)

    def _sent(self, error: str | None) -> None:
        if error:
            self.lose(f"cannot send: {error}")


def _ignore(error: str | None) -> None:
    """Note the end of a transfer without a waiter."""


def _error_of(request: Any) -> str | None:
    try:
        request.check_error()
    except UCXError as error:
        return str(error)
    return None
