"""The planes of a network: what carries frames within a host and between hosts, and the choice between them."""

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
from moesaic.transport.ucx.interfaces import loopback

Transports = Literal["auto", "socket", "tcp", "shm", "ring"]

# Planes, best first. Those of ``RING`` and ``SOCKET`` are not UCX's.
RING, _SHM, _NET, SOCKET = "ring", "shm", "net", "socket"

# Planes whose frames have parcels. Both ends have the same, or tensors travel within frames: a
# dialler offers a plane by name, and a listener that has none of this name chooses among the others.
_PARCELS_SHM, _PARCELS_HOST, _PARCELS_NET = "parcels-shm", "parcels-host", "parcels-net"
PARCELS = (_PARCELS_SHM, _PARCELS_HOST, _PARCELS_NET)
_WITHIN_A_HOST = (RING, _SHM, _PARCELS_SHM, _PARCELS_HOST)
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

    On the plane of rings it is the name of a meeting, on that of sockets nothing, else a UCX address.
    """

    host: str
    addresses: dict[str, bytes]
    weights: Weights | None = None  # none: of any


class PlaneChoice(msgspec.Struct, frozen=True):
    """The plane that the listener has chosen, its UCX address there, if it has one, and the way of frames.

    With ``ring_frames`` UCX carries the parcels alone, and frames go by rings in shared memory.
    """

    plane: str
    address: bytes
    ring_frames: bool = False


def planes_of(
    transports: Transports,
    between: dict[str, str] | None,
    device: torch.device | None = None,
    rings: bool = True,
) -> dict[str, tuple[dict[str, str], bool]]:
    """Give UCX's planes for these transports, best first.

    With a ``device`` there is one for parcels. With transports "auto" it is the network's, within a host
    too: CUDA's transports are none of shared memory's, and a death has to be reported.

    Each plane has a UCX worker of its own. UCX uses shared memory only for endpoints that do not
    report a peer's death. On a network, a broken connection would be fatal without such a report.

    Args:
        transports: see ``UcxNetwork``.
        between: UCX's options between hosts; ``None``: it is used within this host only.
        device: device of tensors that travel as parcels.
        rings: there are rings in shared memory, which need no UCX.

    Returns:
        By the plane's name, UCX's options, and True if it reports a peer's death.
    """
    by_tcp = {"TLS": "tcp", "RNDV_THRESH": _COPY_BELOW}
    by_shm = {"TLS": _SHM_TLS, "MM_SEG_SIZE": _SEGMENT, "RNDV_THRESH": _COPY_ALWAYS}
    planes: dict[str, tuple[dict[str, str], bool]] = {}
    parcels: tuple[str, dict[str, str]] | None = None
    if transports == "shm" or (transports == "auto" and not rings):
        planes[_SHM] = by_shm, False
    if transports == "shm":
        parcels = _PARCELS_SHM, by_shm
    elif transports == "tcp":
        planes[_NET] = by_tcp | (between or loopback()), True
        parcels = _PARCELS_NET, planes[_NET][0]
    elif transports == "auto" and between is not None:
        planes[_NET] = between, True
        parcels = _PARCELS_NET, between
    elif transports == "auto":
        tls = {} if "UCX_TLS" in os.environ else {"TLS": "^shm"}
        parcels = _PARCELS_HOST, tls | loopback()
    if device is None or parcels is None:
        return planes
    name, options = parcels
    chosen = options if device.type == "cpu" else _with_cuda(options)
    return {name: (chosen, name != _PARCELS_SHM)} | planes


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
    # What begins with "^" excludes, and leaves these in.
    tls = options.get("TLS", "^")
    return others if tls.startswith("^") else others | {"TLS": tls + _CUDA_TLS}


def best_first(planes: Collection[str], transports: Transports, meets: bool) -> list[str]:
    """Order UCX's planes of a listener, and its own: rings if it ``meets`` others there, and sockets."""
    with_parcels = [name for name in planes if name in PARCELS]
    others = [name for name in planes if name not in PARCELS]
    sockets = [SOCKET] * (transports in ("auto", "socket"))
    return with_parcels + [RING] * meets + others + sockets


def rings_lead_to(offer: PlaneOffer) -> bool:
    """Tell if a dialler can share memory with this process, and offers rings there."""
    return RING in offer.addresses and offer.host == shared_memory_id()


def choose_plane(offer: PlaneOffer, own: Collection[str]) -> str:
    """Choose the first of this side's planes that the dialler can use as well.

    Raises:
        FrameError: there is none.
    """
    usable = [name for name in own if name in offer.addresses]
    if offer.host != shared_memory_id():
        usable = [name for name in usable if name not in _WITHIN_A_HOST]
    if not usable:
        raise FrameError(
            "addresses",
            f"no common way between {list(own)} and {list(offer.addresses)}",
        )
    return usable[0]
