"""A file of settings, and the model as an argument, as the commands of a suite and services read them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.cli.machine.state import SuiteState
from moesaic.services.attention.settings import AttentionSettings
from moesaic.usage.config_file import OF_UP, others_settings
from moesaic.usage.reading import BadSettings, load_settings, read_settings
from tests.cli.conftest import Run, Start, gone


@pytest.fixture
def file(house: Path) -> Path:
    return house / "suite.yaml"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESAIC_SECRETS_DIR", "")
    monkeypatch.delenv("MOESAIC_MAX_NUM_SEQS", raising=False)


def test_a_suite_starts_by_a_file_and_an_argument(
    start: Start, suite: Callable[[str], SuiteState], house: Path, file: Path
) -> None:
    file.write_text("model: nowhere\nport: 0\nexperts: 1\nmax-num-seqs: 7\nlog_level: warning\n")
    process = start("up", "model", "--config", str(file), "--log-level", "error")
    ready = suite("ready")
    process.terminate()
    process.communicate()

    attention = (house / "run" / "attention-0.log").read_text()
    assert [each.name for each in ready.processes if each.role == "expert"] == ["expert-0"]
    assert Path(ready.model).name == "model"
    assert "--max-num-seqs=7" in attention
    assert "--log-level=error" in attention
    assert gone([each.pid for each in ready.processes])


def test_flags_win_over_variables_and_variables_over_files(ask: Run, file: Path) -> None:
    file.write_text("model: model\nexperts: 5\nstandby-experts: 2\nport: 1\n")

    def experts(*flags: str, **env: str) -> list[str]:
        shown = ask("plan", "--config", str(file), *flags, "--memory", "64G", "--json", **env)
        assert shown.returncode == 0, shown.stderr
        names = [each["name"] for each in json.loads(shown.stdout)["processes"]]
        return [name for name in names if name.startswith("expert")]

    assert len(experts()) == 5
    assert len(experts(MOESAIC_EXPERTS="4")) == 4
    assert len(experts("--experts", "3", MOESAIC_EXPERTS="4")) == 3


def test_a_variable_of_a_service_wins_over_the_file_of_its_suite(ask: Run, file: Path) -> None:
    file.write_text("model: model\nmax-num-seqs: 8\n")

    refused = ask("up", "--config", str(file), MOESAIC_MAX_NUM_SEQS="1000000")

    assert refused.returncode == 2
    assert "got '1000000'" in refused.stderr


def test_a_null_sets_nothing_and_a_quoted_one_is_a_text(file: Path) -> None:
    file.write_text("model: m\nsecret: ~\nworker-id: null\nlog-level:\nnode: 'null'\n")

    settings = load_settings(AttentionSettings, ["--config", str(file)])

    assert (settings.secret.get_secret_value(), settings.worker_id) == ("", "")
    assert (settings.log_level, settings.node) == ("info", "null")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max-num-seq: 3\n", ":1: max-num-seq: unknown setting, did you mean max-num-seqs?"),
        ("model: m\nexpert: 3\n", ":2: expert: unknown setting, did you mean experts?"),
        ("config: other.yaml\n", ":1: config: unknown setting"),
        ("secret: s\n", ":1: secret: unknown setting of this command; variables may give it"),
        ("admin-port: 1\n", ":1: admin-port: unknown setting of this command"),
        ("port: 1\nPort: 2\n", ":2: port: is set twice"),
        ("experts: [1, 2]\n", ":1: experts: takes a single value"),
        ("? [a]\n: 1\n", ":1: a name: takes a single value"),
        ("- port\n", "must hold settings"),
        ("port\n", "must hold settings"),
        ("port: '\n", "is no YAML"),
        ("a: &a [*a]\n", "single value"),
        ("port: x\x00\n", "is no YAML"),
        ("[" * 100_000, "is no YAML"),
        ("#" * (1 << 20) + "\n", "larger than 1 MiB"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_fix(
    ask: Run, file: Path, content: str, says: str
) -> None:
    file.write_text(content)

    refused = ask("up", "--config", str(file))

    assert refused.returncode == 2
    assert says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (file.parent / "run").exists()


def test_bytes_that_are_no_text_are_no_yaml(ask: Run, file: Path) -> None:
    file.write_bytes(b"port: \xff\n")

    assert "is no YAML" in ask("up", "--config", str(file)).stderr


def test_a_missing_file_is_named(ask: Run) -> None:
    assert "--config none.yaml: cannot be read (No such" in ask("up", "--config=none.yaml").stderr


def test_a_wrong_value_names_its_flag(ask: Run, file: Path) -> None:
    file.write_text("experts: many\n")

    assert "--experts" in ask("up", "--config", str(file)).stderr


def test_two_models_are_one_too_many(ask: Run) -> None:
    refused = ask("up", "a/b", "--model", "c/d")

    assert (refused.returncode, refused.stderr) == (
        2,
        "moesaic: --model c/d: the model is a/b already; give one of them\n",
    )


def test_the_argument_wins_over_the_variable_of_the_model(ask: Run) -> None:
    assert "nowhere" in ask("plan", "nowhere", MOESAIC_MODEL="model").stderr
    assert "nowhere" in ask("plan", MOESAIC_MODEL="nowhere").stderr


def test_a_service_takes_its_model_as_an_argument_and_the_rest_from_a_file(file: Path) -> None:
    file.write_text("max-num-seqs: 7\nexperts: 4\ndetach: yes\nmax_model_len: 8K\ndtype:\n")

    read = read_settings(AttentionSettings, ["m", "--config", str(file)])

    assert (read.model, read.max_num_seqs, read.max_model_len) == ("m", 7, 8192)
    assert read.dtype == "auto"


def test_flags_variables_and_secrets_of_a_service_win_over_its_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("model: m\nmax-num-seqs: 7\nredis-url: redis://file\nlog-level: error\n")
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    (secrets / "moesaic_log_level").write_text("debug")
    monkeypatch.setenv("MOESAIC_SECRETS_DIR", str(secrets))
    monkeypatch.setenv("MOESAIC_MAX_NUM_SEQS", "8")
    monkeypatch.setenv("REDIS_URL", "redis://variable")

    read = read_settings(AttentionSettings, [f"--config={file}", "--model", "other"])

    assert (read.model, read.max_num_seqs) == ("other", 8)
    assert (read.redis_url, read.log_level) == ("redis://variable", "debug")


def test_a_service_refuses_an_unknown_key(file: Path) -> None:
    file.write_text("model: m\nmax-num-sequences: 7\n")

    with pytest.raises(BadSettings, match=r"suite.yaml:2: max-num-sequences: unknown setting"):
        read_settings(AttentionSettings, ["--config", str(file)])


def test_a_model_in_place_of_the_role_names_the_command_for_it(ask: Run) -> None:
    refused = ask("serve", "owner/name")

    assert refused.returncode == 2
    assert "'moesaic up owner/name' starts all services" in refused.stderr


def test_services_know_every_option_of_a_suite(ask: Run) -> None:
    from moesaic.cli.suite.options import SuiteOptions
    from moesaic.cli.terminal.options import taken_fields

    assert {name.replace("_", "-") for name in taken_fields(SuiteOptions)} <= others_settings()
    assert others_settings() >= OF_UP


def test_the_help_of_a_service_names_both(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(AttentionSettings, ["--help"])

    shown = capsys.readouterr().out
    assert "[MODEL]" in shown
    assert "--config" in shown
