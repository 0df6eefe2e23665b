"""Baselines are accepted and not shown."""

from typing import get_args

import pytest

from moesaic.errors import InvalidInput
from moesaic.messages.scheduling import BASELINES, CODES, SCHEDULINGS, ExpertScheduling
from moesaic.placement.policies import POLICIES, require_policy
from moesaic.placement.policies.baselines import BASELINES as POLICY_BASELINES
from moesaic.prefix.baselines import BASELINES as ROUTING_BASELINES
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.usage.flags import flags_of


def test_help_lists_what_is_to_be_used_and_settings_take_baselines_too():
    for model, field, baselines in (
        (AttentionSettings, "expert_scheduling", BASELINES),
        (GatewaySettings, "router_policy", tuple(ROUTING_BASELINES)),
    ):
        (flag,) = (flag for flag in flags_of(model, {}) if flag.field == field)

        for baseline in baselines:
            assert baseline not in flag.form
            settings = model(model="models/demo", redis_url="redis://x", **{field: baseline})
            assert getattr(settings, field) == baseline


def test_the_scheduler_takes_every_policy_and_names_those_to_serve_with():
    for policy in POLICIES:
        assert require_policy(policy) == policy
    with pytest.raises(InvalidInput) as refused:
        require_policy("best")

    assert "eplb-batches" in str(refused.value)
    assert not set(POLICY_BASELINES) & set(str(refused.value).replace(",", " ").split())


def test_a_code_of_a_scheduling_never_changes():
    assert tuple(CODES) == SCHEDULINGS == get_args(ExpertScheduling)
    assert CODES == {
        "aebs": 0,
        "aebs-memory-bound": 1,
        "static": 2,
        "first": 3,
        "metro": 4,
        "random": 5,
        "random-per-row": 6,
        "token-balanced": 7,
    }
