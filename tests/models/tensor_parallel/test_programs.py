"""What the ranks compute in a captured step is a rule of the model, and a rank refuses a step that breaks it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common.ranks import load_part
from benchmarks.parity.cases import CASES, ParityCase, build_reference
from moesaic.models.configuration.config import load_config
from moesaic.models.tensor_parallel.followed_steps import FollowedSteps, told_step
from moesaic.models.tensor_parallel.group import RankMessage
from moesaic.models.tensor_parallel.programs import (
    CapturedForm,
    RanksDiffer,
    described,
    parts_of,
)

# Dense layers and shared experts; neither.
LATENT, GROUPED = (
    next(c for c in CASES if c.name == "base" and c.family == family)
    for family in ("deepseek_v3", "qwen3_moe")
)
WHOLE, CUT = CapturedForm(4, 32, True), CapturedForm(4, 32, False)


@pytest.mark.parametrize("case", [LATENT, GROUPED], ids=str)
def test_a_whole_step_has_the_parts_of_its_segments(case: ParityCase, tmp_path: Path) -> None:
    build_reference(case, tmp_path)
    config = load_config(tmp_path)
    segments = parts_of(config, CUT)
    in_order = [part for segment in segments for part in segment]

    assert parts_of(config, WHOLE) == [in_order]
    attending = [index for kind, index in in_order if kind == RankMessage.ATTEND]
    assert attending == list(range(config.num_layers))
    assert in_order[-1] == (RankMessage.HEAD, 0)
    mlps = [index for kind, index in in_order if kind == RankMessage.MLP]
    assert mlps == (list(range(config.num_layers)) if config.moe.shared_expert_size else [])
    # Experts are asked behind each segment of a sparse layer, beside the shared one's.
    assert len(segments) == 1 + len(config.moe_layers) * (2 if mlps else 1)


def test_ranks_of_other_shapes_say_something_else(tmp_path: Path) -> None:
    build_reference(GROUPED, tmp_path)
    config = load_config(tmp_path)
    said = {
        described(config, form, block_size)
        for form in (WHOLE, CUT, CapturedForm(5, 32, True), CapturedForm(4, 33, True))
        for block_size in (8, 16)
    }

    assert len(said) == 8


class Alone:
    """A group whose other ranks say nothing."""

    rank = 1

    def agree(self, what: str) -> bool:
        return True


@pytest.mark.parametrize(
    ("size", "kept", "last"),
    [(2, 1, 3), (4, 2, 3), (1, 1, 32), (8, 8, 3), (1, 1, 3)],
    ids=["one row in two", "two rows in four", "too long", "too many", "not captured"],
)
def test_a_step_that_has_another_size_here_is_refused(
    size: int, kept: int, last: int, tmp_path: Path
) -> None:
    build_reference(GROUPED, tmp_path)
    decoder, group = load_part(tmp_path, 1, 2), Alone()
    there: Any = group
    steps = FollowedSteps(decoder, there, decoder.new_kv_cache(16, 8), WHOLE)
    facts = np.full((3, size), last, np.int64)
    facts[2, kept:] = -1

    with pytest.raises(RanksDiffer, match=f"rank 0 computes {kept} rows by a graph of {size}"):
        steps.compute(size, told_step(facts, np.zeros((size, 4), np.int32)))
