"""The division of a model covers it: every head, width and token is in one rank, or shared by those that read it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parity.cases import CASES, build_reference
from moesaic.errors import UnusableSettings
from moesaic.models.configuration.architecture import GroupedQueryAttention, ModelConfig
from moesaic.models.configuration.config import load_config
from moesaic.models.configuration.division import divide, part_of

QWEN3 = next(case for case in CASES if str(case) == "qwen3_moe: base")
QWEN2 = next(case for case in CASES if str(case) == "qwen2_moe: dense layers named")


def config_of(case: object, directory: Path) -> ModelConfig:
    build_reference(case, directory)  # type: ignore[arg-type]
    return load_config(directory)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_of(QWEN3, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_of(QWEN2, tmp_path_factory.mktemp("qwen2"))


@given(
    kv_heads=st.integers(1, 12), groups=st.integers(1, 8), ranks=st.integers(1, 16), data=st.data()
)
def test_a_rank_has_the_key_heads_that_its_queries_read(
    qwen3: ModelConfig, kv_heads: int, groups: int, ranks: int, data: st.DataObject
) -> None:
    assert isinstance(qwen3.attention, GroupedQueryAttention)
    heads = kv_heads * groups
    attention = replace(qwen3.attention, num_heads=heads, num_kv_heads=kv_heads)
    config = replace(qwen3, attention=attention)
    rank = data.draw(st.integers(0, ranks - 1))
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        with pytest.raises(UnusableSettings, match="tensor_parallel"):
            divide(config, rank, ranks)
        return
    division = divide(config, rank, ranks)
    part = part_of(config, division).attention
    assert isinstance(part, GroupedQueryAttention)
    cut = division.cut_of("k_proj.weight")
    assert cut is not None
    first_key = cut.index * (kv_heads // cut.count)
    for mine in range(part.num_heads):
        query = rank * part.num_heads + mine
        here = mine // (part.num_heads // part.num_kv_heads)
        assert first_key + here == query // groups


@given(size=st.integers(1, 200), ranks=st.integers(1, 16))
def test_every_token_is_in_one_rank(qwen3: ModelConfig, size: int, ranks: int) -> None:
    one = divide(qwen3, 0, 1)
    parts = [replace(one, rank=rank, ranks=ranks).vocabulary(size) for rank in range(ranks)]

    assert [token for part in parts for token in part] == list(range(size))
    assert all(len(part) <= len(parts[0]) for part in parts)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dense_size": 63}, "63 numbers inside a dense layer"),
        ({"shared": 55}, "55 numbers inside the shared experts"),
    ],
)
def test_widths_that_cannot_be_divided_are_named(
    qwen2: ModelConfig, change: dict[str, int], told: str
) -> None:
    if "shared" in change:
        config = replace(qwen2, moe=replace(qwen2.moe, shared_expert_size=change["shared"]))
    else:
        config = replace(qwen2, **change)  # type: ignore[arg-type]

    with pytest.raises(UnusableSettings, match=told):
        divide(config, 0, 2)
