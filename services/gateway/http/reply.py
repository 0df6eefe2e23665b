"""Successful answers as HTTP."""

from typing import Any

import msgspec
from starlette.responses import Response


def reply(body: Any) -> Response:
    """Encode a successful answer as JSON."""
    return Response(msgspec.json.encode(body), media_type="application/json")
