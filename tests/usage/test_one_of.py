"""Choices that packages add are accepted and not shown."""

import pytest

from moesaic.errors import InvalidInput
from moesaic.messages.scheduling import SCHEDULINGS
from moesaic.placement.policies import POLICIES, require_policy
from moesaic.plugins import plugins
from moesaic.services.attention.settings import AttentionSettings
from moesaic.services.gateway.settings import GatewaySettings
from moesaic.usage.flags import flags_of


@pytest.mark.parametrize(
    ("model", "field", "kind"),
    [
        (AttentionSettings, "expert_scheduling", "expert_schedulings"),
        (GatewaySettings, "router_policy", "router_policies"),
    ],
)
def test_help_lists_our_own_and_settings_take_added_ones_too(
    model: type, field: str, kind: str
) -> None:
    (flag,) = (flag for flag in flags_of(model, {}) if flag.field == field)
    fixed = {"model": "models/demo", "redis_url": "redis://x"}

    assert len(plugins(kind)) == 5
    for name in plugins(kind):
        assert name not in flag.form
        assert getattr(model(**fixed, **{field: name}), field) == name
    with pytest.raises(ValueError, match=f"must be one of {flag.form.strip('<>').split('|')[0]}"):
        model(**fixed, **{field: "best"})


def test_the_scheduler_takes_added_policies_and_names_its_own() -> None:
    for policy in (*POLICIES, *plugins("placement_policies")):
        assert require_policy(policy) == policy
    with pytest.raises(InvalidInput) as refused:
        require_policy("best")

    named = set(str(refused.value).replace(",", " ").split())
    assert set(POLICIES) <= named
    assert not set(plugins("placement_policies")) & named


def test_a_code_of_a_scheduling_never_changes() -> None:
    assert SCHEDULINGS == ("aebs", "aebs-memory-bound", "static")
