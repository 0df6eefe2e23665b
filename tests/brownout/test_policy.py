"""A policy of brownout that makes no sense is refused with the field and its fix."""

from typing import Any

import pytest

from moesaic.errors import InvalidInput
from moesaic.messages.brownout import BrownoutPolicy
from moesaic.messages.substitution import Substitution


def test_nothing_is_degraded_unless_told() -> None:
    assert BrownoutPolicy().checked().mode == "off"


@pytest.mark.parametrize(
    ("fields", "field", "fix"),
    [
        ({"mode": "on"}, "mode", "must be one of off, manual, paper, auto, got 'on'"),
        ({"rule": "rows"}, "rule", "must be one of tokens, instances, got 'rows'"),
        ({"prefill_threshold": 1.1}, "prefill_threshold", "must be in 0..1, got 1.1"),
        ({"decode_threshold": float("nan")}, "decode_threshold", "must be in 0..1, got nan"),
        ({"slo_ttft_s": 0}, "slo_ttft_s", "must be in 0.001..3600, got 0"),
        ({"shrink": 1.0}, "shrink", "must be in 0.01..0.99, got 1"),
        ({"way": 3}, "way", "must be 0 for none, or 2, 4, 8 and so on, got 3"),
        ({"way": 1}, "way", "must be 0 for none, or 2, 4, 8 and so on, got 1"),
        (
            {"mode": "manual", "decode_threshold": 0.2, "min_decode_threshold": 0.5},
            "decode_threshold",
            "must be at least min_decode_threshold, which is 0.5",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_fix(fields: dict[str, Any], field: str, fix: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        BrownoutPolicy(**fields).checked()

    assert (caught.value.field, caught.value.fix) == (field, fix)


def test_without_united_experts_rows_make_do_with_fewer_by_the_same_rule() -> None:
    assert BrownoutPolicy(mode="auto").substitution == Substitution(instead="fewer")
    assert BrownoutPolicy(mode="auto", rule="instances").substitution.rule == "instances"
    assert BrownoutPolicy(mode="auto", way=4).substitution == Substitution(way=4, instead="united")
