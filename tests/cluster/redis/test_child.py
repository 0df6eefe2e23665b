import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cluster.redis.child import discard_redis, start_redis
from moesaic.errors import InvalidInput, NotReady


def cli(url: str, *words: str) -> str:
    import redis

    with redis.Redis.from_url(url) as client:
        return str(client.execute_command(*words))


def test_what_it_held_is_there_after_a_restart(tmp_path: Path):
    process, url = start_redis(tmp_path)
    cli(url, "SET", "k", "v")
    process.terminate()
    assert process.wait() == 0

    process, again = start_redis(tmp_path)
    try:
        assert again == url
        assert cli(url, "GET", "k") == "b'v'"
        assert "noeviction" in cli(url, "CONFIG", "GET", "maxmemory-policy")
    finally:
        process.terminate()
        process.wait()


def test_a_second_one_in_the_same_directory_is_refused(tmp_path: Path):
    process, _ = start_redis(tmp_path)
    try:
        with pytest.raises(InvalidInput, match="already running in"):
            start_redis(tmp_path)
    finally:
        process.terminate()
        process.wait()


def test_a_long_path_and_a_damaged_file(tmp_path: Path):
    directory = tmp_path / ("long" * 30)
    process, url = start_redis(directory)
    assert len(url) < 108
    process.terminate()
    process.wait()

    [journal] = (directory / "appendonlydir").glob("*.incr.aof")
    journal.write_bytes(b"*3\r\nnot an append-only file at all\r\n")
    with pytest.raises(NotReady, match="the Redis server did not start: "):
        start_redis(directory)
    discard_redis(directory)


def test_a_socket_with_a_short_path_stays_the_same_and_is_removed_with_the_data(tmp_path: Path):
    directory = tmp_path / ("long" * 30)
    urls = set()
    for _ in range(2):
        process, url = start_redis(directory)
        process.terminate()
        process.wait()
        urls.add(url)
    (url,) = urls
    sockets = Path(url.removeprefix("unix://")).parent
    assert sockets.is_dir()

    discard_redis(directory)

    assert not sockets.exists()
    assert not directory.exists()


def test_it_dies_with_its_parent_even_on_kill_9(tmp_path: Path):
    source = (
        "import sys, time, pathlib\n"
        "from moesaic.cluster.redis.child import start_redis\n"
        "process, url = start_redis(pathlib.Path(sys.argv[1]))\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", source, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
    descriptor = os.pidfd_open(child)

    parent.send_signal(signal.SIGKILL)
    parent.wait()

    select.select([descriptor], [], [])  # until it has ended
    os.close(descriptor)
