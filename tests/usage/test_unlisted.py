"""Baselines are accepted and not shown."""

import pytest

from moesaic.errors import InvalidInput
from moesaic.messages.scheduling import BASELINES, SCHEDULINGS
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
    assert SCHEDULINGS == (
        "aebs",
        "aebs-memory-bound",
        "static",
        "first",
        "metro",
        "random",
        "random-per-row",
        "token-balanced",
    )
