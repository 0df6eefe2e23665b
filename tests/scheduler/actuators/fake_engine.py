"""A container engine of tests: real HTTP over a Unix socket, and processes that end when a test says so."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.http_servers import JsonHandler, serving

LABELS = "com.docker.compose."


class FakeEngine:
    """Containers by id, and what the engine was asked."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []  # that change something
        self.signals: dict[str, int] = {}  # by the id of a container
        self.refusal = ""
        self.drains = False  # processes go on after a signal, until finish()
        self._lock = threading.Lock()
        self._made = 0
        self._stopping: set[str] = set()  # told to stop, and still running
        self._ended: dict[str, threading.Event] = {}

    def add(
        self, service: str, number: int, *, project: str = "suite", state: str = "running"
    ) -> str:
        """Put a container of compose's there."""
        name = f"{project}-{service}-{number}"
        labels = {
            f"{LABELS}project": project,
            f"{LABELS}service": service,
            f"{LABELS}container-number": str(number),
            f"{LABELS}oneoff": "False",
        }
        aliases = [name, service, f"{service}.control"]
        config = {
            "Image": f"image-of-{service}",
            "Env": ["MOESAIC_SLOTS_PER_LAYER=4"],
            "Labels": labels,
            "StopTimeout": 45,
        }
        host = {"NetworkMode": f"{project}_control", "ReadonlyRootfs": True}
        networks = {f"{project}_control": {"Aliases": aliases, "IPAddress": "10.0.0.7"}}
        order = {
            **config,
            "HostConfig": host,
            "NetworkingConfig": {"EndpointsConfig": networks},
        }
        return self._create(name, order, state)

    def names(self, *states: str) -> list[str]:
        """The names of containers in any of these states."""
        found = self.containers.values()
        return sorted(c["Name"][1:] for c in found if c["State"]["Status"] in states)

    def finish(self) -> None:
        """Let the processes that were told to stop end."""
        with self._lock:
            for identity in self._stopping & self.containers.keys():
                self.containers[identity]["State"]["Status"] = "exited"
                self._ended[identity].set()
            self._stopping.clear()

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Status and body of one call."""
        if self.refusal:
            return 500, {"message": self.refusal}
        if method != "GET":
            self.calls.append(f"{method} {path}")
        parts = path.split("/")[1:]
        if parts[0] != "containers":
            return 404, {"message": "page not found"}
        if parts[1:] == ["json"]:
            return 200, self._listed(json.loads(query["filters"])["label"])
        if parts[1:] == ["create"]:
            with self._lock:
                if query["name"] in self.names("running", "created", "exited"):
                    return 409, {"message": f"Conflict. The name {query['name']} is in use"}
                return 201, {"Id": self._create(query["name"], body, "created")}
        with self._lock:
            if parts[1] not in self.containers:
                return 404, {"message": f"No such container: {parts[1]}"}
        verb = parts[2] if len(parts) > 2 else "remove"
        return getattr(self, f"_{verb}")(parts[1], query)  # type: ignore[no-any-return]

    def _create(self, name: str, order: dict[str, Any], state: str) -> str:
        self._made += 1
        identity = f"{self._made:012x}".ljust(64, "0")
        config = {k: v for k, v in order.items() if k not in ("HostConfig", "NetworkingConfig")}
        self.containers[identity] = {
            "Id": identity,
            "Name": f"/{name}",
            "State": {"Status": state},
            "Config": {"Hostname": identity[:12], **config},
            "HostConfig": order["HostConfig"],
            "NetworkSettings": {"Networks": order["NetworkingConfig"]["EndpointsConfig"]},
        }
        self._ended[identity] = threading.Event()
        return identity

    def _listed(self, wanted: list[str]) -> list[dict[str, Any]]:
        pairs = {tuple(label.split("=", 1)) for label in wanted}
        return [
            {
                "Id": c["Id"],
                "Names": [c["Name"]],
                "State": c["State"]["Status"],
                "Status": c["State"].get("Text", ""),
                "Labels": c["Config"]["Labels"],
            }
            for c in list(self.containers.values())
            if pairs <= set(c["Config"]["Labels"].items())
        ]

    def _json(self, identity: str, query: dict[str, str]) -> tuple[int, Any]:
        return 200, self.containers[identity]

    def _start(self, identity: str, query: dict[str, str]) -> tuple[int, Any]:
        state = self.containers[identity]["State"]
        status = 304 if state["Status"] == "running" else 204
        state["Status"] = "running"
        self._ended[identity].clear()
        return status, None

    def _rename(self, identity: str, query: dict[str, str]) -> tuple[int, Any]:
        with self._lock:
            if self.containers[identity]["Name"] == f"/{query['name']}":
                return 400, {"message": "renaming a container with the same name"}
            if query["name"] in self.names("running", "created", "exited"):
                return 409, {"message": "Conflict"}
            self.containers[identity]["Name"] = f"/{query['name']}"
        return 204, None

    def _stop(self, identity: str, query: dict[str, str]) -> tuple[int, Any]:
        with self._lock:
            if self.containers[identity]["State"]["Status"] != "running":
                return 304, None
            self.signals[identity] = self.signals.get(identity, 0) + 1
            self._stopping.add(identity)
        if not self.drains:
            self.finish()
        self._ended[identity].wait()
        return 204, None

    def _remove(self, identity: str, query: dict[str, str]) -> tuple[int, Any]:
        with self._lock:
            if self.containers[identity]["State"]["Status"] == "running":
                return 409, {"message": "cannot remove a running container"}
            del self.containers[identity]
        return 204, None


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False

    engine: FakeEngine

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent: callers of stop hang up."""


class _Handler(JsonHandler):
    server: _Server

    def do_any(self) -> None:
        url = urlsplit(self.path)
        version, _, path = url.path[1:].partition("/")
        assert version == "v1.44"
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.answer(*self.server.engine.answer(self.command, f"/{path}", query, self.body()))

    do_GET = do_POST = do_DELETE = do_any


@contextmanager
def engine_at(path: Path) -> Iterator[FakeEngine]:
    """A fake engine that listens at a socket."""
    engine = FakeEngine()
    with serving(_Server(str(path), _Handler)) as server:
        server.engine = engine
        try:
            yield engine
        finally:
            engine.finish()
