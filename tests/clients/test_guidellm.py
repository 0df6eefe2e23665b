"""guidellm, a load generator, finds nothing wrong with a real suite."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.suites import DEMO, Suite
from tests.waiting import HANG_S

pytestmark = pytest.mark.skipif(
    find_spec("guidellm") is None, reason="guidellm: make test-clients installs it"
)
REQUESTS = 24


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_short_run_ends_without_errors(suite: Suite, tmp_path: Path, route: str) -> None:
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={suite.url},request_format={route}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--tokenizer", f"kind=hf_auto,model={DEMO}"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    counts: dict[str, Any] = benchmark["metrics"]["request_totals"]
    assert (counts["successful"], counts["errored"]) == (REQUESTS, 0), counts
    tokens = benchmark["metrics"]["output_token_count"]["successful"]
    assert tokens["mean"] == 8
