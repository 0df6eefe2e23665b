"""Two real ranks: what the first tells, the other hears; and where their sockets are."""

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
from torch import Tensor

from moesaic.models.tensor_parallel.group import RankGroup, RankMessage
from moesaic.models.tensor_parallel.leader import DividedMLP, Leading
from moesaic.models.tensor_parallel.meeting import file_store, meeting_file, stay_on_interface

CPU = torch.device("cpu")
HANG_S = 120


def _lost(error: Exception) -> NoReturn:
    raise error


def _hear(path: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    stay_on_interface("127.0.0.1")
    group = RankGroup(1, 2, file_store(path, 2), CPU, _lost)
    pipe.send(_listened())
    while True:
        kind, first, second, content = group.hear(lambda _: (torch.float32, CPU))
        if kind == RankMessage.END:
            break
        pipe.send((int(kind), first, second, tuple(content.shape), content.flatten().tolist()))
        group.sum(content)
    group.close()


def _listened() -> list[str]:
    connections = psutil.Process().net_connections("inet")
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


Pair = tuple[RankGroup, Connection, list[str]]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """The first rank, here, and what the other one says of what it hears."""
    here, there = multiprocessing.Pipe()
    stay_on_interface("127.0.0.1")
    with meeting_file() as path:
        mode = Path(path).stat().st_mode & 0o777
        assert mode == 0o600
        spawning: Any = multiprocessing.get_context("spawn")
        process = spawning.Process(target=_hear, args=(path, there), daemon=True)
        process.start()
        group = RankGroup(0, 2, file_store(path, 2), CPU, _lost)
        listened = here.recv()
        yield group, here, listened
        group.close()
        process.join(HANG_S)
        assert process.exitcode == 0


CONTENTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.arange(12.0).view(3, 4),
    "no rows": lambda: torch.zeros(0, 4),
    "no columns": lambda: torch.zeros(3, 0),
    "nothing": lambda: torch.zeros(0),
    "one of a stride": lambda: torch.arange(9.0).as_strided((1,), (3,), 2),
    "one row of a stride": lambda: torch.arange(40.0).as_strided((1, 4), (17, 3), 2),
    "one column of a stride": lambda: torch.arange(40.0).as_strided((4, 1), (3, 9), 2),
    "turned": lambda: torch.arange(12.0).view(3, 4).T,
    "repeated": lambda: torch.arange(4.0).expand(3, 4),
    "more than a frame": lambda: torch.arange(3 * 4096.0).view(3, 4096),
    "more than a frame, turned": lambda: torch.arange(3 * 4096.0).view(3, 4096).T,
}


@pytest.mark.parametrize("name", list(CONTENTS))
def test_what_one_rank_tells_the_other_hears(pair: Pair, name: str) -> None:
    group, other, _ = pair
    content = CONTENTS[name]()

    group.tell(RankMessage.MLP, 5, 7, content)
    total = group.sum(content.clone())

    told = (int(RankMessage.MLP), 5, 7, tuple(content.shape), content.flatten().tolist())
    assert other.recv() == told
    assert torch.equal(total, 2 * content)


def test_their_sockets_are_on_loopback(pair: Pair) -> None:
    _, _, listened = pair

    assert listened
    assert set(listened) == {"127.0.0.1"}


def test_a_part_that_fails_while_others_wait_for_it_ends_the_instance(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, other, _ = pair

    class Lost(BaseException):
        pass

    def end(error: Exception) -> NoReturn:
        raise Lost from error

    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(group, "lose", end)
    own: Any = full
    with pytest.raises(Lost) as ended:
        DividedMLP(Leading(group), 3, own)(torch.ones(1, 4))

    assert isinstance(ended.value.__cause__, torch.OutOfMemoryError)
    assert other.recv()[:3] == (int(RankMessage.MLP), 3, 0)
    group.sum(torch.zeros(1, 4))  # the other rank does wait for it
