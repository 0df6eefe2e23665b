"""Names of models."""

from pathlib import Path

import pytest

from moesaic.model_names import Repository, demo_model, name_of_model, repository_of


@pytest.mark.parametrize(
    ("text", "name", "revision"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", ""),
        ("openai/gpt-oss-20b@main", "openai/gpt-oss-20b", "main"),
        ("a/b.c_d@refs/pr/1", "a/b.c_d", "refs/pr/1"),
    ],
)
def test_repositories_are_read(text: str, name: str, revision: str) -> None:
    assert repository_of(text) == Repository(name, revision)
    assert str(repository_of(text)) == text
    assert name_of_model(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "model",
        "/models/demo",
        "./a/b",
        "../a/b",
        "a/b/c",
        "a--b/c",
        "a/b..c",
        "a/",
        "/b",
        "a/b@",
        "-a/b",
        "a/b ",
        "~/b",
        "models/demo",
        "models/demo@main",
        "Models/demo",
    ],
)
def test_paths_are_no_repositories(text: str) -> None:
    assert repository_of(text) is None


def test_a_directory_that_is_there_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert repository_of("acme/tiny") is not None
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert repository_of("acme/tiny") is None
    assert name_of_model("acme/tiny") == "tiny"


def test_a_path_below_a_directory_that_is_there_is_no_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()

    assert repository_of("checkpoints/tinny") is None
    assert repository_of("checkpoints/tinny@main") == Repository("checkpoints/tinny", "main")


def test_the_demo_is_found_here_or_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo_model() == Path(__file__).parents[1] / "models" / "demo"

    (tmp_path / "models" / "demo").mkdir(parents=True)
    assert demo_model() == Path("models/demo")


def test_a_directory_of_the_hubs_cache_has_the_repositorys_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--tiny-MoE" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    assert name_of_model(str(snapshot)) == "acme/tiny-MoE"
    assert name_of_model(str(tmp_path / "demo")) == "demo"
