import socket

import pytest

from moesaic.addresses import (
    host_port,
    is_address,
    is_everywhere,
    is_host_port,
    is_name,
    is_of_this_machine,
    own_addresses_of,
)


@pytest.mark.parametrize(
    ("host", "address", "name", "everywhere"),
    [
        ("10.0.0.5", True, False, False),
        ("fd00::2", True, False, False),
        ("0.0.0.0", True, False, True),
        ("::", True, False, True),
        ("expert.tensors", False, True, False),
        ("my_host-1.lan.", False, True, False),
        ("123456789012", False, True, False),  # a container's id may look so
        ("10.0.0.256", False, False, False),
        ("10.1", False, False, False),
        ("10.0.0.5:8000", False, False, False),
        ("http://expert", False, False, False),
        ("[::1]", False, False, False),
        ("two words", False, False, False),
        ("", False, False, False),
    ],
)
def test_addresses_names_and_mistakes_are_told_apart(host, address, name, everywhere):
    assert (is_address(host), is_name(host), is_everywhere(host)) == (address, name, everywhere)


def test_an_ipv6_address_is_bracketed_before_its_port():
    assert host_port("::1", 80) == "[::1]:80"
    assert host_port("127.0.0.1", 80) == "127.0.0.1:80"


def test_a_machine_has_its_loopback_and_not_the_addresses_of_others():
    assert is_of_this_machine("127.0.0.1")
    assert not is_of_this_machine("198.51.100.1")  # set aside for documentation


def test_localhost_is_an_address_of_this_machine():
    assert own_addresses_of("localhost")[0] == "127.0.0.1"


def test_of_the_replicas_under_one_name_each_finds_itself(monkeypatch):
    answers = ["198.51.100.1", "127.0.0.9", "198.51.100.2", "0.0.0.0", "127.0.0.3", "127.0.0.9"]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (a, 0)) for a in answers]
    )

    assert own_addresses_of("expert.tensors") == ["127.0.0.3", "127.0.0.9"]


@pytest.mark.parametrize("name", ["nobody.invalid", "a..b", "x" * 70])
def test_a_name_that_stands_for_nothing_has_no_address(name):
    assert own_addresses_of(name) == []


@pytest.mark.parametrize("address", ["h:1", "127.0.0.1:65535", "[::1]:80", "a-b.c_d:7000"])
def test_a_host_and_a_port_can_be_dialled(address: str) -> None:
    assert is_host_port(address)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "h",
        "h:",
        ":1",
        "h:0",
        "h:65536",
        "h:1 ",
        "\x00:1",
        "unix:/x",
        "dns://h:1",
        "é:1",
        "::1:8",
    ],
)
def test_other_texts_cannot_be_dialled(address: str) -> None:
    assert not is_host_port(address)
