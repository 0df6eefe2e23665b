"""There is one list of variables, and it holds what the sources read, no more and no less."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from moesaic.settings import ServiceSettings
from moesaic.usage.names import SETTINGS, VARIABLES, unknown_variables

ROOT = Path(__file__).parents[2]
READ = re.compile(r"MOESAIC_[A-Z0-9_]*[A-Z0-9]\b")
IN_TESTS = re.compile(r"""(?:environ(?:\.get\(|\[)["']|\$\{?)(MOESAIC_[A-Z0-9_]+)""")
OUR_OWN = "libs/moesaic/usage/names.py"


def models() -> list[type[ServiceSettings]]:
    roles = ("Attention", "EdgeAgent", "Expert", "Gateway", "Scheduler")
    folders = [re.sub(r"(?<!^)(?=[A-Z])", "_", role).lower() for role in roles]
    modules = [import_module(f"moesaic.services.{folder}.settings") for folder in folders]
    return [getattr(module, f"{role}Settings") for module, role in zip(modules, roles, strict=True)]


def sources() -> list[Path]:
    folders = ("libs", "services", "benchmarks", "models", "deploy", "docs")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found = [p for p in found if p.suffix in (".py", ".md", ".sh", ".conf") or "Docker" in p.name]
    return [*found, ROOT / "Makefile", ROOT / "README.md", *ROOT.glob("compose*.yaml")]


def test_every_setting_of_a_service_has_its_variable_in_the_list() -> None:
    fields = {f"MOESAIC_{name.upper()}" for model in models() for name in model.model_fields}

    assert fields == SETTINGS


def test_every_name_in_the_sources_is_in_the_list_and_every_name_in_the_list_is_read() -> None:
    named = {
        name
        for path in sources()
        if str(path.relative_to(ROOT)) != OUR_OWN
        for name in READ.findall(path.read_text(encoding="utf-8"))
    }
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.sh")]:
        named |= set(IN_TESTS.findall(path.read_text(encoding="utf-8")))

    assert named <= VARIABLES
    assert named >= VARIABLES - SETTINGS


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

    assert problem == f"{name}: there is no such variable, did you mean {meant}?"


def test_what_is_like_no_variable_gets_no_proposal() -> None:
    assert unknown_variables({"MOESAIC_XYZZY_WIDGETS": "1"}) == [
        "MOESAIC_XYZZY_WIDGETS: there is no such variable"
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
