"""Completion as shells ask for it: bash by its own function, zsh by the variables that its function sets."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def environment(folder: Path) -> dict[str, str]:
    """A command ``moesaic`` on the path, as pip installs it."""
    program = folder / "moesaic"
    program.write_text(f"#!{sys.executable}\nfrom moesaic.cli.main import main\nmain()\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def by_bash(folder: Path, words: Sequence[str]) -> set[str]:
    script = """
    eval "$(_MOESAIC_COMPLETE=source_bash moesaic)"
    complete -p moesaic > /dev/null || exit 1
    function=$(complete -p moesaic | grep -o -- '-F [^ ]*' | cut -c 4-)
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    $function moesaic
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", *words],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def by_zsh(folder: Path, words: Sequence[str]) -> set[str]:
    asked = {"_MOESAIC_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": " ".join(words)}
    done = subprocess.run(
        ["moesaic"], env={**environment(folder), **asked}, capture_output=True, text=True
    )
    return set(re.findall(r'(?m)(?:\(|^)"([^"]+)"', done.stdout))


@pytest.mark.parametrize("shell", [by_bash, by_zsh])
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("up", "--max-num-s"), {"--max-num-seqs"}),
        (("up", "--standby-"), {"--standby-attention", "--standby-experts"}),
        (("up", "--log-level", "w"), {"warning"}),
        (("plan", "--quantiz"), {"--quantization"}),
        (("brownout", "set", "--mode", "p"), {"paper"}),
        (("serve", "expert", "--slots"), {"--slots-per-layer"}),
        (("sim",), {"simulate"}),
        (("distill", "--joint-th"), {"--joint-threshold"}),
    ],
)
def test_a_shell_completes_every_flag_and_its_choices(
    shell: Callable[..., set[str]], words: Sequence[str], found: set[str], tmp_path: Path
) -> None:
    assert shell(tmp_path, ("moesaic", *words)) == found
