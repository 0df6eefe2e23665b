"""Every family gives the same tokens in float32, with experts in one process and in two or three others."""

import shutil
from pathlib import Path

import httpx
import pytest
import torch

from benchmarks.parity.cases import ParityCase, build_reference
from tests.suites import DEMO, Suite, running
from tests.waiting import HANG_S, eventually

FAMILIES = (
    *("gpt_oss", "deepseek_v2", "minimax_m2", "qwen3_moe", "mixtral", "qwen2_moe", "deepseek_v3"),
    *("glm4_moe", "olmoe", "granitemoe", "granitemoeshared", "ernie4_5_moe"),
)
TOPOLOGIES = (
    ("--topology", "gathered", "--attention", "2"),
    ("--topology", "all-to-all", "--attention", "2"),
    ("--topology", "local", "--offload"),
    ("--topology", "edge", "--agents", "2"),
)
VOCAB_SIZE = 4096  # of the demo model's tokenizer
PROMPTS = (1, 5, 40, 140)  # tokens; the last one's step has two parts
TOKENS = 32
WITHOUT_PYTHON = "moesaic_expert_answers_without_python_total"

Answers = list[tuple[list[int], list[float]]]  # token ids and their log-probabilities


def flags_of(model: Path) -> tuple[str, ...]:
    """Give a model the demo's tokenizer; returns the flags to serve it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model)
    return "--model", str(model), "--served-model-name", "tiny"


def flags_of_family(family: str, directory: Path) -> tuple[str, ...]:
    """The flags to serve a small random model of the family, which is made in ``directory``."""
    options = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.1}
    build_reference(ParityCase(family, "served", options), directory)
    return flags_of(directory)


def made(directory: Path) -> Path:
    """A new directory."""
    directory.mkdir()
    return directory


def answers(suite: Suite) -> Answers:
    """Greedy answers, alone and side by side."""
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(300, VOCAB_SIZE, (size,), generator=generator).tolist() for size in PROMPTS
    ]
    found = []
    for asked in (*([prompt] for prompt in prompts), prompts):
        body = {
            "model": "tiny",
            "prompt": asked,
            "max_tokens": TOKENS,
            "temperature": 0,
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{suite.url}/v1/completions", json=body, timeout=HANG_S)
        found += answer.raise_for_status().json()["choices"]
    return [(each["token_ids"], each["logprobs"]["token_logprobs"]) for each in found]


def assert_same(found: Answers, reference: Answers) -> None:
    """Compare tokens, and log-probabilities up to the order of sums."""
    assert all(len(ids) == TOKENS for ids, _ in reference)
    for (ids, logprobs), (right_ids, right_logprobs) in zip(found, reference, strict=True):
        assert ids == right_ids
        assert logprobs == pytest.approx(right_logprobs, abs=1e-4)


def answered_without_python(suite: Suite) -> float:
    """Layer requests that expert workers answered so."""
    experts = (p["name"] for p in suite.state()["processes"] if p["role"] == "expert")
    return sum(suite.metric(name, WITHOUT_PYTHON) for name in experts)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
@pytest.mark.parametrize("experts", [2, 3])
def test_tokens_of_a_family_do_not_depend_on_where_experts_are(
    family: str, experts: int, tmp_path: Path
) -> None:
    flags = flags_of_family(family, tmp_path / "model")
    with running(made(tmp_path / "local"), *flags, "--topology", "local") as suite:
        reference = answers(suite)

    with running(made(tmp_path / "apart"), *flags, "--experts", str(experts)) as suite:
        found = answers(suite)
        eventually(lambda: answered_without_python(suite) > 0)  # counted now and then

    assert_same(found, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_moe", "deepseek_v3", "glm4_moe", "olmoe", "granitemoe", "granitemoeshared"),
        *("ernie4_5_moe", "minimax_m2"),
    ],
)
def test_tokens_of_a_family_are_the_same_in_the_other_topologies(
    family: str, tmp_path: Path
) -> None:
    flags = flags_of_family(family, tmp_path / "model")
    with running(made(tmp_path / "alone"), *flags, "--topology", "local") as suite:
        reference = answers(suite)

    for number, topology in enumerate(TOPOLOGIES):
        with running(made(tmp_path / str(number)), *flags, *topology) as suite:
            assert_same(answers(suite), reference)
