"""Questions of every route through all processes: the numbers are the model's, and what is shared is computed once."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.parity.cases import Served
from moesaic.classification.candidates import Read
from moesaic.classification.decisions import Asked, put
from moesaic.classification.forms import Label, assemble, normal_form
from moesaic.classification.prompts import question
from moesaic.classification.relevance import Relevance
from moesaic.services.gateway.language import Language
from tests.suites import DEMO

PASSAGE = (
    "The ship left the harbour early in the morning, while the town was still asleep. Nobody but the old captain knew "
    "where it was going, and he told nobody. When the sun was up they saw the other ship."
)
STATEMENTS = ["There is a ship.", "It is about money.", "The captain is young."]
NUM_ROWS = 40


class Yardstick:
    """The demo model in this process: log-probabilities by one plain pass over prompt and candidate."""

    def __init__(self) -> None:
        self.language, self._served = Language(DEMO), Served(DEMO)

    def logprobs(self, read: Read) -> list[float]:
        return [self._logprob(read.prompt, candidate) for candidate in read.candidates]

    def _logprob(self, prompt: list[int], candidate: tuple[int, ...]) -> float:
        tokens = [*prompt, *candidate[:-1]]
        logits = self._served.forward([(tokens, 0, list(range(64)))])
        rows = logits[len(prompt) - 1 :].log_softmax(dim=-1)
        return sum(float(row[token]) for row, token in zip(rows, candidate, strict=True))


@pytest.fixture(scope="module")
def yardstick() -> Yardstick:
    return Yardstick()


@pytest.fixture
def client(local: Any) -> Iterator[httpx.Client]:
    with local.client() as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def near(value: float) -> Any:
    return pytest.approx(value, abs=1e-4)


def odds_of(logprobs: list[float]) -> tuple[float, float]:
    yes, no = map(math.exp, logprobs)
    return yes / (yes + no), yes + no


@pytest.mark.parametrize("method", ["sequence", "choice", "multi"])
def test_labels_have_the_probabilities_of_plain_passes(
    client: httpx.Client, yardstick: Yardstick, method: Any
) -> None:
    names = ["sea travel", "money", "the weather"]

    answer = post(client, "/v1/classify", input=PASSAGE, labels=names, method=method)

    [item] = answer["data"]
    form = normal_form(yardstick.language.dialogue, [Label(name) for name in names], method=method)
    expected = assemble(form, [yardstick.logprobs(read) for read in form.reads(PASSAGE)])
    assert item["label"] == expected.label
    assert item["probs"] == near(expected.probs)
    assert item["label_mass"] == near(expected.label_mass)


def test_decisions_scores_and_ranks_have_the_probabilities_of_plain_passes(
    client: httpx.Client, yardstick: Yardstick
) -> None:
    dialogue = yardstick.language.dialogue
    questions = [{"type": "predicate", "instructions": statement} for statement in STATEMENTS]
    decided = post(client, "/v1/decisions", input=PASSAGE, questions=questions)
    scored = post(client, "/v1/score", queries="ships", documents=STATEMENTS)
    ranked = post(client, "/rerank", query="ships", documents=STATEMENTS)

    for statement, answer in zip(STATEMENTS, decided["answers"], strict=True):
        read = put(dialogue, Asked("predicate", statement), "questions[0]").read(PASSAGE)
        told = answer["probability"], answer["label_mass"]
        assert told == near(odds_of(yardstick.logprobs(read)))
    relevance = Relevance(dialogue)
    expected = [
        odds_of(yardstick.logprobs(relevance.read("ships", statement))) for statement in STATEMENTS
    ]
    assert [(item["score"], item["label_mass"]) for item in scored["data"]] == [
        near(pair) for pair in expected
    ]
    for result in ranked["results"]:
        assert result["relevance_score"] == near(expected[result["index"]][0])
    order = [result["relevance_score"] for result in ranked["results"]]
    assert order == sorted(order, reverse=True)


def test_the_next_tokens_of_items_have_the_model_s_own_probabilities(
    client: httpx.Client, yardstick: Yardstick
) -> None:
    tokenizer = yardstick.language.tokenizer
    query, items = tokenizer.encode(PASSAGE, add_special_tokens=False), [" Then", " He"]
    labels = [tokenizer.encode(text, add_special_tokens=False)[0] for text in (" the", " was")]

    answer = post(
        client,
        "/generative_scoring",
        query=PASSAGE,
        items=items,
        label_token_ids=labels,
        apply_softmax=False,
    )

    for item, told in zip(items, answer["data"], strict=True):
        prompt = [*query, *tokenizer.encode(item, add_special_tokens=False)]
        logprobs = yardstick.logprobs(Read(prompt, tuple((label,) for label in labels)))
        assert told["probs"] == near([math.exp(value) for value in logprobs])
        assert told["label_mass"] == near(sum(told["probs"]))


def test_siblings_compute_their_prefix_once(wide: Any) -> None:
    """Two attention workers, and yet only the first sibling computes it."""
    unseen = f"{PASSAGE} This text was never asked about before."
    names = [f"subject number {i}" for i in range(12)]
    with wide.client() as client:
        ids = client.post("/tokenize", json={"prompt": unseen}).json()["tokens"]
        told = [
            post(
                client,
                "/v1/classify",
                input=unseen,
                labels=names,
                method="multi",
                moesaic={"provenance": True},
            )
            for _ in range(2)
        ]
        version = told[0]["moesaic"]["prompt_version"]

    fresh, again = (answer["usage"] for answer in told)
    assert len(told[0]["moesaic"]["workers"]) == 1
    assert version == Language(DEMO).dialogue.wording.version
    cached = fresh["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (len(names) - 1) * (len(ids) // 16) * 16
    # The second time the first sibling finds it as well.
    assert again["prompt_tokens_details"]["cached_tokens"] > cached
    assert again["prompt_tokens"] == fresh["prompt_tokens"]


@pytest.mark.parametrize(
    ("labels", "method"),
    [(["yes", "no"], "token"), (["banking", "travel", "small talk"], "choice")],
)
def test_a_label_of_one_token_is_the_greedy_answer_on_every_row(
    client: httpx.Client, clinc_domain: Path, labels: list[str], method: Any
) -> None:
    """The same model, asked to generate one of the labels' tokens, says what the prefill says."""
    language = Language(DEMO)
    texts = [json.loads(row)["text"] for row in clinc_domain.read_text().splitlines()[:NUM_ROWS]]
    form = normal_form(language.dialogue, [Label(name) for name in labels], "Which is it?", method)
    allowed = [token_id for [token_id] in form.candidates]

    prefilled = post(
        client,
        "/v1/classify",
        input=texts,
        labels=labels,
        method=method,
        instruction="Which is it?",
    )
    greedy = post(
        client,
        "/v1/completions",
        prompt=[next(form.reads(text)).prompt for text in texts],
        allowed_token_ids=allowed,
        temperature=0,
        max_tokens=1,
        return_token_ids=True,
    )
    words = question(texts[0], labels, "Which is it?", method)
    chat = post(
        client,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": words}],
        allowed_token_ids=allowed,
        temperature=0,
        max_tokens=1,
        return_token_ids=True,
    )

    said = [labels[allowed.index(choice["token_ids"][0])] for choice in greedy["choices"]]
    assert [item["label"] for item in prefilled["data"]] == said
    assert chat["choices"][0]["token_ids"] == greedy["choices"][0]["token_ids"]


def test_the_command_asks_about_each_label_by_itself(local: Any) -> None:
    command = ("classify", PASSAGE, "--method", "multi", "--json", "--labels")
    one, three = (local.cli(*command, labels) for labels in ("ship", "ship,money,weather"))

    assert (one.returncode, three.returncode) == (0, 0), one.stderr + three.stderr
    alone, together = json.loads(one.stdout), json.loads(three.stdout)
    assert together["num_classes"] == 3
    assert alone["probs"][0] == near(together["probs"][0])
