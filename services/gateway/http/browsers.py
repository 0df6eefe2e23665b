"""Web pages in a user's browser: they must not reach a gateway whose callers need no key.

A browser sends the requests of any page to this machine. Two things give such requests away: ``Host``, where somebody
has pointed a name of theirs to this machine (DNS rebinding), and the headers that tell of the page, which are a
browser's own. Other clients, such as curl and the packages that upload files as forms, send none of these.
"""

import ipaddress
import re
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from moesaic.addresses import is_address, is_everywhere
from moesaic.loopback import is_loopback
from moesaic.services.gateway.http.problems import HttpProblem, problem

EVERYWHERE = ("0.0.0.0", "::")  # what listens there has other names
_SAFE = ("GET", "HEAD")
_MAX_SHOWN = 100
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/\[\]]+))(?::\d*)?", re.ASCII)
_NUMERIC = re.compile(r"[0-9a-fx.]+", re.ASCII)  # such as 127.1, which means 127.0.0.1
_FIX = "set --api-key, or name it in --allowed-hosts"


class BrowserGuard:
    """Refuses requests that a page of another site has made."""

    def __init__(self, host: str, allowed_hosts: str) -> None:
        """Guard a gateway that listens on ``host``; ``allowed_hosts`` are its other names, with commas."""
        names = (host, *allowed_hosts.split(","))
        self._names = {_host_of(name.strip()) for name in names} - {"", *EVERYWHERE}
        # Nobody can point an address elsewhere, and a gateway in a container does not know that of its host.
        self._takes_addresses = not is_loopback(_host_of(host))

    def refusal(self, method: str, headers: Headers) -> HttpProblem | None:
        """Find what tells that a request is another site's."""
        # Each is told once by any client; to look at thousands would hold others up.
        for name in ("host", "origin", "referer"):
            if (times := len(headers.getlist(name))) > 1:
                return problem(
                    400, "invalid_request", f"the header {name} is there {times} times: send one"
                )
        host = headers.get("host", "")
        here = _host_of(host)
        # Only clients of HTTP/1.0 may leave the header out; no browser does.
        if "host" in headers and not self._answers_to(here):
            what = f"the host header names {host[:_MAX_SHOWN]!r}, which this gateway does not know"
            return problem(403, "host_not_allowed", f"{what}: {_FIX}")
        if "origin" in headers:
            return self._foreign("origin", headers["origin"], here)
        follows_link = method in _SAFE and headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site") == "cross-site" and not follows_link:
            what = "a page of another site must not use this gateway, which needs no key"
            return problem(403, "origin_not_allowed", f"{what}: set --api-key")
        # Browsers of before 2020 send forms without an origin.
        if method in _SAFE or "referer" not in headers:
            return None
        return self._foreign("referer", headers["referer"], here)

    def _foreign(self, header: str, page: str, here: str) -> HttpProblem | None:
        """``here`` is the host that the request is for."""
        host = _host_of(_authority_of(page))
        if host and (host == here or self._is_known(host)):
            return None
        what = f"the header {header} names {page[:_MAX_SHOWN]!r}, a page of another site"
        return problem(403, "origin_not_allowed", f"{what}: {_FIX}")

    def _answers_to(self, host: str) -> bool:
        if self._is_known(host):
            return True
        return self._takes_addresses and is_address(host) and not is_everywhere(host)

    def _is_known(self, host: str) -> bool:
        return host in self._names or is_loopback(host)


def _authority_of(url: str) -> str:
    """Take ``host:port`` out of the address of a page; empty: it is none of the web's."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that hold no address
        return ""
    return parts.netloc if parts.scheme in ("http", "https") else ""


def _host_of(authority: str) -> str:
    """Take the host out of ``host:port``, in the one spelling that hosts are compared in; empty: there is none."""
    if is_address(authority):
        return _spelled(authority)
    found = _AUTHORITY.fullmatch(authority)
    if found is None:
        return ""
    address, name = found.groups()
    if address is not None:
        return _spelled(address) if is_address(address) else ""
    if _NUMERIC.fullmatch(name):
        with suppress(OSError):
            return socket.inet_ntoa(socket.inet_aton(name))
    return str(name).lower().removesuffix(".")


def _spelled(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
