"""Models as they are published quantised give the same tokens with experts in one process and in others."""

from pathlib import Path

import pytest

from benchmarks.parity.cases import ParityCase, build_reference
from benchmarks.parity.published import FORMS, publish
from tests.suites import running
from tests.system.topologies.test_families import VOCAB_SIZE, answers, assert_same, flags_of, made

SIZES = {"hidden_size": 64, "vocab_size": VOCAB_SIZE, "initializer_range": 0.1}
MODELS = {
    "fp8, blocks of 128": ParityCase("deepseek_v2", "fp8", {**SIZES, "moe_intermediate_size": 32}),
    "awq, groups of 32": ParityCase("mixtral", "awq", {**SIZES, "intermediate_size": 96}),
    "mxfp4": ParityCase("gpt_oss", "mxfp4", {**SIZES, "intermediate_size": 32}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", MODELS)
def test_tokens_of_a_published_model_do_not_depend_on_where_experts_are(
    form: str, tmp_path: Path
) -> None:
    build_reference(MODELS[form], tmp_path / "float", save_original_format=True)
    [chosen] = [each for each in FORMS if each.name.startswith(form)]
    model = tmp_path / "model"
    publish(tmp_path / "float", model, tmp_path / "values", chosen)
    flags = flags_of(model)
    with running(made(tmp_path / "local"), *flags, "--topology", "local") as suite:
        reference = answers(suite)

    with running(made(tmp_path / "apart"), *flags, "--experts", "2") as suite:
        found = answers(suite)

    assert_same(found, reference)
