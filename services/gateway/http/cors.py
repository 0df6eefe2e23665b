"""Calls from web pages of other origins, as far as the operator names these (CORS)."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from moesaic.origins import listed

# Of the answers' own headers, those that say something to a page.
_EXPOSED = (
    *("request-id", "retry-after", "retry-after-ms", "x-moesaic-ignored", "x-request-id"),
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
    "x-should-retry",
)


def with_cors(app: ASGIApp, origins: str, methods: str, headers: str, credentials: bool) -> ASGIApp:
    """Put the layer around an application that lets pages of some origins read its answers; none: no layer."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=listed(origins),
        allow_methods=listed(methods),
        allow_headers=listed(headers),
        allow_credentials=credentials,
        expose_headers=_EXPOSED,
    )
