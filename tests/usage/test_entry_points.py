"""Help and mistakes of a service come before what it computes with is loaded."""

import subprocess
import sys

HEAVY = ("torch", "numpy", "grpc", "redis", "fastapi", "ucxx")
CALL = f"""
import sys
from importlib import import_module
for name in {HEAVY}:
    sys.modules[name] = None
for role in ("attention", "expert", "gateway", "scheduler"):
    for flag in ("--help", "--log-lvl"):
        sys.argv = ["moesaic serve " + role, flag]
        try:
            import_module(f"moesaic.services.{{role}}.__main__").main()
        except SystemExit as end:
            print("status", end.code, flush=True)
"""


def test_services_explain_themselves_without_what_they_compute_with() -> None:
    done = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True)

    assert done.stdout.count("Usage: moesaic serve ") == done.stdout.count("status 0") == 4, done
    assert done.stdout.count("status 2") == 4
    assert done.stderr.count("did you mean --log-level?") == 4


def test_suites_are_started_where_the_project_is_not_installed() -> None:
    """The tests of other people's clients run in an environment of their own."""
    block = "import sys; sys.modules.update(dict.fromkeys(('grpc', 'moesaic', 'torch')))"
    call = f"{block}; import tests.suites; import tests.clients.conftest"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
