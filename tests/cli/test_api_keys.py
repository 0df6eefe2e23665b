import json
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from moesaic.api_keys import digest_of, read_api_keys

Run = Callable[..., "subprocess.CompletedProcess[str]"]
NEW = ("api-key", "new", "--tenant", "acme")


def test_a_new_key_is_shown_once_and_kept_as_a_digest(ask: Run, house: Path) -> None:
    file = house / "keys.json"

    first = ask(*NEW, "--scopes", "infer, batch", "--max-concurrent", "4", "--file", str(file))
    second = ask(*NEW, MOESAIC_API_KEYS_FILE=str(file))
    listed = json.loads(ask("api-key", "ls", "--json", MOESAIC_API_KEYS_FILE=str(file)).stdout)
    table = ask("api-key", "ls", "--file", str(file)).stdout

    keys = [first.stdout.strip(), second.stdout.strip()]
    assert all(key.startswith("moesaic_sk_") and len(key) == 54 for key in keys)
    digests = [digest_of(key) for key in keys]
    entry = {"name": "acme", "keys": digests, "scopes": ["infer", "batch"], "max_concurrent": 4}
    assert listed == [{**entry, "expired": False}]
    assert not any(key in file.read_text() + table for key in keys)
    assert digests[1].removeprefix("sha256:")[:12] in table
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_the_files_mode_and_other_tenants_stay(ask: Run, house: Path) -> None:
    file = house / "keys.json"
    ask(*NEW, "--file", str(file))
    file.chmod(0o444)

    ask("api-key", "new", "--tenant", "other", "--expires", "2020-01-31", "--file", str(file))
    table = ask("api-key", "ls", "--file", str(file)).stdout

    assert [entry.name for entry in read_api_keys(file).tenants] == ["acme", "other"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    assert "2020-01-31T00:00:00+00:00 (over)" in table
    assert not list(house.glob("*.new"))


def test_a_link_to_the_file_stays_one_and_nothing_else_is_written_through(
    ask: Run, house: Path
) -> None:
    (house / "keys").mkdir()
    file, link, other = house / "keys" / "real.json", house / "keys.json", house / "other"
    link.symlink_to(file)
    file.with_name("real.json.new").symlink_to(other)

    done = ask(*NEW, "--file", str(link))

    assert done.returncode == 0, done.stderr
    assert link.is_symlink()
    assert read_api_keys(file).tenants[0].name == "acme"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not other.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_file_stays_with_its_owner(ask: Run, house: Path) -> None:
    file = house / "keys.json"
    ask(*NEW, "--file", str(file))
    os.chown(file, 10001, 10002)

    ask(*NEW, "--file", str(file))

    assert (file.stat().st_uid, file.stat().st_gid) == (10001, 10002)
    assert len(read_api_keys(file).tenants[0].keys) == 2


def test_without_a_file_the_entry_is_printed(ask: Run) -> None:
    done = ask(*NEW, "--json")

    told = json.loads(done.stdout)
    assert told["file"] is None
    assert told["tenant"] == {"name": "acme", "keys": [digest_of(told["key"])], "scopes": ["infer"]}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((*NEW, "--scopes", "infer,root"), "--scopes: invalid enum value 'root'"),
        ((*NEW, "--expires", "soon"), "--expires: invalid isoformat string: 'soon'"),
        (("api-key", "new", "--tenant", "default"), "--tenant: 'default' is the tenant without"),
        (("api-key", "new", "--tenant", "a b"), "--tenant: expected `str` matching"),
        (("api-key", "ls"), "--file (MOESAIC_API_KEYS_FILE): name the file of keys"),
        (("api-key", "ls", "--file", "nowhere"), "--file: cannot read nowhere: No such file"),
        ((*NEW, "--file", "no/where"), "--file: cannot write no/where: No such file"),
        (
            (*NEW, "--file", "model/config.json"),
            "--file: model/config.json: tenants: object contains",
        ),
    ],
)
def test_what_is_wrong_is_named(ask: Run, arguments: tuple[str, ...], problem: str) -> None:
    done = ask(*arguments)

    assert done.returncode in (1, 2)
    assert problem in done.stderr
    assert not done.stdout


def test_terms_of_a_known_tenant_are_changed_in_the_file(ask: Run, house: Path) -> None:
    ask(*NEW, "--file", "keys.json")

    done = ask(*NEW, "--scopes", "admin", "--file", "keys.json")

    assert done.returncode == 2
    assert "--scopes: acme is in the file already" in done.stderr
    assert len(read_api_keys(house / "keys.json").tenants[0].keys) == 1
