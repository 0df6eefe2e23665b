import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moesaic.cluster.lifecycle import OTHER_PLACE

PRELUDE = """
import asyncio, sys
from moesaic.cluster.lifecycle import run_service, stop_event
from moesaic.errors import (
    CheckpointError, InUse, InvalidInput, MoesaicError, NotReady, PassingCheckpointError, PeerLost, UnusableSettings
)

def say(text):
    print(text, flush=True)
"""


def start(body: str, tmp_path: Path) -> "subprocess.Popen[str]":
    source = tmp_path / "service.py"
    source.write_text(PRELUDE + textwrap.dedent(body))
    return subprocess.Popen(
        [sys.executable, str(source)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(body: str, tmp_path: Path) -> tuple[int, str]:
    process = start(body, tmp_path)
    _, err = process.communicate()
    return process.returncode, err


SERVING = """
async def serve():
    async with stop_event() as stop:
        asyncio.get_running_loop().call_soon(say, "up")
        await stop.wait()
        say("stopping")
        await asyncio.sleep({work_s})
        say("done")

run_service(serve())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_the_service_in_order(number, tmp_path):
    process = start(SERVING.format(work_s=0), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"

    process.send_signal(number)

    out, _ = process.communicate()
    assert process.returncode == 0
    assert out.splitlines()[-1] == "done"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_ends_it_at_once(number, status, tmp_path):
    process = start(SERVING.format(work_s=600), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(number)
    while process.stdout.readline() != "stopping\n":
        pass

    process.send_signal(number)

    process.communicate()
    assert process.returncode == status


def test_a_signal_while_the_service_starts_cuts_the_start_short(tmp_path):
    process = start(
        """
        async def serve():
            async with stop_event() as stop:
                try:
                    say("loading")
                    await asyncio.sleep(600)
                finally:
                    say("closed")
                await stop.wait()

        run_service(serve())
        """,
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"

    process.send_signal(signal.SIGTERM)

    out, err = process.communicate()
    assert (process.returncode, out.splitlines()[-1], err) == (0, "closed", "")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        ("InUse('admin_port', 'is taken')", 3, "error: admin_port: is taken\n"),
        ("InvalidInput('tls', 'is no certificate')", 2, "error: tls: is no certificate\n"),
        ("CheckpointError('f', 'is cut', tensor='w')", 2, "error: f: tensor w: is cut\n"),
        ("PassingCheckpointError('f', 'has changed')", 3, "error: f: has changed\n"),
        ("MoesaicError('is lost')", 1, "error: is lost\n"),
        ("UnusableSettings('memory_bytes', 'is too low')", 2, "error: memory_bytes: is too low\n"),
        ("NotReady('redis is not there')", 3, "error: redis is not there\n"),
        ("ExceptionGroup('', [PeerLost('e', 'reset')])", 3, "error: e: reset\n"),
        ("MemoryError()", 3, f"error: memory: none is left; {OTHER_PLACE}\n"),
        (
            "ExceptionGroup('', [RuntimeError('CUDA error: out of memory')])",
            3,
            f"error: memory: CUDA error: out of memory; {OTHER_PLACE}\n",
        ),
        (
            "ExceptionGroup('', [PeerLost('e', 'reset'), CheckpointError('f', 'is cut')])",
            2,
            "error: f: is cut\n",
        ),
    ],
)
def test_an_error_at_the_start_is_one_line(error, status, text, tmp_path):
    body = f"async def serve():\n    raise {error}\nrun_service(serve())\n"

    assert outcome(body, tmp_path) == (status, text)


def test_an_error_ends_the_process_though_a_thread_waits_for_ever(tmp_path):
    body = """
    import threading

    async def serve():
        threading.Thread(target=threading.Event().wait).start()
        raise NotReady("no peer")

    run_service(serve())
    """

    assert outcome(textwrap.dedent(body), tmp_path) == (3, "error: no peer\n")


def test_a_bug_leaves_its_traceback(tmp_path):
    status, text = outcome("async def serve():\n    1 / 0\nrun_service(serve())\n", tmp_path)

    assert status == 1
    assert "ZeroDivisionError" in text


def test_a_service_may_open_as_many_files_as_the_system_lets_it(tmp_path):
    process = start(
        """
        import resource
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))

        async def serve():
            allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            say(allowed == most)

        run_service(serve())
        """,
        tmp_path,
    )

    out, _ = process.communicate()
    assert out == "True\n"


def test_garbage_is_looked_for_but_not_among_what_was_imported(tmp_path):
    process = start(
        """
        import gc

        gc.disable()

        async def serve():
            living, imported = len(gc.get_objects()), gc.get_freeze_count()
            say((gc.isenabled(), living < 5000 < imported))

        run_service(serve())
        """,
        tmp_path,
    )

    out, _ = process.communicate()
    assert out == "(True, True)\n"
