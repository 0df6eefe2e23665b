"""The planes of a network: UCX's transports within a host and between hosts, and the choice between them."""

import functools
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import msgspec
import torch

from moesaic.errors import FrameError
from moesaic.messages.registry import Weights

Transports = Literal["auto", "tcp", "shm", "ring"]

RING, _SHM, _NET = "ring", "shm", "net"  # planes, best first

# Planes whose frames have parcels. Both ends have the same, or tensors travel within frames: a
# dialler offers a plane by name, and a listener that has none of this name chooses among the others.
_PARCELS_SHM, _PARCELS_NET = "parcels-shm", "parcels-net"
PARCELS = (_PARCELS_SHM, _PARCELS_NET)
_CUDA_TLS = ",cuda_copy,cuda_ipc"

# Mapped segments only. UCX's "shm" also means cma, which reads the peer's memory by process id: if
# the peer dies in the middle, UCX aborts the reader as well.
_SHM_TLS = "posix,sysv"

# Up to _COPY_BELOW UCX sends at once and copies; beyond it asks the receiver first. The two more
# wake-ups took 50 to 90 us longer for the 16 to 64 KB of a decode step (two processes on two busy
# cores). Through mapped segments UCX copies either way, so there it never asks: 256 KB went and came
# back in 400 instead of 680 us. And a question that a dead peer never answers can neither be
# cancelled nor closed: each death kept its messages, and 7 MB of its memory, for ever.
_COPY_BELOW, _COPY_ALWAYS = "128k", "inf"

# Shared memory passes messages in pieces: 256 of UCX's own 8 KB are soon full, and 16 MB took twice
# as long. A piece's length is stored in 16 bits.
_SEGMENT = "32k"


class PlaneOffer(msgspec.Struct, frozen=True):
    """The dialler's address on each plane, the host whose memory it can share, and its weights.

    On the plane of rings it is the name of a meeting, else a UCX address.
    """

    host: str
    addresses: dict[str, bytes]
    weights: Weights | None = None  # none: of any


class PlaneChoice(msgspec.Struct, frozen=True):
    """The plane that the listener has chosen, and its UCX address there, if it has one."""

    plane: str
    address: bytes


def planes_of(
    transports: Transports, network: dict[str, str], device: torch.device | None = None
) -> dict[str, tuple[dict[str, str], bool]]:
    """Give the planes for these transports, best first; ``network`` holds UCX's options that name one.

    With a ``device`` there is one for parcels. With transports "auto" it is the network's, within a host
    too: CUDA's transports are none of shared memory's, and a death has to be reported.

    Each plane has a UCX worker of its own: UCX uses shared memory only for endpoints that need no
    report of a peer's death, and without one a broken network connection would be fatal.

    Returns:
        By the plane's name, UCX's options, and True if it reports a peer's death.
    """
    planes: dict[str, tuple[dict[str, str], bool]] = {}
    if device is not None:
        name = {"auto": _NET, "tcp": _NET, "shm": _SHM}.get(transports)
        for plain, (options, reports) in planes_of(transports, network).items():
            if plain == name:
                chosen = options if device.type == "cpu" else _with_cuda(options)
                planes[_PARCELS_SHM if plain == _SHM else _PARCELS_NET] = chosen, reports
    if transports in ("auto", "shm"):
        options = {"TLS": _SHM_TLS, "MM_SEG_SIZE": _SEGMENT, "RNDV_THRESH": _COPY_ALWAYS}
        planes[_SHM] = options, False
    if transports == "tcp":
        planes[_NET] = {"TLS": "tcp", "RNDV_THRESH": _COPY_BELOW} | network, True
    if transports == "auto":
        planes[_NET] = network if "UCX_TLS" in os.environ else {"TLS": "^shm"} | network, True
    return planes


@functools.cache
def shared_memory_id() -> str:
    """Name this process's view of memory: the same name for two processes exactly if each can map the other's."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text()]
    parts += [os.readlink(f"/proc/self/ns/{namespace}") for namespace in ("ipc", "pid", "user")]
    parts.append(str(os.stat("/dev/shm").st_dev))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def _with_cuda(options: dict[str, str]) -> dict[str, str]:
    """Add CUDA's transports to options that name others."""
    # Only by asking the receiver first can UCX go from device to device; it knows best from which size on.
    others = {name: value for name, value in options.items() if name != "RNDV_THRESH"}
    tls = options.get("TLS", "^")  # what begins with "^" excludes, and leaves these in
    return others if tls.startswith("^") else others | {"TLS": tls + _CUDA_TLS}


def best_first(planes: Collection[str], meets: bool) -> list[str]:
    """Order the planes of a listener, which ``meets`` others in rings or does not."""
    with_parcels = [name for name in planes if name in PARCELS]
    others = [name for name in planes if name not in PARCELS]
    return with_parcels + [RING] * meets + others


def choose_plane(offer: PlaneOffer, own: Collection[str]) -> str:
    """Choose the first of this side's planes that the dialler can use as well.

    Raises:
        FrameError: there is none.
    """
    usable = [name for name in own if name in offer.addresses]
    if offer.host != shared_memory_id():
        usable = [name for name in usable if name not in (RING, _SHM, _PARCELS_SHM)]
    if not usable:
        raise FrameError(
            "addresses",
            f"no common way between {list(own)} and {list(offer.addresses)}",
        )
    return usable[0]
