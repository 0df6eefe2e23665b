import re

import pytest

from moesaic.cluster.security import tokens as tokens_module
from moesaic.cluster.security.tokens import LIFETIME_S, MAX_LIFETIME_S, SKEW_S, TokenRefused, Tokens

NOW_S = 1_790_000_000


class Clock:
    def __init__(self, now_s: float = NOW_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tokens(clock: Clock) -> Tokens:
    return Tokens(b"the secret", clock)


def test_a_token_opens_its_scope_at_its_audience_and_admin_opens_all(tokens):
    for audience in ("*", "expert-0"):
        tokens.check(tokens.new("data", audience), "data", "expert-0")
        tokens.check(tokens.new("admin", audience), "data", "expert-0")
        tokens.check(tokens.new("admin", audience), "admin", "expert-0")


@pytest.mark.parametrize(
    ("token", "why"),
    [
        ("", "not a token of a cluster"),
        ("admin:*:1790000060:00:é", "not a token of a cluster"),
        ("x" * 600, "not a token of a cluster"),
        (Tokens(b"another", Clock()).new("admin"), "another secret: .*MOESAIC_SECRET"),
        (
            Tokens(b"the secret", Clock()).new("admin", "expert-1"),
            "for expert-1, but this is expert-0",
        ),
    ],
    ids=["empty", "not-ascii", "long", "another-secret", "another-audience"],
)
def test_what_proves_nothing_is_refused_with_what_to_do(tokens, token, why):
    with pytest.raises(TokenRefused, match=why) as refused:
        tokens.check(token, "data", "expert-0")
    assert not refused.value.allowed_more


def test_no_part_of_a_token_can_be_changed(tokens):
    token = tokens.new("data", "expert-0")
    for idx, letter in enumerate(token):
        forged = token[:idx] + ("0" if letter != "0" else "1") + token[idx + 1 :]
        with pytest.raises(TokenRefused):
            tokens.check(forged, "data", "expert-0")


def test_a_data_token_does_not_open_what_operators_may(tokens):
    with pytest.raises(TokenRefused, match="allows data, but this call needs admin") as refused:
        tokens.check(tokens.new("data"), "admin", "expert-0")
    assert refused.value.allowed_more


@pytest.mark.parametrize("skew_s", [-SKEW_S, SKEW_S])
def test_clocks_may_differ_by_minutes_and_no_more(tokens, clock, skew_s):
    fresh = tokens.new("data")
    clock.now_s = NOW_S + skew_s
    tokens.check(fresh, "data", "e")

    clock.now_s = NOW_S + LIFETIME_S + SKEW_S + 2
    with pytest.raises(TokenRefused, match=r"expired 30[0-9] s ago.*clocks"):
        tokens.check(fresh, "data", "e")
    clock.now_s = NOW_S
    with pytest.raises(TokenRefused, match=r"more than the limit of 86400.*clocks"):
        tokens.check(tokens.new("data", lifetime_s=MAX_LIFETIME_S + SKEW_S + 2), "data", "e")

    patient = Tokens(b"the secret", clock, skew_s=3600)
    for skew_s in (-3600, 3600):
        clock.now_s = NOW_S + skew_s
        patient.check(fresh, "data", "e")


def test_a_processs_own_token_is_made_once_and_renewed_before_it_expires(tokens, clock):
    first = tokens.current("data", "expert-0")
    clock.now_s += LIFETIME_S / 2 - 1
    assert tokens.current("data", "expert-0") == first
    assert tokens.current("admin", "expert-0") != first

    clock.now_s += 1
    assert tokens.current("data", "expert-0") != first
    clock.now_s -= 3600  # the clock was set back: an old token would be from the future
    assert re.match(
        rf"data:expert-0:{int(clock.now_s) + LIFETIME_S}:", tokens.current("data", "expert-0")
    )


def test_tokens_of_workers_that_are_gone_do_not_pile_up(tokens, clock):
    for number in range(100):
        tokens.current("data", f"expert-{number}")
        clock.now_s += LIFETIME_S

    assert len(tokens._current) <= 2


def test_macs_are_compared_in_constant_time(tokens, monkeypatch):
    compared = []

    def compare(one: str, other: str) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr(tokens_module.hmac, "compare_digest", compare)
    tokens.check(tokens.new("data"), "data", "e")

    assert len(compared) == 1
