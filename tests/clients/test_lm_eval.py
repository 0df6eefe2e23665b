"""lm-evaluation-harness measures the same through ``/v1/completions`` as ``/v1/classify`` answers."""

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.suites import CLINC_DOMAIN, Suite
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval: make test-clients installs it"
)
TASKS = Path(__file__).with_name("tasks")
ROWS = 40
LOGPROB = pytest.approx(0, abs=5e-5)  # float32 sums, in batches of other shapes


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Every hundredth row: they are sorted by label."""
    with gzip.open(CLINC_DOMAIN, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in list(file)[:: 4500 // ROWS]][:ROWS]


def asked(row: dict[str, Any]) -> str:
    """The prompt that a classification becomes, as text."""
    options = "; ".join(row["labels"])
    question = f"Classify the text. Choose exactly one of: {options}.\n\n{row['text']}"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def evaluate(suite: Suite, directory: Path, rows: list[dict[str, Any]]) -> tuple[float, list[Any]]:
    """Accuracy, and the log-likelihood of each label of each row, as lm_eval has them."""
    docs = [
        {
            "prompt": asked(row),
            "answers": [f"{label}<|im_end|>" for label in row["labels"]],
            "label": row["label"],
        }
        for row in rows
    ]
    (directory / "rows.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    model = f"model=demo,base_url={suite.url}/v1/completions,tokenizer_backend=remote"
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", f"{model},num_concurrent=2,max_retries=1,max_length=2048"),
        *("--tasks", "moesaic_clinc_domain", "--include_path", str(TASKS), "--batch_size", "16"),
        *("--output_path", str(directory / "out"), "--log_samples"),
    ]
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | {"HF_HOME": str(directory / "hf")},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [results] = directory.glob("out/*/results_*.json")
    [samples] = directory.glob("out/*/samples_*.jsonl")
    lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda s: s["doc_id"])
    told = [[float(logprob) for logprob, _ in line["filtered_resps"]] for line in lines]
    return json.loads(results.read_text())["results"]["moesaic_clinc_domain"]["acc,none"], told


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
        body = {"prompt": [asked(row) for row in rows], "max_tokens": 0, "prompt_logprobs": 0}
        choices = client.post("/v1/completions", json=body).json()["choices"]
    newlines = [next(iter(choice["prompt_logprobs"][-1].values()))["logprob"] for choice in choices]

    accuracy, theirs = evaluate(suite, tmp_path, rows)

    right = [
        row["labels"].index(mine["label"]) == row["label"]
        for row, mine in zip(rows, ours, strict=True)
    ]
    assert accuracy == sum(right) / ROWS
    for row, mine, told, newline in zip(rows, ours, theirs, newlines, strict=True):
        scored = {label["label"]: label["logprob"] for label in mine["labels"]}
        for label, logprob in zip(row["labels"], told, strict=True):
            assert logprob - newline - scored[label] == LOGPROB
