"""A suite in the background: started, awaited until it is ready, and stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from moesaic.cli.machine.links.network import sweep
from moesaic.cli.machine.state import StateFile, SuiteState
from moesaic.cli.suite.child import last_lines
from moesaic.cli.terminal.outcome import CommandError, Exit

POLL_S = 0.1
KILL_WAIT_S = 10.0


def start_in_background(flags: Sequence[str], environment: Mapping[str, str]) -> SuiteState:
    """Start ``moesaic up`` with these flags in a session of its own, and wait until it is ready.

    Args:
        flags: of ``moesaic up``.
        environment: comes on top of this process's own.

    Raises:
        CommandError: it ended before it was ready; text and status are its own.
    """
    state_file = StateFile()
    state_file.make_directory()
    log = state_file.directory / "supervisor.log"
    if running := state_file.running():
        raise CommandError(
            f"a suite already runs in this directory at {running.url} (pid {running.pid}): "
            "stop it with 'moesaic down'"
        )
    with state_file.needed():
        output = log.open("wb")
    with output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "moesaic.cli", "up", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        while supervisor.poll() is None:
            state = state_file.running()
            if state is not None and state.pid == supervisor.pid and state.state == "ready":
                # It outlives this process, which must not warn that it did not wait for it.
                supervisor.returncode = 0
                return state
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        supervisor.terminate()
        supervisor.wait()
        raise CommandError("interrupted, the suite is stopped", Exit.INTERRUPTED) from None
    lines = [line.removeprefix("moesaic: ") for line in last_lines(log, 30)]
    said = "\n".join(lines) or f"it said nothing: is there room for {log}?"
    raise CommandError(f"the suite did not start\n{said}", _status(supervisor))


def _status(supervisor: "subprocess.Popen[bytes]") -> Exit:
    try:
        return Exit(supervisor.returncode or Exit.ERROR)
    except ValueError:
        return Exit.ERROR


def stop_suite(timeout_s: float) -> str:
    """Stop the suite of this directory and wait for its end.

    Returns:
        One line for people.
    """
    state_file = StateFile()
    state = state_file.running()
    if state is None:
        # Links of a suite that was killed.
        sweep()
        return "nothing runs in this directory"
    os.kill(state.pid, signal.SIGTERM)
    if _gone(state, timeout_s):
        return f"stopped the suite at {state.url}"
    if state.alive:
        # Its processes die with it.
        os.kill(state.pid, signal.SIGKILL)
        _gone(state, KILL_WAIT_S)
    state_file.path.unlink(missing_ok=True)
    sweep()
    return f"killed the suite at {state.url}: it had not finished after {timeout_s:g} s"


def _gone(state: SuiteState, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while state.alive:
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True
