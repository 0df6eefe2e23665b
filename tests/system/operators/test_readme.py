"""The README's examples work as printed."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.suites import ROOT
from tests.waiting import HANG_S

README = (ROOT / "README.md").read_text()
PRINTED_URL = "http://127.0.0.1:8000"


def block(start: str, page: str = README) -> str:
    """The fenced block of a page that starts with these words."""
    blocks = re.findall(r"```(?:\w*)\n(.*?)```", page, re.DOTALL)
    return next(b for b in blocks if b.startswith(start))


def run(command: list[str], suite: Any) -> str:
    done = subprocess.run(
        command, cwd=suite.directory, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_curl_example_returns_a_label_of_the_request(disaggregated: Any) -> None:
    answer = run(
        ["bash", "-c", block("curl").replace(PRINTED_URL, disaggregated.url)], disaggregated
    )

    assert '"label":"credit cards"' in answer or '"label":"banking"' in answer


def test_the_openai_example_streams_text(disaggregated: Any) -> None:
    program = block("from openai").replace(PRINTED_URL, disaggregated.url)

    text = run([sys.executable, "-c", program], disaggregated)
    assert text.strip()  # sampled: an answer may end after a word or two


def test_the_command_line_examples_work(disaggregated: Any) -> None:
    for line in block(".venv/bin/moesaic classify").splitlines():
        command = line.replace(".venv/bin/moesaic", str(Path(sys.executable).with_name("moesaic")))
        command = command.replace("models/training", str(ROOT / "models/training"))
        if "--file" in command:
            command += " --limit 20"

        assert run(["bash", "-c", command], disaggregated)
