"""An API server of tests: HTTPS with a certificate of its own, tokens, roles, and versions of objects."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.certificates import certificate
from tests.http_servers import JsonHandler, serving


class FakeCluster:
    """Deployments by name, in the namespace ``moesaic``."""

    def __init__(self, directory: Path) -> None:
        self.url = ""
        self.directory = directory  # of the service account's files
        self.token = "first"
        self.may_scale = True
        self.replicas = {"attention": 1, "expert": 2}
        self.versions = {"attention": 10, "expert": 20}
        self.patches: list[tuple[str, int]] = []
        self.num_conflicts = 0  # to come: somebody else is faster

    @property
    def token_file(self) -> Path:
        return self.directory / "token"

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.crt"

    def answer(self, method: str, path: str, headers: Any, body: Any) -> tuple[int, Any]:
        """Status and body, as the API server gives them for the scale of a Deployment."""
        if headers["Authorization"] != f"Bearer {self.token}":
            return 401, _failure("Unauthorized")
        prefix, _, name = path.removesuffix("/scale").rpartition("/")
        if not self.may_scale or prefix != "/apis/apps/v1/namespaces/moesaic/deployments":
            return 403, _failure(f'User "system:serviceaccount" cannot {method} {path}')
        if name not in self.replicas:
            return 404, _failure(f'deployments.apps "{name}" not found')
        if method == "PATCH":
            if headers["Content-Type"] != "application/merge-patch+json":
                return 415, _failure("the body of the request was in an unknown format")
            if self.num_conflicts:
                self.num_conflicts -= 1
                self.versions[name] += 1
            version = body.get("metadata", {}).get("resourceVersion", str(self.versions[name]))
            if version != str(self.versions[name]):
                return 409, _failure("the object has been modified")
            self.patches.append((name, body["spec"]["replicas"]))
            self.replicas[name] = body["spec"]["replicas"]
            self.versions[name] += 1
        replicas = self.replicas[name]
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": name, "resourceVersion": str(self.versions[name])},
            "spec": {"replicas": replicas} if replicas else {},
        }


def _failure(message: str) -> dict[str, str]:
    return {"kind": "Status", "status": "Failure", "message": message}


class _Server(ThreadingHTTPServer):
    cluster: FakeCluster

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent: some callers do not trust us."""


class _Handler(JsonHandler):
    server: _Server

    def do_any(self) -> None:
        found = self.server.cluster.answer(self.command, self.path, self.headers, self.body())
        self.answer(*found)

    do_GET = do_PATCH = do_any


@contextmanager
def cluster_in(directory: Path) -> Iterator[FakeCluster]:
    """A fake API server, and the files that a pod of it has."""
    key = certificate_in(directory)
    cluster = FakeCluster(directory)
    cluster.token_file.write_text("first\n")
    (directory / "namespace").write_text("moesaic")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cluster.ca_file, key)
    server = _Server(("127.0.0.1", 0), _Handler)
    server.cluster, cluster.url = cluster, f"https://127.0.0.1:{server.server_port}"
    # Handshakes are left to the threads of the connections.
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    with serving(server):
        yield cluster


def certificate_in(directory: Path) -> Path:
    """Make a certificate for 127.0.0.1 that is its own authority, ``ca.crt``; returns its key's file."""
    directory.mkdir(exist_ok=True)
    certificate(directory, "tls").rename(directory / "ca.crt")
    return directory / "tls.key"
