"""Servers of tests that answer with JSON, on a thread of their own."""

import json
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

Server = TypeVar("Server", bound=socketserver.BaseServer)


class JsonHandler(BaseHTTPRequestHandler):
    """Reads and writes JSON, and says nothing."""

    def body(self) -> Any:
        """What the caller has sent; None: nothing."""
        size = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(size)) if size else None

    def answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        """Answer; ``body`` None is an empty one, and has no length where HTTP allows none."""
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def event(self, event: Any) -> None:
        """Send an event of a stream; a text is sent as it is."""
        data = event if isinstance(event, str) else json.dumps(event)
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def address_string(self) -> str:
        return "test"  # a Unix socket's caller has no address

    def log_message(self, format: str, *args: Any) -> None:
        pass


class JsonServer(ThreadingHTTPServer):
    """Listens on a free port of loopback."""

    request_queue_size = 64

    def __init__(self, handler: type[JsonHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve on a thread for the length of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    with server:
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
