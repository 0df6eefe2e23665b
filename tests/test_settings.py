import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moesaic.addresses import public_url
from moesaic.loopback import plain_host
from moesaic.models.configuration.captured import captures
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.expert.settings import ExpertSettings
from moesaic.settings import ModelSettings, ServiceSettings, redacted
from moesaic.usage.reading import load_settings


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MOESAIC_") or name == "REDIS_URL":
            monkeypatch.delenv(name)


@pytest.fixture
def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESAIC_SECRETS_DIR", str(tmp_path))
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], cls: type[ServiceSettings], *flags: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        load_settings(cls, flags)
    assert stopped.value.code == 2
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 1
    return text


def test_all_planes_are_at_one_host_unless_told_otherwise():
    settings = ModelSettings(model="m", host="10.0.0.5")

    assert settings.control == settings.data == ("10.0.0.5", "10.0.0.5")


def test_each_plane_can_have_a_host_of_its_own():
    settings = load_settings(
        ModelSettings, ["--model", "m", "--control-host", "expert.control", "--data-host", "::1"]
    )

    assert settings.host == "127.0.0.1"
    assert settings.control.advertised("10.1.0.5:9000") == "expert.control:9000"
    assert settings.data.advertised("::1:9000") == "[::1]:9000"


def test_others_are_told_the_advertised_host_on_both_planes():
    settings = ModelSettings(model="m", host="0.0.0.0", advertise_host="node-7")

    assert settings.control == settings.data == ("0.0.0.0", "node-7")


def test_rest_may_listen_everywhere_if_grpc_has_an_address():
    settings = load_settings(ServiceSettings, ["--host", "0.0.0.0", "--control-host", "10.0.0.5"])

    assert (settings.host, settings.control.host) == ("0.0.0.0", "10.0.0.5")


@pytest.mark.parametrize(
    ("cls", "flags", "named"),
    [
        (ServiceSettings, "--host 0.0.0.0", "--host 0.0.0.0 .*--advertise-host.*--control-host"),
        (ServiceSettings, "--control-host ::", "--control-host :: .*--advertise-host"),
        (
            ExpertSettings,
            "--model m --control-host 10.0.0.5 --data-host 0.0.0.0",
            "--data-host 0.0.0.0 .*--advertise-host",
        ),
        (
            ExpertSettings,
            "--model m --control-host 10.0.0.5 --host 0.0.0.0",
            "--host 0.0.0.0 .*--advertise-host.*--data-host",
        ),
        (ServiceSettings, "--host 10.0.0.5:8000", r"--host \(MOESAIC_HOST\): must be .*:8000"),
        (ServiceSettings, "--control-host http://x", r"--control-host \(MOESAIC_CONTROL_HOST\)"),
        *(
            (
                ServiceSettings,
                f"--host ::1 --advertise-host {host}",
                r"--advertise-host .*connect to",
            )
            for host in ("0.0.0.0", "::", "0", "[::]", "::ffff:0.0.0.0")
        ),
        (ServiceSettings, "--advertise-host a:8000", r"--advertise-host .*must be .*:8000"),
        (ModelSettings, "--model m --data-host 10.0.0.256", r"--data-host .*10\.0\.0\.256"),
    ],
)
def test_a_host_that_cannot_work_is_refused_by_its_name(capsys, cls, flags, named):
    assert re.match(named, refusal(capsys, cls, *flags.split()))


@pytest.mark.parametrize("host", ["[::1]", "127.1", "localhost.", "::ffff:127.0.0.1", "[fd00::2]"])
def test_a_host_is_spelled_as_sockets_take_it(host):
    flags = ["--model", "m", "--advertise-host", host]
    flags += [
        part for flag in ("host", "control-host", "data-host") for part in (f"--{flag}", host)
    ]

    settings = load_settings(ModelSettings, flags)

    places = (settings.host, settings.control_host, settings.data_host, settings.advertise_host)
    assert set(places) == {plain_host(host)}


def test_a_worker_id_can_hold_the_name_of_the_machine():
    settings = load_settings(ServiceSettings, ["--worker-id", "expert-{host}"])

    assert settings.worker_id == settings.identity("any") == f"expert-{socket.gethostname()}"


@pytest.mark.parametrize(
    ("worker_id", "machine"), [("expert-{host}", "m" * 60), ("{host}", "a b"), ("{hots}", "m")]
)
def test_a_worker_id_that_becomes_unusable_is_refused(capsys, monkeypatch, worker_id, machine):
    monkeypatch.setattr(socket, "gethostname", lambda: machine)

    text = refusal(capsys, ServiceSettings, "--worker-id", worker_id)

    assert text.startswith("--worker-id (MOESAIC_WORKER_ID): ")
    assert worker_id.replace("{host}", machine) in text


def test_flags_come_before_environment_before_files_before_defaults(secrets, monkeypatch):
    for name in ("moesaic_cluster", "moesaic_secret", "moesaic_redis_url", "unknown"):
        (secrets / name).write_text("file\n")

    def cluster(*flags: str) -> str:
        return load_settings(ServiceSettings, flags).cluster

    settings = load_settings(ServiceSettings, [])
    assert (settings.secret.get_secret_value(), settings.redis_url) == ("file", "file")
    assert settings.log_level == "info"
    assert cluster() == "file"
    monkeypatch.setenv("MOESAIC_CLUSTER", "environment")
    assert cluster() == "environment"
    assert cluster("--cluster", "flag") == "flag"
    monkeypatch.setenv("REDIS_URL", "environment")  # whatever name it goes by
    assert load_settings(ServiceSettings, []).redis_url == "environment"


def test_a_name_that_no_setting_has_is_refused_with_the_nearest(capsys, secrets, monkeypatch):
    monkeypatch.setenv("MOESAIC_QUANTISATION", "int8")
    assert refusal(capsys, ExpertSettings, "--model", "m") == (
        "MOESAIC_QUANTISATION: unknown variable, did you mean MOESAIC_QUANTIZATION?\n"
    )
    monkeypatch.setenv("MOESAIC_QUANTISATION", "")

    (secrets / "moesaic_sekret").touch()
    assert "moesaic_sekret: unknown setting, did you mean moesaic_secret?" in refusal(
        capsys, ServiceSettings
    )
    (secrets / "moesaic_sekret").unlink()

    text = refusal(capsys, ServiceSettings, "--log-lvl", "debug")
    assert text.startswith("--log-lvl: unknown flag, did you mean --log-level?")


def test_a_secret_that_cannot_be_used_is_not_told(capsys, monkeypatch):
    monkeypatch.setenv("MOESAIC_SECERT", "hidden")

    assert "hidden" not in refusal(capsys, ServiceSettings)


def test_an_empty_variable_says_nothing(secrets, monkeypatch):
    (secrets / "moesaic_secret").write_text("file")
    monkeypatch.setenv("MOESAIC_SECRET", "")
    monkeypatch.setenv("MOESAIC_ADMIN_PORT", "")
    monkeypatch.setenv("MOESAIC_HOST", "")

    settings = load_settings(ServiceSettings, [])

    assert settings.secret.get_secret_value() == "file"
    assert (settings.admin_port, settings.host) == (0, "127.0.0.1")


def test_a_directory_of_secrets_that_is_not_there_is_named(capsys, monkeypatch):
    monkeypatch.setenv("MOESAIC_SECRETS_DIR", "/nowhere")

    assert "MOESAIC_SECRETS_DIR must name a directory, got '/nowhere'" in refusal(
        capsys, ServiceSettings
    )


def test_what_should_be_a_secret_and_cannot_be_read_is_named(capsys, secrets):
    (secrets / "moesaic_secret").mkdir()  # container engines make one for a file that is missing

    assert "moesaic_secret" in refusal(capsys, ServiceSettings)


def test_where_containers_get_their_secrets_is_read_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr("moesaic.usage.reading.SECRETS_DIR", tmp_path)
    assert not load_settings(ServiceSettings, []).secret.get_secret_value()

    (tmp_path / "moesaic_secret").write_text("file")

    assert load_settings(ServiceSettings, []).secret.get_secret_value() == "file"


@pytest.mark.parametrize("flags", [["--quantization", "int8"], ["--deterministic"]])
def test_what_only_a_cpu_computes_is_refused_elsewhere_by_its_name(capsys, flags):
    text = refusal(capsys, AttentionSettings, "--model", "m", "--device", "cuda", *flags)

    assert text.startswith(" ".join(flags))
    assert "needs --device cpu, got cuda" in text


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_cpu_takes_every_type_with_every_quantisation_and_deterministic(dtype, quantization):
    flags = ["--model", "m", "--dtype", dtype, "--quantization", quantization, "--deterministic"]

    told = load_settings(AttentionSettings, flags)

    assert (told.dtype, told.quantization) == (dtype, quantization)


def test_a_gpu_holds_no_float16(capsys):
    flags = ("--model", "m", "--device", "cuda", "--dtype", "float16")
    text = refusal(capsys, AttentionSettings, *flags)

    assert "--dtype float16 needs --device cpu, got cuda" in text


@pytest.mark.parametrize("flags", [["--quantization", "int8"], ["--deterministic"]])
def test_what_needs_compiled_kernels_is_refused_at_once_without_a_compiler(tmp_path, flags):
    environment = {**os.environ, "CC": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)}
    model = Path(__file__).parents[1] / "models" / "demo"
    command = [sys.executable, "-m", "moesaic.services.attention", "--model", str(model), *flags]

    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    assert run.returncode != 0
    assert flags[0] in run.stdout + run.stderr
    assert "install gcc" in run.stdout + run.stderr


@pytest.mark.parametrize(
    "address",
    [
        *("a", "a:", "a:0", "a:99999", "::1:5000", "http://a:5000"),
        *("0:5000", "0.0.0.0:5000", "[::]:5000"),
    ],
)
def test_a_place_where_ranks_cannot_meet_is_refused(
    capsys: pytest.CaptureFixture[str], address: str
) -> None:
    flags = ("--tensor-parallel", "2", "--tensor-parallel-address", address)

    text = refusal(capsys, AttentionSettings, "--model", "m", *flags)

    assert (
        f"--tensor-parallel-address must be host:port of the first rank, IPv6 in brackets, got {address}"
        in text
    )


@pytest.mark.parametrize(
    ("given", "captured"),
    [
        ({"dispatch": "local", "device": "cuda"}, True),
        ({"dispatch": "routed", "device": "cuda:1"}, True),
        ({"dispatch": "local", "device": "cuda", "decode_graphs": False}, False),
        ({"dispatch": "local", "device": "cuda", "tensor_parallel": 2}, True),
        ({"dispatch": "local", "device": "cpu"}, False),
        ({"dispatch": "local", "device": "cpu", "tensor_parallel": 2}, False),
        ({"dispatch": "gathered", "device": "cpu"}, False),
    ],
)
def test_decode_steps_are_captured_on_a_gpu_by_default(
    given: dict[str, Any], captured: bool
) -> None:
    assert captures(AttentionSettings(model="m", **given)) is captured


@pytest.mark.parametrize("way", ["reduce", "relay"])
def test_bits_that_must_not_depend_on_the_placement_are_not_summed_up_on_the_way(
    capsys: pytest.CaptureFixture[str], way: str
) -> None:
    assert AttentionSettings(model="m", deterministic=True).exchange == "auto"

    text = refusal(
        capsys, AttentionSettings, *("--model", "m", "--deterministic", "--exchange", way)
    )

    assert "--deterministic needs --exchange direct" in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--deterministic"], "--deterministic needs --wire-dtype own, got int8"),
        (["--dispatch", "local"], "--wire-dtype belongs to --dispatch routed, got local"),
        (["--dispatch", "gathered"], "--wire-dtype belongs to --dispatch routed, got gathered"),
    ],
)
def test_packed_rows_are_refused_where_they_have_no_sense(
    capsys: pytest.CaptureFixture[str], flags: list[str], told: str
) -> None:
    assert AttentionSettings(model="m", wire_dtype="int8").dispatch == "routed"

    text = refusal(capsys, AttentionSettings, "--model", "m", "--wire-dtype", "int8", *flags)

    assert told in text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hidden@host:1/0", "redis://***@host:1/0"),
        (
            "unix:///r.sock?username=u&password=hidden&db=1",
            "unix:///r.sock?username=u&password=***&db=1",
        ),
        ("redis://host/0", "redis://host/0"),
    ],
)
def test_no_password_in_a_url_is_shown(url: str, shown: str) -> None:
    assert redacted(ServiceSettings(redis_url=url))["redis_url"] == shown
    assert public_url(url) == shown
