"""A gateway without keys is opened to this machine alone, however its address is spelled."""

import socket

import pytest

from moesaic.cli.checks.exposure import check_exposure
from moesaic.cli.terminal.outcome import CommandError


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.7", "LOCALHOST", "::ffff:127.0.0.1", "127.1"])
def test_every_spelling_of_loopback_needs_no_key(host: str) -> None:
    check_exposure(host, wants_key=False, no_auth=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "127.0.0.1.evil.invalid", ""])
def test_what_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(CommandError, match=f"--host {host}: others could use the gateway"):
        check_exposure(host, wants_key=False, no_auth=False)
    check_exposure(host, wants_key=True, no_auth=False)
    check_exposure(host, wants_key=False, no_auth=True)


@pytest.mark.parametrize(
    ("addresses", "open_to_others"),
    [
        (["127.0.0.1"], False),
        (["127.0.1.1", "127.0.0.1"], False),
        (["127.0.0.1", "198.51.100.1"], False),  # not of this machine, so nobody listens there
        (["198.51.100.1"], True),
    ],
)
def test_a_name_is_as_open_as_the_address_that_it_stands_for(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], open_to_others: bool
) -> None:
    answers = [(0, 0, 0, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)

    if not open_to_others:
        check_exposure("ip6-localhost", wants_key=False, no_auth=False)
        return
    with pytest.raises(CommandError, match="others could use the gateway"):
        check_exposure("ip6-localhost", wants_key=False, no_auth=False)
