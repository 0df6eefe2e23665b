"""Every log-likelihood that lm-evaluation-harness gets through ``/v1/completions`` is the one that ``transformers``
computes with the same weights, wherever the experts are: five sets of 120, whose continuations the model likes to end.

``make lm-eval`` runs this alone, and prints a line a set and topology.
"""

import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients.harness import asked, evaluate, write_rows
from tests.suites import DEMO, ROOT, running

pytestmark = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="lm_eval: make test-clients installs it"
)
TOPOLOGIES = {
    "local": ("--topology", "local"),
    "disaggregated": ("--topology", "disaggregated"),
    "gathered": ("--topology", "gathered", "--attention", "2"),
}
CLASSIFICATION = ROOT / "models/training/data/classification"
BIGBENCH = ROOT / "benchmarks/data/bigbench"
LIKELIHOODS = 120  # of each set
MAX_LABELS = 10  # of a question
MAX_TEXT_CHARS = 1500
TOLERANCE = 1e-4
SETS = {
    "clinc_domain": CLASSIFICATION / "clinc_domain.test.jsonl.gz",
    "banking77": CLASSIFICATION / "banking77.test.jsonl.gz",
    "boolq": CLASSIFICATION / "boolq.test.jsonl.gz",
    "pubmedqa": CLASSIFICATION / "pubmedqa.test.jsonl.gz",
    "implicatures": BIGBENCH / "bb_implicatures.eval.jsonl.gz",
}


class Likelihood(NamedTuple):
    """The likelihood of one continuation by ``transformers``, and whether the model would end behind it."""

    logprob: float
    ends: bool


def questions(path: Path) -> list[dict[str, Any]]:
    """Rows as lm_eval takes them, evenly out of a file, with as many answers together as a set shall have."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [row for row in map(json.loads, file) if len(row["text"]) <= MAX_TEXT_CHARS]
    num_labels = min(MAX_LABELS, len(rows[0]["labels"]))
    count = LIKELIHOODS // num_labels
    return [_question(row, num_labels) for row in rows[:: len(rows) // count][:count]]


def _question(row: dict[str, Any], num_labels: int) -> dict[str, Any]:
    right = row["label"]
    others = [i for i in range(len(row["labels"])) if i != right][: num_labels - 1]
    chosen = sorted([right, *others])
    labels = [row["labels"][i] for i in chosen]
    prompt = asked(labels, row["text"])
    return {"prompt": prompt, "answers": labels, "label": chosen.index(right)}


@pytest.fixture(scope="module")
def sets() -> dict[str, list[dict[str, Any]]]:
    """The questions of every set."""
    return {name: questions(path) for name, path in SETS.items()}


@pytest.fixture(scope="module")
def expected(sets: dict[str, list[dict[str, Any]]]) -> dict[tuple[str, str], Likelihood]:
    """By prompt and continuation, what ``transformers`` computes."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # so small a model gains nothing by more
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def of_row(row: dict[str, Any]) -> list[Likelihood]:
        wholes = [ids_of(row["prompt"] + answer) for answer in row["answers"]]
        longest = max(map(len, wholes))
        padded = torch.tensor([whole + [0] * (longest - len(whole)) for whole in wholes])
        logprobs = model(padded).logits.log_softmax(-1)  # what stands behind a row changes nothing
        # lm_eval counts blank space at the end of a prompt as the continuation's.
        first = len(ids_of(row["prompt"].rstrip()))
        return [
            Likelihood(
                sum(float(told[at - 1, whole[at]]) for at in range(first, len(whole))),
                int(told[len(whole) - 1].argmax()) == model.config.eos_token_id,
            )
            for whole, told in zip(wholes, logprobs, strict=True)
        ]

    with torch.inference_mode():
        return {
            (row["prompt"], answer): told
            for rows in sets.values()
            for row in rows
            for answer, told in zip(row["answers"], of_row(row), strict=True)
        }


def task(name: str, rows: list[dict[str, Any]], directory: Path) -> str:
    """Write one task of lm_eval; gives its name."""
    data = directory / f"{name}.jsonl"
    write_rows(rows, data)
    described = {
        "task": f"moesaic_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (directory / f"{name}.yaml").write_text(json.dumps(described))  # JSON is YAML
    return f"moesaic_{name}"


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_log_likelihood_is_that_of_transformers(
    topology: str,
    sets: dict[str, list[dict[str, Any]]],
    expected: dict[tuple[str, str], Likelihood],
    tmp_path: Path,
) -> None:
    tasks = {name: task(name, rows, tmp_path) for name, rows in sets.items()}
    with running(tmp_path, *TOPOLOGIES[topology]) as suite:
        told = evaluate(suite.url, tmp_path, list(tasks.values()), tmp_path)

    worst = {}
    for name, rows in sets.items():
        wanted = [expected[row["prompt"], answer] for row in rows for answer in row["answers"]]
        got = [logprob for row in told[tasks[name]] for logprob in row]
        off = [abs(a - b.logprob) for a, b in zip(got, wanted, strict=True)]
        alike, ends = sum(each <= TOLERANCE for each in off), sum(each.ends for each in wanted)
        print(
            f"{topology:14}{name:14}{alike:4} of {len(off)} within {TOLERANCE:g}, "
            f"at most {max(off):.1e} off; the model would end behind {ends}"
        )
        assert len(off) == LIKELIHOODS
        worst[name] = max(off)
    assert max(worst.values()) <= TOLERANCE, worst
    assert any(each.ends for each in expected.values())  # or nothing was tried
