"""The plane that parcels travel by."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moesaic.transport.contract import Handler
from moesaic.transport.ucx import network as network_module
from moesaic.transport.ucx import planes
from moesaic.transport.ucx.bindings import UCXError, UcxWorker
from moesaic.transport.ucx.network import UcxNetwork
from moesaic.transport.ucx.planes import (
    RING,
    SOCKET,
    PlaneOffer,
    best_first,
    choose_plane,
    planes_of,
    shared_memory_id,
)
from tests.transport.conftest import LIMITS, SECRET
from tests.transport.linked import HANG_S

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BETWEEN = {"NET_DEVICES": "mlx5_0:1"}  # UCX's options between hosts
OTHERS = {"auto": ["net"], "tcp": ["net"], "shm": ["shm"], "ring": [], "socket": []}
FIRST = {"auto": ["parcels-net"], "tcp": ["parcels-net"], "shm": ["parcels-shm"]}


@pytest.mark.parametrize("transports", list(OTHERS))
def test_it_is_the_first_where_there_is_a_device(transports: Any) -> None:
    first = FIRST.get(transports, [])
    assert list(planes_of(transports, BETWEEN)) == OTHERS[transports]
    assert list(planes_of(transports, BETWEEN, CPU)) == first + OTHERS[transports]


def test_without_a_network_for_ucx_it_stays_on_the_loopback_of_its_host() -> None:
    ((name, (options, reports)),) = planes_of("auto", None, CPU).items()
    offer = PlaneOffer("another host", {name: b"", SOCKET: b""})

    assert options == {"TLS": "^shm", "NET_DEVICES": "lo"}
    assert reports
    assert choose_plane(offer, best_first([name], "auto", True)) == SOCKET
    assert choose_plane(PlaneOffer(shared_memory_id(), offer.addresses), [name, SOCKET]) == name


def test_ucx_is_not_opened_where_rings_and_sockets_suffice() -> None:
    assert planes_of("auto", None) == {}
    assert list(planes_of("auto", None, rings=False)) == ["shm"]


def test_it_has_the_transports_of_cuda_for_memory_of_a_gpu() -> None:
    (by_tcp, reports), (by_shm, _) = (
        next(iter(planes_of(name, None, CUDA).values()))
        for name in ("tcp", "shm")  # type: ignore[arg-type]
    )

    assert by_tcp["TLS"] == "tcp,cuda_copy,cuda_ipc"
    assert by_shm["TLS"] == "posix,sysv,cuda_copy,cuda_ipc"
    assert reports
    assert not {"RNDV_THRESH"} & (by_tcp.keys() | by_shm.keys())


def test_it_is_chosen_before_rings_by_who_has_it() -> None:
    offered = {"parcels-net": b"", RING: b"", "net": b""}
    offer = PlaneOffer(shared_memory_id(), offered)

    assert (
        choose_plane(offer, best_first(planes_of("auto", BETWEEN, CPU), "auto", True))
        == "parcels-net"
    )
    assert choose_plane(offer, best_first(planes_of("auto", BETWEEN), "auto", True)) == RING


def test_shared_memory_carries_none_between_hosts() -> None:
    offer = PlaneOffer("another host", {"parcels-shm": b"", "net": b""})

    assert choose_plane(offer, ["parcels-shm", "net"]) == "net"


@pytest.mark.parametrize("tls", ["tcp", "posix,sysv"])
async def test_there_is_none_for_a_gpu_where_ucx_is_told_to_leave_cuda_out(
    tls: str, echo: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = UcxNetwork("far", "expert", SECRET, LIMITS, "tcp", device=CPU)
    monkeypatch.setenv("UCX_TLS", tls)
    memory: Any = SimpleNamespace(device=CUDA)
    with pytest.raises(UCXError, match="CUDA"):
        UcxWorker({}, True, 1 << 20, memory=memory)
    monkeypatch.setattr(network_module, "DeviceMemory", lambda device: memory)
    monkeypatch.setattr(planes, "_CUDA_TLS", "")

    near = UcxNetwork("near", "expert", SECRET, LIMITS, "tcp", device=CUDA)

    link: Any = await near.connect(await far.listen("127.0.0.1", 0, echo), "far", HANG_S)

    assert link.memory is None
    await near.close()
    await far.close()
