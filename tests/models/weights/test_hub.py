"""Models by name: real processes against a real server that speaks the hub's API."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.hub_server import Hub, HubRepository, commit_of, hub_server
from tests.suites import DEMO

ASK = """
import json, sys
from moesaic.errors import MoesaicError
from moesaic.models.weights.hub import local_model
seen = []
try:
    found = local_model(sys.argv[1], weights=sys.argv[2] == "weights", on_bytes=lambda *b: seen.append(b))
    assert "torch" not in sys.modules
    print(json.dumps({"found": str(found), "seen": seen[-1:]}))
except MoesaicError as error:
    print(json.dumps({"error": str(error), "kind": type(error).__name__}))
"""
SHARDS = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "README.md": b"a model",
    "pytorch_model.bin": b"a pickle",
    "original/consolidated.safetensors": b"the same once more",
    SHARDS[0]: save({"a": torch.arange(100_000)}),
    SHARDS[1]: save({"b": torch.arange(1000)}),
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    ).encode(),
}
TOTAL = len(FILES[SHARDS[0]]) + len(FILES[SHARDS[1]])


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server(acme__tiny=HubRepository(FILES)) as server:
        yield server


def started(
    hub: Hub, home: Path, model: str, what: str = "weights", **variables: str
) -> "subprocess.Popen[str]":
    environment = {**os.environ, **hub.variables(home), **variables}
    command = [sys.executable, "-W", "error::UserWarning", "-c", ASK, model, what]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def ask(
    hub: Hub, home: Path, model: str, what: str = "weights", **variables: str
) -> dict[str, object]:
    out, _ = started(hub, home, model, what, **variables).communicate(timeout=100)
    answer: dict[str, object] = json.loads(out)
    return answer


def files_of(answer: dict[str, object]) -> dict[str, bytes]:
    directory = Path(str(answer["found"]))
    return {
        str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()
    }


def test_a_model_is_downloaded_once_and_nothing_but_what_is_read(hub: Hub, tmp_path: Path) -> None:
    first = ask(hub, tmp_path, "acme/tiny")

    assert files_of(first) == {
        name: content
        for name, content in FILES.items()
        if name not in ("README.md", "pytorch_model.bin", "original/consolidated.safetensors")
    }
    assert first["seen"] == [[TOTAL, TOTAL]]
    assert len(hub.bodies()) == 2

    hub.requests.clear()
    assert ask(hub, tmp_path, "acme/tiny")["found"] == first["found"]
    assert [asked.path for asked in hub.of_models()] == ["/api/models/acme/tiny/revision/main"]


def test_a_reader_of_texts_gets_no_weights(hub: Hub, tmp_path: Path) -> None:
    files = files_of(ask(hub, tmp_path, "acme/tiny", "texts"))
    assert set(files) == {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert hub.bodies() == []


def test_a_directory_wins_over_a_name(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    process = subprocess.run(
        [sys.executable, "-c", ASK, "acme/tiny", "weights"],
        cwd=tmp_path,
        env={**os.environ, **hub.variables(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert json.loads(process.stdout)["found"] == "acme/tiny"
    assert hub.requests == []


def test_without_a_network_the_cache_serves(hub: Hub, tmp_path: Path) -> None:
    found = ask(hub, tmp_path, "acme/tiny")["found"]
    hub.requests.clear()

    assert ask(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")["found"] == found
    assert hub.of_models() == []
    unreachable = replace(hub, url="http://127.0.0.1:9")
    assert ask(unreachable, tmp_path, "acme/tiny")["found"] == found


def test_offline_and_not_in_the_cache_is_an_error(hub: Hub, tmp_path: Path) -> None:
    missing = ask(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")
    assert missing["kind"] == "UnusableSettings"
    assert "HF_HUB_OFFLINE" in str(missing["error"])

    ask(hub, tmp_path, "acme/tiny", "texts")
    in_part = ask(hub, tmp_path, "acme/tiny", HF_HUB_OFFLINE="1")
    assert "not completely in the cache" in str(in_part["error"])
    assert hub.bodies() == []


def test_a_revision_is_another_model(hub: Hub, tmp_path: Path) -> None:
    older = {**FILES, "config.json": b'{"older": 1}'}
    hub.repositories["acme/tiny"].tags["v1"] = older

    tagged = ask(hub, tmp_path, "acme/tiny@v1")
    by_commit = ask(hub, tmp_path, f"acme/tiny@{commit_of(older)}")

    assert files_of(tagged)["config.json"] == b'{"older": 1}'
    assert by_commit["found"] == tagged["found"]
    assert files_of(ask(hub, tmp_path, "acme/tiny"))["config.json"] == b"{}"
    assert len(hub.bodies()) == 2  # both have the same weights, which are kept once
    unknown = ask(hub, tmp_path, "acme/tiny@v7")
    assert (unknown["kind"], "'v7'" in str(unknown["error"])) == ("UnusableSettings", True)


def test_the_token_is_sent_to_the_hub_and_to_nobody_else(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["acme/tiny"].token = "hf_secret"

    assert "found" in ask(hub, tmp_path, "acme/tiny", HF_TOKEN="hf_secret")

    assert {asked.token for asked in hub.of_models()} == {"hf_secret"}
    assert {asked.token for asked in hub.bodies()} == {""}


@pytest.mark.parametrize("token", ["", "hf_other"])
def test_a_private_repository_is_as_if_it_were_not_there(
    hub: Hub, tmp_path: Path, token: str
) -> None:
    hub.repositories["acme/tiny"].token = "hf_secret"
    private = ask(hub, tmp_path, "acme/tiny", HF_TOKEN=token)
    unknown = ask(hub, tmp_path, "acme/other", HF_TOKEN=token)
    for answer in (private, unknown):
        assert answer["kind"] == "UnusableSettings"
        assert "no such directory here, and no such repository" in str(answer["error"])
        assert "HF_TOKEN" in str(answer["error"])


def test_a_gated_repository_says_how_to_be_let_in(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["acme/tiny"] = HubRepository(FILES, token="hf_secret", gated=True)
    refused = ask(hub, tmp_path, "acme/tiny")
    assert refused["kind"] == "UnusableSettings"
    assert f"accept its terms at {hub.url}/acme/tiny" in str(refused["error"])
    assert "found" in ask(hub, tmp_path, "acme/tiny", HF_TOKEN="hf_secret")


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    large = save({"a": torch.arange(1_600_000)})
    hub.repositories["acme/tiny"] = HubRepository(
        {"config.json": b"{}", "model.safetensors": large}
    )
    hub.break_after = [11 << 20]  # it is written to the disk in pieces of 10 MiB

    assert files_of(ask(hub, tmp_path, "acme/tiny"))["model.safetensors"] == large
    assert [asked.range for asked in hub.bodies()] == ["", f"bytes={10 << 20}-"]


def test_what_was_finished_before_a_stop_is_not_downloaded_again(hub: Hub, tmp_path: Path) -> None:
    found = Path(str(ask(hub, tmp_path, "acme/tiny")["found"]))
    for path in ((found / SHARDS[1]).resolve(), found / SHARDS[1]):
        path.unlink()
    hub.requests.clear()

    assert files_of(ask(hub, tmp_path, "acme/tiny"))[SHARDS[1]] == FILES[SHARDS[1]]
    assert [asked.sent for asked in hub.bodies()] == [len(FILES[SHARDS[1]])]


def test_a_damaged_file_is_not_kept(hub: Hub, tmp_path: Path) -> None:
    import hashlib

    hub.damaged = {hashlib.sha256(FILES[SHARDS[0]]).hexdigest()}
    answer = ask(hub, tmp_path, "acme/tiny")
    assert answer["kind"] == "NotReady"
    assert f"{SHARDS[0]} arrived damaged" in str(answer["error"])

    hub.damaged.clear()
    hub.requests.clear()
    assert files_of(ask(hub, tmp_path, "acme/tiny"))[SHARDS[0]] == FILES[SHARDS[0]]
    assert [asked.sent for asked in hub.bodies()] == [len(FILES[SHARDS[0]])]


def test_processes_that_start_together_download_once(hub: Hub, tmp_path: Path) -> None:
    both = [started(hub, tmp_path, "acme/tiny") for _ in range(3)]
    answers = [json.loads(process.communicate(timeout=100)[0]) for process in both]

    assert len({answer["found"] for answer in answers}) == 1
    assert len(hub.bodies()) == 2


def test_pickles_alone_are_refused_and_not_asked_for(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["acme/tiny"] = HubRepository({"config.json": b"{}", "pytorch_model.bin": b"x"})
    answer = ask(hub, tmp_path, "acme/tiny")
    assert answer["kind"] == "UnusableSettings"
    assert "never from pickles" in str(answer["error"])
    assert not any("pytorch_model.bin" in asked.path for asked in hub.requests)


def test_a_data_set_of_files_without_a_config_is_no_model(hub: Hub, tmp_path: Path) -> None:
    hub.repositories["acme/tiny"] = HubRepository({"README.md": b"x"})
    assert "has no config.json" in str(ask(hub, tmp_path, "acme/tiny")["error"])


def test_a_hub_that_cannot_be_reached_is_worth_a_later_try(hub: Hub, tmp_path: Path) -> None:
    answer = ask(replace(hub, url="http://127.0.0.1:9"), tmp_path, "acme/tiny")
    assert answer["kind"] == "NotReady"
    assert "http://127.0.0.1:9 cannot be reached" in str(answer["error"])


def test_a_cache_that_cannot_be_written_is_named(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("no directory")
    answer = ask(hub, home, "acme/tiny")
    assert answer["kind"] == "UnusableSettings"
    assert "HF_HOME" in str(answer["error"])


def test_a_model_larger_than_the_disk_is_refused_before_it_comes(tmp_path: Path) -> None:
    huge = {**FILES, SHARDS[0]: FILES[SHARDS[0]]}
    with hub_server(acme__tiny=HubRepository(huge, sizes={SHARDS[0]: 1 << 60})) as hub:
        answer = ask(hub, tmp_path, "acme/tiny")
        assert answer["kind"] == "UnusableSettings"
        assert "are to be downloaded" in str(answer["error"])
        assert hub.bodies() == []


def test_a_service_alone_finds_the_model_and_serves_it_under_its_name(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
    program = (
        "from moesaic.models.weights.served import find_served_model\n"
        "from moesaic.services.attention.settings import AttentionSettings\n"
        "from moesaic.usage.reading import read_settings\n"
        "settings = read_settings(AttentionSettings, ['--model', 'acme/demo@main'])\n"
        "config, checkpoint = find_served_model(settings)\n"
        "print(settings.name_of_model, config.moe.num_experts, checkpoint.directory.name)\n"
    )
    with hub_server(acme__demo=HubRepository(files)) as hub:
        environment = {**os.environ, **hub.variables(tmp_path)}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"acme/demo 32 {commit_of(files)}"
    assert "model.downloading" in done.stdout
