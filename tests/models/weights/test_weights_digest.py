"""The digest of every byte: what changes it, and what is remembered of it."""

import asyncio
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from moesaic.errors import CheckpointError, NotReady
from moesaic.models.weights.digest import CHUNK_BYTES, digesting, weights_digest
from moesaic.models.weights.header import Stamp


def stamps(*paths: Path) -> dict[Path, Stamp]:
    return {path: Stamp.of(path.stat()) for path in paths}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of more than two chunks."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(1 << 20) * (2 * CHUNK_BYTES >> 20) + b"end")
    return path


@pytest.mark.parametrize("place", [0, CHUNK_BYTES + 4321, -1])
def test_one_flipped_bit_anywhere_changes_it(weights: Path, tmp_path: Path, place: int) -> None:
    before = weights_digest(stamps(weights), tmp_path / "home")
    damaged = bytearray(weights.read_bytes())
    damaged[place] ^= 64
    status = weights.stat()
    weights.write_bytes(damaged)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if nothing had been done

    after = weights_digest(stamps(weights), tmp_path / "home")
    damaged[place] ^= 64
    weights.write_bytes(damaged)

    assert after != before
    assert weights_digest(stamps(weights), tmp_path / "home") == before


def test_names_count_and_places_do_not(weights: Path, tmp_path: Path) -> None:
    other, elsewhere = tmp_path / "other.safetensors", tmp_path / "sub" / weights.name
    elsewhere.parent.mkdir()
    for path in (other, elsewhere):
        path.write_bytes(weights.read_bytes())

    digests = [weights_digest(stamps(p), tmp_path / "home") for p in (weights, other, elsewhere)]

    assert digests[0] == digests[2] != digests[1]


def test_what_is_remembered_is_not_read_again(weights: Path, tmp_path: Path) -> None:
    with capture_logs() as logs:
        first = weights_digest(stamps(weights), tmp_path / "home")
        second = weights_digest(stamps(weights), tmp_path / "home")
        [memory] = (tmp_path / "home").glob("*.json")
        stored = json.loads(memory.read_text())
        memory.write_text(json.dumps(stored | {"inode": 1}))  # of another file
        third = weights_digest(stamps(weights), tmp_path / "home")
        memory.write_text("{")
        fourth = weights_digest(stamps(weights), tmp_path / "home")

    assert first == second == third == fourth
    assert [entry["event"] for entry in logs] == ["weights.digested"] * 3


def test_where_nothing_can_be_remembered_it_only_takes_longer(
    weights: Path, tmp_path: Path
) -> None:
    home = tmp_path / "a file"
    home.touch()

    with capture_logs() as logs:
        digests = {weights_digest(stamps(weights), home) for _ in range(2)}

    assert digests == {weights_digest(stamps(weights), tmp_path / "home")}
    assert [entry["event"] for entry in logs] == ["weights.not_remembered", "weights.digested"] * 2


def _digest_beside_others(path: Path, home: Path, found: "multiprocessing.Queue[object]") -> None:
    with capture_logs() as logs:
        digest = weights_digest(stamps(path), home)
    found.put((digest, len(logs)))


def test_of_several_processes_one_reads(weights: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    arguments = weights, tmp_path / "home", found
    processes = [context.Process(target=_digest_beside_others, args=arguments) for _ in range(4)]

    for process in processes:
        process.start()
    results = [found.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()

    assert len({digest for digest, _ in results}) == 1
    assert sorted(num_read for _, num_read in results) == [0, 0, 0, 1]


def test_a_file_that_is_not_as_it_was_is_refused(weights: Path, tmp_path: Path) -> None:
    before = stamps(weights)
    weights.write_bytes(b"other")

    with pytest.raises(CheckpointError, match="has changed while it was read"):
        weights_digest(before, tmp_path / "home")
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        weights_digest(before, tmp_path / "home")


def test_what_is_no_longer_wanted_ends_early(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(NotReady):
        weights_digest(stamps(weights), tmp_path / "home", wanted=lambda: False)


async def test_leaving_the_block_ends_the_reading(
    weights: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async with digesting(stamps(weights)) as digest:
        found = await digest
    async with digesting(stamps(weights)):
        await asyncio.sleep(0)

    assert found == weights_digest(stamps(weights))
    [memory] = (tmp_path / "moesaic" / "digests").glob("*.json")
    assert json.loads(memory.read_text())["path"] == str(weights)
