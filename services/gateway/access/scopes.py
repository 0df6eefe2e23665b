"""Scopes that a caller's key needs, route by route: the one place where they are declared.

A route that is not named here needs ``infer``, so a new one is closed until somebody opens it.
"""

from moesaic.api_keys import Scope

NO_KEY = frozenset({"/livez", "/readyz", "/health"})
PROBED = NO_KEY | {"/metrics"}  # asked every few seconds by machines
ANY_KEY = frozenset({"/version", "/openapi.json", "/docs", "/docs/rapidoc.js"})
_SCOPES: dict[str, Scope] = {  # of these paths and all below them
    "/v1/files": "batch",
    "/v1/batches": "batch",
    "/metrics": "admin",
}


def scope_of(path: str) -> Scope | None:
    """Find the scope that a path outside ``NO_KEY`` needs; None: any key will do."""
    if path in ANY_KEY:
        return None
    for root, scope in _SCOPES.items():
        if path == root or path.startswith(f"{root}/"):
            return scope
    return "infer"
