"""The real command with a real Redis and real child processes that stand in for the services."""

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moesaic.cli.machine.state import SuiteState, process_start_time
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import start_redis
from moesaic.cluster.registry import Lease, registered
from moesaic.messages.registry import WorkerRecord
from tests.cli.conftest import gone
from tests.waiting import eventually

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Start = Callable[..., "subprocess.Popen[str]"]
Wait = Callable[[str], SuiteState]

UP = ("up", "--model", "model", "--port", "0")
EXPERT_0 = WorkerRecord(
    worker_id="expert-0", generation=1, role="expert", state="ready", admin_address="h:1"
)


def pids(state: SuiteState) -> list[int]:
    return [process.pid for process in state.processes]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_suite_and_leaves_nothing_behind(
    start: Start, suite: Wait, house: Path, number: signal.Signals
) -> None:
    process = start(*UP)
    ready = suite("ready")
    assert len(ready.processes) == 6  # with Redis
    assert all(process_start_time(pid) for pid in pids(ready))

    process.send_signal(number)
    out, err = process.communicate()

    assert process.returncode == 0
    assert gone(pids(ready))
    assert not (house / "run" / "moesaic.json").exists()
    assert f"curl -s {ready.url}/v1/classify" in out
    assert "stopping" in err


def test_a_second_signal_ends_a_suite_that_does_not_stop(
    start: Start, suite: Wait, house: Path
) -> None:
    process = start(*UP, STUCK="gateway")
    ready = suite("ready")
    process.send_signal(signal.SIGINT)
    gateway = house / "run" / "gateway.log"
    eventually(lambda: "service.stopping" in gateway.read_text())

    process.send_signal(signal.SIGINT)
    process.communicate()

    assert process.returncode == 130
    eventually(lambda: gone(pids(ready)))


def test_nothing_outlives_a_supervisor_that_is_killed(start: Start, suite: Wait, run: Run) -> None:
    process = start(*UP)
    ready = suite("ready")

    process.kill()
    process.communicate()

    eventually(lambda: gone(pids(ready)))
    down = run("down")
    assert (down.returncode, down.stdout) == (0, "nothing runs in this directory\n")


def test_a_service_and_redis_come_back_after_a_kill(start: Start, suite: Wait) -> None:
    start(*UP)
    before = {process.name: process for process in suite("ready").processes}

    for name in ("redis", "expert-1"):
        os.kill(before[name].pid, signal.SIGKILL)

    def back(name: str) -> bool:
        now = next(process for process in suite("ready").processes if process.name == name)
        return now.restarts == 1 and now.pid not in (0, before[name].pid)

    eventually(lambda: back("redis") and back("expert-1"))


def test_a_disk_that_fills_up_stops_no_suite(start: Start, suite: Wait, house: Path) -> None:
    process = start(*UP)
    ready = suite("ready")
    log = house / "run" / "expert-0.log"
    eventually(lambda: log.exists() and "service.started" in log.read_text())
    (house / "run" / "moesaic.new").mkdir()  # the state can be written no more
    os.kill(next(p.pid for p in ready.processes if p.name == "expert-0"), signal.SIGKILL)
    eventually(lambda: log.read_text().count("service.started") == 2)

    process.send_signal(signal.SIGINT)
    _, err = process.communicate()

    assert process.returncode == 0
    assert gone(pids(ready))
    assert err.count("moesaic.json cannot be written") == 1
    for name in ("gateway", "scheduler", "attention-0", "expert-0", "expert-1"):
        assert "service.stopping" in (house / "run" / f"{name}.log").read_text()


def test_a_detached_suite_serves_until_down(run: Run, suite: Wait) -> None:
    up = run(*UP, "--detach", "--json")
    assert up.returncode == 0, up.stderr
    facts = json.loads(up.stdout)
    ready = suite("ready")
    assert facts["url"] == ready.url
    assert [process["name"] for process in facts["processes"]] == [
        "redis",
        "scheduler",
        "expert-0",
        "expert-1",
        "attention-0",
        "gateway",
    ]

    second = run(*UP)
    down = run("down")

    assert second.returncode == 1
    assert f"a suite already runs in this directory at {ready.url}" in second.stderr
    assert (down.returncode, down.stdout) == (0, f"stopped the suite at {ready.url}\n")
    assert gone([ready.pid, *pids(ready)])


def test_a_detached_suite_that_fails_says_why(run: Run) -> None:
    up = run(*UP, "--detach", BROKEN="expert-1", BROKEN_STATUS="2")

    assert up.returncode == 2
    assert "expert-1 exited with status 2, and no restart can help" in up.stderr
    assert "cannot read the weights" in up.stderr
    assert "Traceback" not in up.stderr


@pytest.mark.slow
def test_a_suite_that_is_not_ready_in_time_says_what_was_missing(run: Run) -> None:
    up = run(*UP, "--timeout", "5", NEVER_READY="1")

    assert up.returncode == 4
    assert "not ready after 5 s: no attention worker" in up.stderr


def test_a_suite_that_starts_says_what_it_waits_for(start: Start) -> None:
    process = start(*UP, NEVER_READY="1")
    assert process.stderr is not None

    while "not ready yet" not in (line := process.stderr.readline()):
        pass
    process.terminate()
    process.communicate()

    assert line.endswith("not ready yet: no attention worker\n")
    assert process.returncode == 0


def test_warnings_of_the_services_show_on_the_terminal(start: Start, suite: Wait) -> None:
    process = start(*UP, WARNING="attention-0")
    suite("ready")
    assert process.stderr is not None

    while "disk.slow" not in (line := process.stderr.readline()):
        pass

    assert "attention-0" in line
    assert "warning" in line


def test_flags_and_threads_reach_the_services(start: Start, suite: Wait, house: Path) -> None:
    settings = ("--served-model-name", "tiny", "--max-num-seqs=7", "--log-level", "warning")
    process = start(*UP, "--experts", "1", "--slots-per-layer", "9", *settings)
    ready = suite("ready")
    process.terminate()
    out, _ = process.communicate()

    log, attention, gateway = (
        (house / "run" / f"{name}.log").read_text()
        for name in ("expert-0", "attention-0", "gateway")
    )
    address = next(p.admin_address for p in ready.processes if p.name == "expert-0")

    assert "--slots-per-layer 9" in log
    assert f"--admin-port {address.rpartition(':')[2]}" in log
    assert "--secret" not in log
    assert all("--log-level=warning" in text for text in (log, attention, gateway))
    assert [("--max-num-seqs=7" in text) for text in (log, attention, gateway)] == [0, 1, 0]
    assert "--served-model-name=tiny" in gateway
    assert "Moesaic serves tiny at" in out


@pytest.mark.parametrize(
    ("arguments", "env", "status", "says"),
    [
        (["--model", "nowhere"], {}, 2, "--model nowhere: no such directory"),
        (["--model", "services"], {}, 2, "--model services: "),
        (["--no-enable-prefix-caching", "--model", "nowhere"], {}, 2, "--model nowhere: no such"),
        (["--api-key", "-a-key", "--model", "nowhere"], {}, 2, "--model nowhere: no such"),
        (["--no-offload"], {}, 2, "--no-offload: unknown flag"),
        (["--slots-per-layer", "3"], {}, 2, "give --slots-per-layer 4 or more --experts"),
        (["--topology", "local", "--experts", "2"], {}, 2, "--experts: the local topology"),
        (["--topology", "mesh"], {}, 2, "mesh"),
        (["--agents", "3"], {}, 2, "--agents: the disaggregated topology has no agents"),
        (["--topology", "local", "--memory", "1G"], {}, 2, "--memory: the local topology"),
        (["--topology", "gathered", "--link", "1gbit"], {}, 2, "--link: the gathered topology"),
        (
            ["--attension", "2"],
            {},
            2,
            "--attension: unknown flag, did you mean --attention?",
        ),
        (["--quantisation", "int8"], {}, 2, "did you mean --quantization?"),
        (["--exchange", "case-9"], {}, 2, "--exchange (MOESAIC_EXCHANGE): input should be"),
        (["--quantization", "int8", "--device", "cuda"], {}, 2, "needs --device cpu"),
        (["--wire-dtype", "int8", "--deterministic"], {}, 2, "needs --wire-dtype own, got int8"),
        (
            ["--max-num-seqs=2", "--worker-id", "a"],
            {},
            2,
            "--worker-id: the suite sets this itself",
        ),
        (["--secret", "hidden"], {}, 2, "--secret: give it as MOESAIC_SECRET"),
        (["--kv-blocks"], {}, 2, "Option '--kv-blocks' requires an a"),
        (["-x"], {}, 2, "-x: unknown flag"),
        ([], {"MOESAIC_ATTENSION": "2"}, 2, "MOESAIC_ATTENSION: unknown variable"),
        (
            [],
            {"MOESAIC_LOAD_SHARE": "x"},
            2,
            "--load-share (MOESAIC_LOAD_SHARE): input should be",
        ),
        (
            [],
            {"MOESAIC_SLOTS_PER_LAYER": "9999"},
            2,
            "--slots-per-layer (MOESAIC_SLOTS_PER_LAYER): ",
        ),
        (["--host", "no.such.host.invalid"], {}, 2, "--host no.such.host.invalid"),
        (["--host", "0.0.0.0"], {}, 2, "set MOESAIC_API_KEY to a key"),
        (["--api-keys-file", "nowhere.json"], {}, 2, "--api-keys-file: cannot read nowhere.json"),
        ([], {"MOESAIC_API_KEY": "hidden\N{SNOWMAN}"}, 2, "MOESAIC_API_KEY: only printable ASCII"),
        ([], {"MOESAIC_SLOTS_PER_LAYER": "3"}, 2, "give --slots-per-layer 4"),
        ([], {"MOESAIC_TOPOLOGY": "mesh"}, 2, "mesh"),
        ([], {"REDIS_URL": "http://127.0.0.1"}, 2, "REDIS_URL"),
        ([], {"REDIS_URL": "redis://user:hidden@127.0.0.1:1/0"}, 3, "***@127.0.0.1:1"),
    ],
)
def test_what_is_wrong_at_the_start_is_named_before_anything_runs(
    ask: Run, house: Path, arguments: list[str], env: dict[str, str], status: int, says: str
) -> None:
    up = ask(*UP, *arguments, **env)

    assert up.returncode == status
    # Usage errors come in a box whose lines break anywhere.
    assert says in up.stderr.replace("\n", " ")
    assert "hidden" not in up.stderr
    assert "Traceback" not in up.stderr
    assert not list(house.glob("run/*.log"))


@pytest.mark.parametrize(
    ("file", "content"), [("moesaic.json", "{"), ("chat_template.jinja", "{% if %}")]
)
def test_a_damaged_file_of_the_model_is_found_before_anything_runs(
    ask: Run, house: Path, file: str, content: str
) -> None:
    (house / "model" / file).write_text(content)

    up = ask(*UP)

    assert up.returncode == 2
    assert f"--model model: {file}" in up.stderr
    assert not list(house.glob("run/*.log"))


@pytest.mark.parametrize("flags", [(), ("--detach",)])
def test_a_file_in_place_of_the_run_directory_is_named(
    ask: Run, house: Path, flags: tuple[str, ...]
) -> None:
    (house / "run").touch()

    up = ask(*UP, *flags)

    assert up.returncode == 2
    assert up.stderr.startswith(
        f"moesaic: {house / 'run'}: cannot create this directory for the suite's logs"
    )
    assert ask("status").returncode == 3


def test_variables_and_the_key_reach_the_suite_but_flags_win(
    run: Run, house: Path, suite: Wait
) -> None:
    up = run(
        "up", "--port", "0", "--experts", "1", "--api-key", "key", "--detach",
        MOESAIC_MODEL="model", MOESAIC_EXPERTS="3", MOESAIC_ATTENTION="2", MOESAIC_PORT="1",
        MOESAIC_HOST="0.0.0.0", PATH="/usr/bin:/bin",
    )  # fmt: skip
    assert up.returncode == 0, up.stderr
    processes = {process.name: process.pid for process in suite("ready").processes}
    flags, environ = (
        Path(f"/proc/{processes['gateway']}/{file}").read_bytes() for file in ("cmdline", "environ")
    )
    run("down")

    assert [*processes] == [
        "redis",
        "scheduler",
        "expert-0",
        "attention-0",
        "attention-1",
        "gateway",
    ]
    assert b"MOESAIC_API_KEY=key\0" in environ
    assert b"key\0" not in flags
    assert '-H "Authorization: Bearer $MOESAIC_API_KEY"' in up.stdout
    assert "-m moesaic.cli classify" in up.stdout


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """The address of a Redis server that outlives suites."""
    server, url = start_redis(tmp_path / "shared")
    yield url
    server.terminate()
    server.wait()


@pytest.mark.slow
async def test_two_suites_do_not_share_a_cluster(start: Start, suite: Wait, redis: str) -> None:
    async with Bus.connect(redis, "default") as bus, registered(bus, EXPERT_0):
        refused = start(*UP, REDIS_URL=redis)
        _, err = await asyncio.to_thread(refused.communicate)
        assert refused.returncode == 2
        assert "a suite is registered there already (expert-0 of cluster 'default')" in err
        assert "started" not in err

        start(*UP, REDIS_URL=redis, MOESAIC_CLUSTER="mine")
        await asyncio.to_thread(suite, "ready")


async def test_what_is_left_of_a_killed_suite_is_waited_out(
    start: Start, suite: Wait, redis: str
) -> None:
    async with Bus.connect(redis, "default") as bus:
        await Lease(bus, EXPERT_0).renew()  # for the last time

        start(*UP, REDIS_URL=redis)

        await asyncio.to_thread(suite, "ready")


def test_a_port_in_use_is_found_before_anything_runs(ask: Run, house: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])

        up = ask("up", "--model", "model", "--port", port)

    assert up.returncode == 1
    assert f"--port {port}: cannot listen on 127.0.0.1:{port}" in up.stderr
    assert f"pid {os.getpid()}" in up.stderr
    assert not list(house.glob("run/*.log"))


def test_status_shows_every_service_of_the_suite(start: Start, suite: Wait, run: Run) -> None:
    start(*UP)
    url = suite("ready").url

    status = run("status", "--json")
    table = run("status")

    facts = json.loads(status.stdout)
    assert (status.returncode, facts["url"], facts["ready"]) == (0, url, True)
    names = [service["id"] for service in facts["services"]]
    assert names == ["gateway", "scheduler", "attention-0", "expert-0", "expert-1"]
    # The stand-ins have no admin server.
    assert {service["state"] for service in facts["services"]} == {"unreachable"}
    assert f"{url} is ready" in table.stdout
    assert "attention-0" in table.stdout
