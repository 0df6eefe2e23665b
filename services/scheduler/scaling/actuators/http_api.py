"""Short calls of an HTTP server that speaks JSON, as engines of containers and orchestrators do."""

import asyncio
import http.client
import socket
import ssl
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from moesaic.errors import DeadlineExceeded, InvalidInput, NotReady

SCHEMES = ("unix", "tcp", "http", "https")
_PORTS = {"tcp": 2375, "http": 80, "https": 443}


class HttpAnswer(NamedTuple):
    """Status and decoded body; the body is empty where the server sent none."""

    status: int
    body: Any

    @property
    def message(self) -> str:
        """The server's own words about a failure."""
        said = self.body.get("message") if isinstance(self.body, dict) else ""
        return str(said or f"status {self.status}")


class HttpApi:
    """Calls one server over TCP, TLS or a Unix socket, with a connection for each call.

    Calls are rare, so nothing is kept open. The authority's certificate is read anew for each, because it is
    replaced while we run.

    Args:
        what: the server is in errors.
        url: ``unix:///run/docker.sock``, ``tcp://host:port``, ``http://…`` or ``https://…``.
        setting: that the URL comes from, for errors.
        ca_file: authority of the server's certificate, a PEM file; empty: those that the system trusts.
        timeout_s: of connecting, and of each wait for the server.

    Raises:
        InvalidInput: the URL has no such form.
    """

    def __init__(
        self, what: str, url: str, *, setting: str, ca_file: str = "", timeout_s: float = 10.0
    ) -> None:
        self.what, self.url, self._setting = what, url, setting
        self._ca_file, self._timeout_s = ca_file, timeout_s
        self._scheme, self._path, self._host, self._port = _parts(url, setting)

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """Send a request and return the answer, whatever its status is.

        Raises:
            DeadlineExceeded: the server has the request, and has not answered within ``timeout_s``.
            NotReady: the server cannot be reached, or does not speak HTTP.
        """
        sent = dict(headers or {})
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            sent.setdefault("Content-Type", "application/json")
        return await asyncio.to_thread(self._call, method, path, data, sent, timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        timeout_s: float | None,
    ) -> HttpAnswer:
        connection, timeout_s = self._connection(), timeout_s or self._timeout_s
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.request(method, path, data, headers)
            try:
                response = connection.getresponse()
            except TimeoutError as error:
                raise DeadlineExceeded(f"{self.what} at {self.url}", timeout_s * 1000) from error
            return HttpAnswer(response.status, _decoded(response.read()))
        except ssl.SSLCertVerificationError as error:
            authority = self._ca_file or "the system's authorities"
            raise NotReady(
                f"{self.what} at {self.url}: its certificate is not trusted by {authority}: "
                f"{error.verify_message}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise NotReady(f"{self.what} at {self.url} cannot be reached: {error!r}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._scheme == "unix":
            return _UnixConnection(self._path, self._timeout_s)
        if self._scheme == "https":
            try:
                context = ssl.create_default_context(cafile=self._ca_file or None)
            except (OSError, ssl.SSLError) as error:
                raise NotReady(f"{self.what}: {self._ca_file} is no authority: {error}") from error
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_s, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket's path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _parts(url: str, setting: str) -> tuple[str, str, str, int]:
    """Split a URL into scheme, path of the socket, host and port."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    usable = (
        parts.path.startswith("/") and not parts.netloc
        if parts.scheme == "unix"
        else bool(parts.hostname) and port != -1 and parts.path in ("", "/")
    )
    if parts.scheme not in SCHEMES or not usable:
        raise InvalidInput(
            setting, f"must be unix:///path, tcp://host:port or https://host:port, got {url!r}"
        )
    host = parts.hostname or ""
    return parts.scheme, parts.path, host, port or _PORTS.get(parts.scheme, 0)


def _decoded(data: bytes) -> Any:
    if not data:
        return {}
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {"message": data.decode("utf-8", "replace")[:200].strip()}
