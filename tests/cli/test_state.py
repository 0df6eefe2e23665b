import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.cli.machine.state import StateFile, SuiteState, process_start_time
from moesaic.cli.suite.child import Child
from moesaic.cli.terminal.outcome import CommandError, Exit


def state_of(pid: int, start_time: int) -> SuiteState:
    return SuiteState(
        pid=pid,
        start_time=start_time,
        state="ready",
        url="http://127.0.0.1:8000",
        topology="local",
        model="m",
        processes=[],
    )


def test_a_written_state_of_a_living_process_is_running(tmp_path: Path) -> None:
    mine = state_of(os.getpid(), process_start_time(os.getpid()) or 0)

    StateFile(tmp_path).write(mine)

    assert StateFile(tmp_path).running() == mine


def test_a_state_whose_process_id_was_reused_is_stale(tmp_path: Path) -> None:
    StateFile(tmp_path).write(state_of(os.getpid(), start_time=1))

    assert StateFile(tmp_path).running() is None


def test_a_process_that_only_waits_to_be_reaped_does_not_live() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.read()  # its end
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert process_start_time(process.pid) is None
    process.communicate()


@pytest.mark.parametrize("content", [b"", b"{", b'{"pid": "x"}', b"\xff\xfe"])
def test_a_damaged_file_is_no_suite(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "moesaic.json").write_bytes(content)

    assert StateFile(tmp_path).running() is None


def test_a_directory_has_one_suite_at_a_time(tmp_path: Path) -> None:
    first, second = StateFile(tmp_path), StateFile(tmp_path)
    with (
        first.held(),
        pytest.raises(CommandError, match="a suite already runs"),
        second.held(),
    ):
        pass

    with StateFile(tmp_path).held():  # free again
        pass


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, where one may be mounted."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_disk_without_room_is_found_before_anything_is_written(small_disk: Path) -> None:
    directory = small_disk / "deep" / "run"

    with pytest.raises(CommandError) as caught, StateFile(directory).held():
        pass

    assert caught.value.status == Exit.USAGE
    assert re.match(
        rf"{directory}: only 1\.0 MiB are free, but a suite needs 16 MiB", str(caught.value)
    )
    assert not list(small_disk.iterdir())


def test_a_disk_that_cannot_be_written_is_named_with_what_helps(small_disk: Path) -> None:
    remount = ["mount", "-o", "remount,ro,size=64m", str(small_disk)]
    subprocess.run(remount, check=True)

    with (
        pytest.raises(CommandError, match=r"run: .*Read-only.*another directory") as caught,
        StateFile(small_disk / "run").held(),
    ):
        pass

    assert caught.value.status == Exit.USAGE


async def test_a_service_whose_log_cannot_be_written_runs_without(tmp_path: Path) -> None:
    child = await Child.start([sys.executable, "-c", "print(1)"], {}, tmp_path)  # a directory

    assert await child.wait() == 0


def test_a_run_directory_that_cannot_be_written_is_said_and_not_thrown(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()  # as good as a read-only file system, also for root

    with (
        pytest.raises(CommandError, match="cannot write the suite") as caught,
        StateFile(tmp_path).held(),
    ):
        pass

    assert caught.value.status == Exit.USAGE


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("there", [None, 0o755, 0o777])
def test_nobody_else_looks_into_the_run_directory_or_reads_its_secret(
    tmp_path: Path, there: int | None
) -> None:
    run = tmp_path / "run"
    if there is not None:
        run.mkdir()
        run.chmod(there)
    before = os.umask(0)
    try:
        with StateFile(run).held():
            StateFile(run).write_secret("s")
            assert (mode_of(run), mode_of(run / "secret")) == (0o700, 0o600)
            StateFile(run).write_secret("t")  # whole or not at all
            assert (run / "secret").read_text() == "t\n"
    finally:
        os.umask(before)

    assert not (run / "secret").exists()


def test_a_run_directory_that_others_could_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chmod(path: Path, mode: int) -> None:
        raise PermissionError("not the owner")  # as for everyone but root and the owner

    tmp_path.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", chmod)

    with pytest.raises(
        CommandError, match="belongs to another user and is open to others"
    ) as caught:
        StateFile(tmp_path).make_directory()
    assert caught.value.status == Exit.USAGE


def test_a_directory_that_is_no_suites_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()  # as in /run
    tmp_path.chmod(0o755)

    with pytest.raises(CommandError, match="open to others and holds files of no suite") as caught:
        StateFile(tmp_path).make_directory()

    assert caught.value.status == Exit.USAGE
    assert mode_of(tmp_path) == 0o755


def test_the_directory_of_an_earlier_suite_is_closed(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    tmp_path.chmod(0o755)

    StateFile(tmp_path).make_directory()

    assert mode_of(tmp_path) == 0o700


def test_the_suite_of_another_user_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "moesaic.json").write_bytes(b"{}")
    tmp_path.chmod(0o700)
    # Root may read everything, so another user has to ask.
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setuid(65534)
            else:
                tmp_path.chmod(0)
            status = 0 if StateFile(tmp_path).running() is None else 1
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    tmp_path.chmod(0o700)

    assert status == 0
