"""The place where the ranks of one machine meet, and the network interface of their sockets.

torch's own store listens on every interface and believes everybody, and gloo and NCCL choose
interfaces by the name of the machine. Here ranks of one machine meet in a file, and their sockets are
on loopback. Ranks on several machines bring a store of their own (``services.attention.rank_store``).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import FileStore, Store  # type: ignore[attr-defined]  # torch's list of names lacks them

from moesaic.addresses import interface_of
from moesaic.errors import UnusableSettings


@contextmanager
def meeting_file() -> Iterator[str]:
    """Make a file for the ranks of this machine, for the length of the block.

    It has no name on any disk and the mode 0600: only processes of this user can open it, and it is
    gone with this process, however that ends.

    Yields:
        Its path, for ``file_store``.
    """
    descriptor = os.memfd_create("moesaic-ranks", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def file_store(path: str, ranks: int) -> Store:
    """Open the file at ``path`` as the store of this many ranks."""
    # torch opens the file once more when the store is freed, and ends a process that cannot. So each
    # process keeps a descriptor of its own, and never closes it.
    own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    return FileStore(f"/proc/self/fd/{own}", ranks)


def stay_on_interface(address: str) -> None:
    """Let this process's gloo and NCCL use no network interface but the one with ``address``.

    Raises:
        UnusableSettings: this machine has no such address.
    """
    interface = interface_of(address)
    if interface is None:
        raise UnusableSettings(
            "tensor_parallel_address", f"leads to {address}, which no interface of this machine has"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    # "=": this name, not all that begin so.
    os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"


def own_address_towards(host: str, port: int) -> str:
    """Find this machine's address on the way to ``host``; nothing is sent.

    Raises:
        OSError: there is no way, or no such name.
    """
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(where)
        found: str = sock.getsockname()[0]
    return found
