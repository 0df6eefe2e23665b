"""One side of a channel, as Python and its C functions see it."""

import ctypes
import fcntl
import mmap
import os
from contextlib import suppress

from moesaic.errors import FrameError
from moesaic.native.library import lib
from moesaic.transport.frame import FrameLimits, Message

CAPACITY = 16 << 20  # bytes each way; memory is taken as far as messages have ever reached
NATIVE_SEQ = 1 << 63  # calls from here on were sent, and are awaited, without Python

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory() -> int:
    """Reserve the memory of one channel.

    Returns:
        Its file descriptor; the size is sealed, so that no other process can take it away.
    """
    memory = os.memfd_create("moesaic-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, lib().channel_bytes(capacity=CAPACITY))
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    return memory


def answers_to_pings(limits: FrameLimits) -> int:
    """Make native answers to pings alone, for ``Channel.answer_by``; ``answers_close`` frees them."""
    return int(
        lib().answers_open(
            max_rows=limits.max_rows,
            max_cols=limits.max_cols,
            max_bytes=limits.max_bytes,
            threads=1,
        )
    )


class Channel:
    """Sends and receives whole messages. Everything happens on the thread of one event loop.

    Attributes:
        c: as the C functions know it.
        descriptor: becomes readable when messages may have come; -1: the bell is rung.
        closed: true once it carries nothing any more.
    """

    def __init__(self, c: int, descriptor: int = -1) -> None:
        """Take over ``c``.

        Raises:
            MemoryError: there is none.
        """
        if not c:
            raise MemoryError("no memory for a channel")
        self.c, self.descriptor, self.closed = c, descriptor, False
        self._kernels = lib()  # that made it, and end it
        self._message = ctypes.c_void_p()

    def __del__(self) -> None:
        if hasattr(self, "_kernels"):
            self._kernels.channel_close(channel=self.c)

    def send(self, message: Message) -> bool:
        """Send a message, or let it wait for room; False if the channel is broken."""
        start = ctypes.c_char.from_buffer(message)
        sent = lib().channel_send(
            channel=self.c, message=ctypes.addressof(start), size=len(message)
        )
        return bool(sent == 0)

    def receive(self) -> Message | None:
        """Take the next message that is Python's; ``None`` if there is none now.

        Raises:
            FrameError: the other side has damaged the channel.
        """
        size = lib().channel_take(channel=self.c, message=ctypes.byref(self._message))
        if size < 0:
            raise FrameError("channel", self._cause())
        if not size:
            return None
        message = bytearray(ctypes.string_at(self._message.value or 0, size))
        lib().channel_taken(channel=self.c)
        return message

    def kept(self) -> list[Message]:
        """Take the messages that came while others were awaited."""
        found = []
        while size := lib().channel_kept(channel=self.c, message=ctypes.byref(self._message)):
            found.append(bytearray(ctypes.string_at(self._message.value or 0, size)))
            lib().channel_forget(channel=self.c)
        return found

    def put_back(self, message: Message) -> None:
        """Keep a message again, for the coroutine that awaits it."""
        start = ctypes.c_char.from_buffer(message)
        lib().channel_hold(channel=self.c, message=ctypes.addressof(start), size=len(message))

    def answer_by(self, answers: int) -> None:
        """Let messages be answered by native ``answers``, as far as these can."""
        lib().channel_answer(channel=self.c, answers=answers)

    @property
    def outstanding(self) -> int:
        """Exchanges whose replies are awaited without Python."""
        return int(lib().channel_outstanding(channel=self.c))

    def sleep(self) -> bool:
        """Have the bell rung from now on; False if there is something to do already."""
        return bool(lib().channel_sleep(channel=self.c))

    def lose(self) -> None:
        """Have all waits return to Python, which knows why."""
        lib().channel_break(channel=self.c)

    def close(self) -> None:
        """End all waits. The memory stays until nobody holds this object."""
        self.closed = True
        lib().channel_break(channel=self.c)

    def _cause(self) -> str:
        excess = lib().channel_excess(channel=self.c)
        return f"a message of {excess} bytes is too long" if excess else "the channel is damaged"


class RingChannel(Channel):
    """A channel in memory that both sides map."""

    def __init__(self, memory: int, side: int, bell: int, control: int, max_bytes: int) -> None:
        """Map the memory; the file descriptors stay the caller's, but for ``bell``.

        Args:
            memory: file descriptor, from ``make_memory`` of either side.
            side: 0 for the side that made the memory, 1 for the other.
            bell: the other side's, which is closed with this object.
            control: becomes readable when the peer is gone.
            max_bytes: a longer message breaks the channel.

        Raises:
            FrameError: the memory is no channel's.
        """
        self._bell = bell
        size = lib().channel_bytes(capacity=CAPACITY)
        if os.fstat(memory).st_size != size or not _is_sealed(memory):
            raise FrameError("memory", "is not a channel: its size is wrong, or it is not sealed")
        self._memory = mmap.mmap(memory, size)
        self._start = ctypes.c_char.from_buffer(self._memory)
        super().__init__(
            lib().channel_open(
                memory=ctypes.addressof(self._start),
                capacity=CAPACITY,
                side=side,
                bell=bell,
                control=control,
                most=max_bytes,
            )
        )

    def close(self) -> None:
        """See ``Channel.close``. The memory is given back now, even if this object lives on."""
        super().close()
        with suppress(OSError):
            self._memory.madvise(mmap.MADV_REMOVE)

    def __del__(self) -> None:
        super().__del__()
        if hasattr(self, "_bell"):
            os.close(self._bell)


def _is_sealed(memory: int) -> bool:
    try:
        return fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # it is another kind of file
        return False
