"""Checks of request heads by RFC 9110 and 9112, and targets that name a host."""

import re
from collections.abc import Sequence

from moesaic.services.gateway.http.problems import HttpProblem, problem

Header = tuple[bytes, bytes]  # the name in lower case, the value

VERSIONS = ("1.0", "1.1")
MAX_TARGET_BYTES = 32 << 10
_AUTHORITY = re.compile(rb"(?:\[[\w:.%~-]+\]|[\w.~!$&'()*+,;=%-]+)(?::\d*)?", re.ASCII)
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)([^#]*).*", re.IGNORECASE | re.DOTALL)


def fault_of(
    method: bytes, target: bytes, version: str, headers: Sequence[Header]
) -> HttpProblem | None:
    """Find the fault of a head that the parser accepts; None: it is valid."""
    if version == "0.9":
        return _invalid("the request line has no supported version of HTTP: use HTTP/1.1")
    if version not in VERSIONS:
        what = f"HTTP/{version} is not supported: use HTTP/1.1"
        return problem(505, "http_version_not_supported", what)
    if method == b"CONNECT":
        return problem(501, "not_implemented", "tunnels (CONNECT) are not supported")
    return (
        fault_of_length(target)
        or _fault_of_host(version, target, headers)
        or _fault_of_codings(version, headers)
    )


def fault_of_length(target: bytes) -> HttpProblem | None:
    """Refuse a target that is too long, also before all of it has arrived."""
    if len(target) <= MAX_TARGET_BYTES:
        return None
    what = f"the target of the request must be at most {MAX_TARGET_BYTES} bytes"
    return problem(414, "request_too_large", what)


def split_target(target: bytes) -> tuple[bytes | None, bytes]:
    """Split an absolute target into its host and the path with its query; other targets have no host."""
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        return None, target
    authority, path = found.groups()
    return authority, path if path.startswith(b"/") else b"/" + path


def _fault_of_host(version: str, target: bytes, headers: Sequence[Header]) -> HttpProblem | None:
    hosts = [value for name, value in headers if name == b"host"]
    named, path = split_target(target)
    if len(hosts) > 1:
        return _invalid(f"the request has {len(hosts)} host headers: send one")
    if not hosts and version != "1.0":
        return _invalid("the host header is missing")
    if not all(_AUTHORITY.fullmatch(host) for host in hosts):
        return _invalid("the host header must be a host, with or without a port")
    if named is not None and not _AUTHORITY.fullmatch(named):
        return _invalid("the target of the request names no host")
    if not path.startswith(b"/"):
        return _invalid("the target of the request must be a path, or a URL with http or https")
    return None


def _fault_of_codings(version: str, headers: Sequence[Header]) -> HttpProblem | None:
    """Refuse bodies whose end is ambiguous."""
    told = [value for name, value in headers if name == b"transfer-encoding"]
    if not told:
        return None
    if version == "1.0":
        return _invalid("HTTP/1.0 has no transfer-encoding: send a content-length")
    if any(name == b"content-length" for name, _ in headers):
        return _invalid("content-length and transfer-encoding contradict each other: send one")
    codings = [coding.strip(b" \t").lower() for coding in b",".join(told).split(b",")]
    if codings[-1] != b"chunked" or codings.count(b"chunked") > 1:
        return _invalid("the transfer-encoding must end with chunked, once")
    if len(codings) > 1:
        what = "the only supported transfer-encoding is chunked: remove the others"
        return problem(501, "not_implemented", what)
    return None


def _invalid(message: str) -> HttpProblem:
    return problem(400, "invalid_request", message)
