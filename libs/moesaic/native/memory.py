"""Memory for weights, which a step reads once: in huge pages where the system has them.

A step of few rows computes next to nothing, so it takes as long as reading does. With pages of 4 KB
a large part of that time goes to looking up page addresses. PyTorch puts tensors of less than 2 MB
among short-lived ones, where no huge page fits. Here weights lie side by side, and their memory is
reused once it is free.
"""

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
SLAB_BYTES = (
    16 << 20
)  # asked of the system at a time; a tensor of more than half has memory of its own
SMALL_BYTES = 16 << 10  # smaller tensors stay with torch
_ALIGNED = 64


@dataclass(eq=False)
class _Slab:
    memory: mmap.mmap
    next: int  # the first address that was never handed out
    end: int
    used: int = 0  # parts that are handed out

    def give_back(self, begin: int, end: int) -> None:
        """Have the system take the whole pages between two addresses; they are zeros when they are used again."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        first = -(-(begin - start) // mmap.PAGESIZE) * mmap.PAGESIZE
        num_pages = (end - start - first) // mmap.PAGESIZE
        if num_pages > 0:
            self.memory.madvise(mmap.MADV_DONTNEED, first, num_pages * mmap.PAGESIZE)


class HugePages:
    """Hands out parts of slabs. Any thread may ask, and let go."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: list[_Slab] = []
        self._returned: dict[int, list[tuple[_Slab, int]]] = {}  # parts of slabs, by size
        self._ended: deque[tuple[_Slab, int, int]] = deque()  # parts to take back

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros of ``shape``, in memory that is theirs as long as there is any view of them."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES:
            return torch.zeros(shape, dtype=dtype)
        if num_bytes > SLAB_BYTES // 2:
            memory, offset = _mapped(num_bytes)
            count = num_bytes // dtype.itemsize
            return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
        size = -(-num_bytes // _ALIGNED) * _ALIGNED
        slab, address = self._take(size)
        # The storage of the tensor holds the buffer, which so ends with its last view.
        buffer = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(buffer, self._give_back, slab, address, size).atexit = False
        return torch.frombuffer(buffer, dtype=dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        with self._lock:
            self._take_back()
            return sum(len(slab.memory) for slab in self._slabs)

    def trim(self) -> None:
        """Give back what nobody uses of slabs: what lies around it may lose its huge pages."""
        with self._lock:
            self._take_back()
            for size, parts in self._returned.items():
                for slab, address in parts:
                    slab.give_back(address, address + size)
            for slab in self._slabs:
                slab.give_back(slab.next, slab.end)

    def _take(self, size: int) -> tuple[_Slab, int]:
        with self._lock:
            self._take_back()
            if returned := self._returned.get(size):
                slab, address = returned.pop()
                ctypes.memset(address, 0, size)
            else:
                slab = self._with_room(size)
                address, slab.next = slab.next, slab.next + size
            slab.used += 1
        return slab, address

    def _with_room(self, size: int) -> _Slab:
        if not self._slabs or self._slabs[-1].end - self._slabs[-1].next < size:
            memory, offset = _mapped(SLAB_BYTES)
            begin = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset
            self._slabs.append(_Slab(memory, begin, begin + SLAB_BYTES))
        return self._slabs[-1]

    def _give_back(self, slab: _Slab, address: int, size: int) -> None:
        self._ended.append((slab, address, size))
        # Whoever has the lock may be this very thread, which the garbage collector has interrupted.
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        while self._ended:
            slab, address, size = self._ended.popleft()
            slab.used -= 1
            self._returned.setdefault(size, []).append((slab, address))
            # To the system with it.
            if not slab.used:
                self._slabs.remove(slab)
                for parts in self._returned.values():
                    parts[:] = [part for part in parts if part[0] is not slab]


def _mapped(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Map zeros, and find the offset in them at which ``num_bytes`` begin at a huge page."""
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % HUGE_PAGE_BYTES


huge_pages = HugePages()


def reusable(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor of any content that will not last, of memory that the next one like it gets again.

    PyTorch asks for aligned memory. The C library of many systems (glibc before 2.38) never reuses
    its holes for tensors of the same size. So a heap that loads experts grew by half of their size.
    """
    memory = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(torch.Size(shape))
