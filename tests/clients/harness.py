"""Runs lm-evaluation-harness against a suite's ``/v1/completions``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import HANG_S


def asked(labels: list[str], text: str) -> str:
    """The prompt that a classification becomes, as text."""
    question = f"Classify the text. Choose exactly one of: {'; '.join(labels)}.\n\n{text}"
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def write_rows(rows: list[dict[str, Any]], to: Path) -> None:
    """Write a row a line."""
    to.write_text("".join(json.dumps(row) + "\n" for row in rows))


def evaluate(url: str, directory: Path, tasks: list[str], include: Path) -> dict[str, Any]:
    """By task, the log-likelihoods of the answers to each question.

    Results lie in ``out`` of ``directory``; the tasks are described in ``include``.
    """
    model = f"model=demo,base_url={url}/v1/completions,tokenizer_backend=remote"
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", f"{model},num_concurrent=2,max_retries=1,max_length=2048"),
        *("--tasks", ",".join(tasks), "--include_path", str(include), "--batch_size", "16"),
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
    return {name: _samples(directory, name) for name in tasks}


def _samples(directory: Path, name: str) -> list[list[float]]:
    [path] = directory.glob(f"out/*/samples_{name}_*.jsonl")
    lines = sorted(map(json.loads, path.read_text().splitlines()), key=lambda s: s["doc_id"])
    return [[float(logprob) for logprob, _ in line["filtered_resps"]] for line in lines]
