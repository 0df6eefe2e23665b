"""lm-evaluation-harness measures the same through ``/v1/completions`` as ``/v1/classify`` answers."""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.clients.harness import asked, evaluate, write_rows
from tests.suites import CLINC_DOMAIN, Suite

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval: make test-clients installs it"
)
TASKS, TASK = Path(__file__).with_name("tasks"), "moesaic_clinc_domain"
ROWS = 40
LOGPROB = pytest.approx(0, abs=5e-5)  # float32 sums, in batches of other shapes


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Every hundredth row: they are sorted by label."""
    with gzip.open(CLINC_DOMAIN, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in list(file)[:: 4500 // ROWS]][:ROWS]


def measured(suite: Suite, directory: Path, rows: list[dict[str, Any]]) -> tuple[float, list[Any]]:
    """Accuracy, and the log-likelihood of each label of each row, as lm_eval has them."""
    docs = [
        {
            "prompt": asked(row["labels"], row["text"]),
            "answers": [f"{label}<|im_end|>" for label in row["labels"]],
            "label": row["label"],
        }
        for row in rows
    ]
    write_rows(docs, directory / "rows.jsonl")
    told = evaluate(suite.url, directory, [TASK], TASKS)
    [results] = directory.glob("out/*/results_*.json")
    return json.loads(results.read_text())["results"][TASK]["acc,none"], told[TASK]


def test_accuracy_and_log_likelihoods_are_those_of_our_own_scoring(
    suite: Suite, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    with suite.client() as client:
        body = {
            "input": [row["text"] for row in rows],
            "labels": rows[0]["labels"],
            "method": "sequence",
        }
        ours = client.post("/v1/classify", json=body).json()["data"]
        # lm_eval counts blank space at the end of a prompt as the answer's: the newline before each label.
        prompts = [asked(row["labels"], row["text"]) for row in rows]
        body = {"prompt": prompts, "max_tokens": 0, "prompt_logprobs": 0}
        choices = client.post("/v1/completions", json=body).json()["choices"]
    newlines = [next(iter(choice["prompt_logprobs"][-1].values()))["logprob"] for choice in choices]

    accuracy, theirs = measured(suite, tmp_path, rows)

    right = [
        row["labels"].index(mine["label"]) == row["label"]
        for row, mine in zip(rows, ours, strict=True)
    ]
    assert accuracy == sum(right) / ROWS
    for row, mine, told, newline in zip(rows, ours, theirs, newlines, strict=True):
        scored = {label["label"]: label["logprob"] for label in mine["labels"]}
        for label, logprob in zip(row["labels"], told, strict=True):
            assert logprob - newline - scored[label] == LOGPROB
