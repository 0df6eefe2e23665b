"""The units of systemd: one template for each role, with common options beside them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from moesaic.usage.names import ROLES, unknown_files, unknown_variables
from tests.suites import ROOT

UNITS = ROOT / "deploy" / "systemd"
COMMON = UNITS / "moesaic-.service.d" / "common.conf"
PROGRAM = "/opt/moesaic/bin/moesaic"
MOST_EXPOSED = "25"  # tenths, by the scale of systemd-analyze; a unit without options has 96


def lines(role: str) -> list[tuple[str, str]]:
    """Name and value of each option of a role's unit, common ones too."""
    texts = [path.read_text(encoding="utf-8") for path in (unit(role), COMMON)]
    found = [line for text in texts for line in text.splitlines() if not line.startswith("#")]
    return [(name, value) for name, sign, value in (one.partition("=") for one in found) if sign]


def unit(role: str) -> Path:
    return UNITS / f"moesaic-{role}@.service"


def test_every_role_has_a_unit() -> None:
    assert {path.name for path in UNITS.glob("*.service")} == {unit(role).name for role in ROLES}


@pytest.mark.parametrize("role", ROLES)
def test_a_unit_starts_its_role_with_settings_that_exist(role: str, tmp_path: Path) -> None:
    options = lines(role)
    variables = dict(value.split("=", 1) for name, value in options if name == "Environment")
    secrets = [value.split(":")[0] for name, value in options if name == "LoadCredential"]
    for name in secrets:
        (tmp_path / name).write_text("x")

    assert dict(options)["ExecStart"] == f"{PROGRAM} serve {role}"
    assert unknown_variables(variables) == []
    assert unknown_files(tmp_path) == []
    assert variables["MOESAIC_SECRETS_DIR"] == "%d"
    assert {"moesaic_secret", "moesaic_redis_url"} <= set(secrets)
    assert ("moesaic_api_key" in secrets) == (role == "gateway")
    assert int(dict(options)["TimeoutStopSec"]) > 30  # --grace-s


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
@pytest.mark.parametrize("role", ROLES)
def test_systemd_takes_a_unit_and_finds_it_closed(role: str, tmp_path: Path) -> None:
    shutil.copytree(UNITS, tmp_path / "units")
    copy = tmp_path / "units" / unit(role).name
    copy.write_text(copy.read_text(encoding="utf-8").replace(PROGRAM, "/bin/true"))

    def analysed(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["systemd-analyze", *words, f"moesaic-{role}@0.service"],
            env={"PATH": "/usr/bin:/bin", "SYSTEMD_UNIT_PATH": f"{tmp_path / 'units'}:"},
            capture_output=True,
            text=True,
        )

    verified = analysed("verify")
    rated = analysed("security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager")

    assert (verified.returncode, verified.stderr) == (0, "")
    assert rated.returncode == 0, rated.stdout
