"""There is one list of variables, and it holds what the sources read, no more and no less."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.terminal.options import taken_fields
from moesaic.usage.names import OTHERS, settings, unknown_variables

ROOT = Path(__file__).parents[2]
READ = re.compile(r"MOESAIC_[A-Z0-9_]*[A-Z0-9]\b")
IN_TESTS = re.compile(r"""(?:environ(?:\.get\(|\[)["']|\$\{?)(MOESAIC_[A-Z0-9_]+)""")
OUR_OWN = "libs/moesaic/usage/names.py"


def sources() -> list[Path]:
    folders = ("libs", "services", "benchmarks", "models", "deploy", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found = [p for p in found if p.suffix in (".py", ".md", ".sh", ".conf") or "Docker" in p.name]
    return [*found, ROOT / "Makefile", ROOT / "README.md", *ROOT.glob("compose*.yaml")]


def test_names_are_known_without_the_services_that_read_them() -> None:
    code = (
        "import sys; from moesaic.usage.names import unknown_variables; "
        "print(unknown_variables({'MOESAIC_KV_BLOCKS': '1'}), "
        "[name for name in sys.modules if name.startswith(('pydantic', 'moesaic.services'))])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout == "[] []\n"


def test_every_name_in_the_sources_is_in_the_list_and_every_name_in_the_list_is_read() -> None:
    named = {
        name
        for path in sources()
        if str(path.relative_to(ROOT)) != OUR_OWN
        for name in READ.findall(path.read_text(encoding="utf-8"))
    }
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.sh")]:
        named |= set(IN_TESTS.findall(path.read_text(encoding="utf-8")))

    named |= {f"MOESAIC_{name.upper()}" for name in taken_fields(SuiteOptions)}

    assert named <= OTHERS | settings()
    assert named >= OTHERS - settings()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MOESAIC_QUANTISATION", "MOESAIC_QUANTIZATION"),
        ("MOESAIC_ATTENSION", "MOESAIC_ATTENTION"),
        ("moesaic_log_levle", "MOESAIC_LOG_LEVEL"),
        ("MOESAIC_MAX_SEQS", "MOESAIC_MAX_NUM_SEQS"),
    ],
)
def test_a_misspelt_variable_is_answered_with_the_nearest(name: str, meant: str) -> None:
    (problem,) = unknown_variables({name: "1", "PATH": "x"})

    assert problem == f"{name}: unknown variable, did you mean {meant}?"


def test_what_is_like_no_variable_gets_no_proposal() -> None:
    assert unknown_variables({"MOESAIC_XYZZY_WIDGETS": "1"}) == [
        "MOESAIC_XYZZY_WIDGETS: unknown variable"
    ]


def test_what_container_engines_tell_of_services_with_our_name_is_no_mistake() -> None:
    told = {
        "MOESAIC_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "MOESAIC_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "MOESAIC_GATEWAY_PORT": "tcp://10.0.0.1:8000",
        "MOESAIC_GATEWAY_PORT_8000_TCP_ADDR": "10.0.0.1",
        "MOESAIC_EMPTY": "",
    }

    assert unknown_variables(told) == []
    assert len(unknown_variables({"MOESAIC_GATEWAY_PORT": "8000"})) == 1
