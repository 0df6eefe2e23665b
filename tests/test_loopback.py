import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.loopback import is_loopback, plain_host, read_address

LOOPBACK = {
    "127.0.0.1": "127.0.0.1",
    "127.0.0.2": "127.0.0.2",
    "127.255.255.254": "127.255.255.254",
    "127.1": "127.0.0.1",
    "127.0.1": "127.0.0.1",
    "2130706433": "127.0.0.1",
    "0x7f000001": "127.0.0.1",
    "0X7F.1": "127.0.0.1",
    "0177.0.0.01": "127.0.0.1",
    "::1": "::1",
    "[::1]": "::1",
    "0:0:0:0:0:0:0:1": "::1",
    "0000::0001": "::1",
    "::0.0.0.1": "::1",
    "::1%lo": "::1",
    "[::1%lo]": "::1",
    "::ffff:127.0.0.1": "127.0.0.1",
    "[::FFFF:7f00:1]": "127.0.0.1",
    "localhost": "localhost",
    "LocalHost": "localhost",
    "localhost.": "localhost",
    "shop.localhost": "shop.localhost",
}

ELSEWHERE = [
    "", ".", "0.0.0.0", "0", "::", "[::]", "::ffff:0.0.0.0", "10.0.0.1", "126.255.255.255", "128.0.0.1",
    "2130706432.1", "4294967296", "127.0.0.1.evil.com", "127.0.0.1.", "127.0.0.256", "127.0.0.1 evil",
    "127.0.0.1\n", "127.0.0.1:80", "[::1]:80", "[127.0.0.1]", "[::1", "::1]", "[[::1]]", "[localhost]",
    "::2", "::127.0.0.1", "::ffff:128.0.0.1", "fe80::1%lo", "64:ff9b::7f00:1", "localhost.evil.com",
    "evillocalhost", ".localhost", "a/b.localhost", "localhost..",
    "localhost:80", "user@localhost", "localhost ", "lo", "ip6-localhost",
    "\uff11\uff12\uff17.0.0.1", "localho\u017ft",  # what NFKC makes 127 and s
]  # fmt: skip


@pytest.mark.parametrize(("host", "plain"), LOOPBACK.items())
def test_every_spelling_of_loopback_is_loopback(host, plain):
    assert is_loopback(host)
    assert plain_host(host) == plain


@pytest.mark.parametrize("host", ELSEWHERE)
def test_what_others_reach_is_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("[fd00::2]", "fd00::2"),
        ("10.0.0.5", "10.0.0.5"),
        ("Expert.lan.", "Expert.lan."),
        ("[x]", "[x]"),
    ],
)
def test_other_hosts_lose_their_brackets_at_most(host, plain):
    assert plain_host(host) == plain


def spellings(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[str]:
    six = address if address.version == 6 else ipaddress.IPv6Address(f"::ffff:{address}")
    spelt = [six.compressed, six.exploded, six.compressed.upper()]
    spelt += [f"[{one}]" for one in spelt]
    if address.version == 4:
        a, b, c, d = address.packed
        spelt += [str(address), str(int(address)), hex(int(address)), f"0{int(address):o}"]
        spelt += [
            f"{a}.{int(address) & 0xFFFFFF}",
            f"{a}.{b}.{c * 256 + d}",
            f"{a:#x}.{b}.0{c:o}.{d}",
        ]
    return spelt


NEAR = st.integers(-3, 3).map(lambda off: ipaddress.IPv6Address((1 + off) % 2**128))


@given(st.ip_addresses() | st.ip_addresses(network="127.0.0.0/8") | NEAR)
def test_the_spelling_of_an_address_makes_no_difference(address):
    meant = getattr(address, "ipv4_mapped", None) or address

    for spelt in spellings(address):
        assert read_address(spelt) == meant
        assert is_loopback(spelt) == meant.is_loopback


@given(st.text() | st.from_regex(r"[0-9a-fx.:\[\]%]{0,24}", fullmatch=True))
def test_any_text_has_an_answer_and_its_plain_form_the_same(host):
    assert is_loopback(plain_host(host)) == is_loopback(host)
    assert plain_host(plain_host(host)) == plain_host(host)
