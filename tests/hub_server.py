"""A server that speaks the API of the Hugging Face hub, over real HTTP, for tests.

As the hub does, it answers for a large file with a redirect to another host, which gets no token.
"""

import hashlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PIECE_BYTES = 1 << 20
LARGE = ".safetensors"  # such files are in LFS


@dataclass
class HubRepository:
    """One model at the hub, with its revisions."""

    files: dict[str, bytes]
    tags: dict[str, dict[str, bytes]] = field(default_factory=dict)  # files by other revisions
    token: str = ""  # needed to read it
    gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)  # announced for files, instead of their own

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Find a commit with its files."""
        for name, files in {"main": self.files, **self.tags}.items():
            commit = commit_of(files)
            if revision in (name, commit):
                return commit, files
        return None


@dataclass(frozen=True)
class Asked:
    """A request that came."""

    method: str
    path: str
    token: str
    range: str
    sent: int  # bytes of a file


@dataclass
class Hub:
    """A running server and the faults that a test has it make."""

    repositories: dict[str, HubRepository]
    url: str = ""
    store_url: str = ""  # of large files
    requests: list[Asked] = field(default_factory=list)
    break_after: list[int] = field(
        default_factory=list
    )  # of the next bodies: bytes, then a broken connection
    damaged: set[str] = field(default_factory=set)  # digests of files that arrive with other bytes
    pause_s: float = 0.0  # between pieces of contents
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bodies(self) -> list[Asked]:
        """Requests for contents of large files."""
        return [
            asked
            for asked in self.requests
            if asked.method == "GET" and asked.path.startswith("/store/")
        ]

    def of_models(self) -> list[Asked]:
        """Requests about models, but for contents of large files."""
        return [
            asked
            for asked in self.requests
            if any(name in asked.path for name in self.repositories)
        ]

    def found_in_store(self, sha256: str) -> bytes:
        """Find a large file by its digest."""
        every = (files for r in self.repositories.values() for files in (r.files, *r.tags.values()))
        return next(
            c for files in every for c in files.values() if hashlib.sha256(c).hexdigest() == sha256
        )


def commit_of(files: dict[str, bytes]) -> str:
    """Name a commit by its contents."""
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()


@contextmanager
def hub_server(**repositories: HubRepository) -> Iterator[Hub]:
    """Serve repositories, by names with two underscores for the slash, until the block ends."""
    hub = Hub({name.replace("__", "/"): repository for name, repository in repositories.items()})

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    port = server.server_address[1]
    hub.url, hub.store_url = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def do_POST(self) -> None:
        self._answer(head=False)

    def _answer(self, *, head: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = path.strip("/").split("/")
        if parts[0] == "store":
            self._send_stored(parts[1], head=head)
            return
        self._note(0)
        name = "/".join(parts[2:4] if parts[:2] == ["api", "models"] else parts[:2])
        repository = self.hub.repositories.get(name)
        if repository is None or (
            repository.token and not repository.gated and not self._may_read(repository)
        ):
            self._refuse(
                HTTPStatus.UNAUTHORIZED if not self._token() else HTTPStatus.NOT_FOUND,
                "RepoNotFound",
            )
        elif parts[0] == "api":
            self._answer_api(repository, name, parts[4:], body)
        else:
            self._answer_file(repository, parts[3], "/".join(parts[4:]), head=head)

    def _answer_api(
        self, repository: HubRepository, name: str, rest: list[str], body: bytes
    ) -> None:
        what, revision = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        found = repository.at(revision)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "RevisionNotFound")
            return
        commit, files = found
        if what == "revision":
            siblings = [{"rfilename": file} for file in files]
            self._send_json({"id": name, "sha": commit, "siblings": siblings}, commit)
            return
        wanted: Any = files
        if what == "paths-info":
            asked = parse_qs(body.decode()) if not body.startswith(b"{") else json.loads(body)
            wanted = [path for path in asked["paths"] if path in files]
        self._send_json(
            [_entry(file, files[file], repository.sizes.get(file)) for file in wanted], commit
        )

    def _answer_file(
        self, repository: HubRepository, revision: str, file: str, *, head: bool
    ) -> None:
        if repository.gated and not self._may_read(repository):
            self._refuse(HTTPStatus.FORBIDDEN, "GatedRepo")
            return
        found = repository.at(revision)
        if found is None or file not in found[1]:
            self._refuse(HTTPStatus.NOT_FOUND, "EntryNotFound" if found else "RevisionNotFound")
            return
        commit, content = found[0], found[1][file]
        if not file.endswith(LARGE):
            headers = {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit}
            self._send(HTTPStatus.OK, content, headers, head=head)
            return
        sha256 = hashlib.sha256(content).hexdigest()
        headers = {
            "Location": f"{self.hub.store_url}/store/{sha256}",
            "X-Repo-Commit": commit,
            "X-Linked-ETag": f'"{sha256}"',
            "X-Linked-Size": str(len(content)),
        }
        self._send(HTTPStatus.FOUND, b"", headers, head=head)

    def _send_stored(self, sha256: str, *, head: bool) -> None:
        content = self.hub.found_in_store(sha256)
        if sha256 in self.hub.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        wanted = self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        headers = {"ETag": f'"{sha256}"'}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        status = HTTPStatus.PARTIAL_CONTENT if wanted else HTTPStatus.OK
        with self.hub.lock:
            limit = self.hub.break_after.pop(0) if self.hub.break_after and not head else None
        if limit is None:
            self._note(0 if head else len(content) - start)
            self._head_of(status, len(content) - start, headers)
            for at in range(start, 0 if head else len(content), PIECE_BYTES):
                self.wfile.write(content[at : at + PIECE_BYTES])
                time.sleep(self.hub.pause_s)
            return
        self._note(limit)
        self._head_of(status, len(content) - start, headers)
        self.wfile.write(content[start : start + limit])
        self.wfile.flush()
        self.close_connection = True

    def _send_json(self, value: Any, commit: str) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"X-Repo-Commit": commit}, head=False)

    def _refuse(self, status: HTTPStatus, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": code}, head=True)

    def _send(
        self, status: HTTPStatus, content: bytes, headers: dict[str, str], *, head: bool
    ) -> None:
        self._head_of(status, len(content), headers)
        if not head:
            self.wfile.write(content)

    def _head_of(self, status: HTTPStatus, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _note(self, sent: int) -> None:
        path, wanted = urlsplit(self.path).path, self.headers.get("Range", "")
        with self.hub.lock:
            self.hub.requests.append(Asked(self.command, path, self._token(), wanted, sent))

    def _token(self) -> str:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ")

    def _may_read(self, repository: HubRepository) -> bool:
        return self._token() == repository.token

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


def _entry(file: str, content: bytes, size: int | None) -> dict[str, Any]:
    size = size or len(content)
    entry: dict[str, Any] = {"type": "file", "path": file, "size": size, "oid": _oid(content)}
    if file.endswith(LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": 134}
    return entry


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
