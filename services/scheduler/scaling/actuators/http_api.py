"""Short calls of an HTTP server that speaks JSON, as engines of containers and orchestrators do."""

import ssl
from typing import Any, NamedTuple

import httpx
import msgspec

from moesaic.errors import DeadlineExceeded, InvalidInput, NotReady

_DOCKER_PORT = 2375


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
        what: name of the server in errors.
        url: ``unix:///run/docker.sock``, ``tcp://host:port``, ``http://…`` or ``https://…``.
        setting: setting of the URL, for errors.
        ca_file: authority of the server's certificate, a PEM file; empty: those that the system trusts.
        timeout_s: time limit of connecting, and of each wait for the server.

    Raises:
        InvalidInput: the URL has no such form.
    """

    def __init__(
        self, what: str, url: str, *, setting: str, ca_file: str = "", timeout_s: float = 10.0
    ) -> None:
        self.what, self.url = what, url
        self._ca_file, self._timeout_s = ca_file, timeout_s
        self._base, self._socket = _base_of(url, setting)

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HttpAnswer:
        """Send a request and return the answer, with any status.

        Raises:
            DeadlineExceeded: the server has the request, and has not answered within ``timeout_s``.
            NotReady: the server cannot be reached, or does not speak HTTP.
        """
        timeout = httpx.Timeout(self._timeout_s, read=timeout_s or self._timeout_s)
        transport = httpx.AsyncHTTPTransport(
            verify=self._authority(), trust_env=False, uds=self._socket
        )
        try:
            async with httpx.AsyncClient(
                transport=transport, base_url=self._base, timeout=timeout, trust_env=False
            ) as client:
                response = await client.request(method, path, json=body, headers=headers)
        except httpx.ReadTimeout as error:
            waited_s = timeout.read or 0.0
            raise DeadlineExceeded(f"{self.what} at {self.url}", waited_s * 1000) from error
        except httpx.HTTPError as error:
            raise NotReady(f"{self.what} at {self.url}{self._fault(error)}") from error
        return HttpAnswer(response.status_code, _decoded(response.content))

    def _authority(self) -> ssl.SSLContext | bool:
        if self._base.scheme != "https":
            return False
        try:
            return ssl.create_default_context(cafile=self._ca_file or None)
        except OSError as error:
            raise NotReady(
                f"{self.what}: {self._ca_file} is not a certificate authority: {error}"
            ) from error

    def _fault(self, error: httpx.HTTPError) -> str:
        """Say in words what kept the server from answering."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            authority = self._ca_file or "the system's authorities"
            return f": its certificate is not trusted by {authority}: {error}"
        return f" cannot be reached: {error!r}"


def _base_of(url: str, setting: str) -> tuple[httpx.URL, str | None]:
    """Give the base of all requests' URLs, and the path of the Unix socket if there is one."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme == "unix" and not parsed.host and parsed.path.startswith("/"):
        return httpx.URL("http://localhost"), parsed.path
    if parsed.scheme in ("tcp", "http", "https") and parsed.host and parsed.path in ("", "/"):
        if parsed.scheme == "tcp":
            parsed = parsed.copy_with(scheme="http", port=parsed.port or _DOCKER_PORT)
        return parsed, None
    raise InvalidInput(
        setting, f"must be unix:///path, tcp://host:port or https://host:port, got {url!r}"
    )


def _decoded(data: bytes) -> Any:
    if not data:
        return {}
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return {"message": data.decode("utf-8", "replace")[:200].strip()}
