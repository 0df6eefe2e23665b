"""The gateway's file of API keys: read, given one key more, and replaced as a whole."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.terminal.outcome import CommandError, Exit, correcting

if TYPE_CHECKING:
    from moesaic.api_keys import ApiKeys, TenantEntry

DEFAULT_SCOPE = "infer"


def read_keys(path: Path) -> "ApiKeys":
    """Read the file.

    Raises:
        CommandError: it cannot be read, or an entry is wrong.
    """
    from moesaic.api_keys import read_api_keys

    with correcting("--file"):
        return read_api_keys(path)


def write_keys(path: Path, keys: "ApiKeys") -> None:
    """Replace the file as a whole, since a gateway may be reading it; owner and rights stay.

    Raises:
        CommandError: it cannot be written.
    """
    from moesaic.api_keys import dump_api_keys

    # A link stays one.
    place = path.resolve()
    whole = place.with_name(f"{place.name}.new")
    try:
        # Even a link: nothing is written through it.
        whole.unlink(missing_ok=True)
        with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(dump_api_keys(keys))
            out.flush()
            os.fsync(out.fileno())
        if place.exists():
            old = place.stat()
            # Only root can give a file away.
            with contextlib.suppress(PermissionError):
                os.chown(whole, old.st_uid, old.st_gid)
            whole.chmod(old.st_mode & 0o777)
        whole.replace(place)
    except OSError as error:
        raise CommandError(f"--file: cannot write {path}: {error.strerror}") from error


def with_key(keys: "ApiKeys", tenant: str, terms: dict[str, Any], digest: str) -> "TenantEntry":
    """Make the entry of a tenant, new or known, with one key more.

    Args:
        keys: of the file.
        tenant: its name.
        terms: what a new tenant's entry says besides; empty for a known one.
        digest: of the new key.

    Returns:
        An entry that a gateway accepts.

    Raises:
        CommandError: a term is wrong, or is given for a known tenant.
    """
    import msgspec

    from moesaic.api_keys import parse_api_keys
    from moesaic.errors import InvalidInput

    facts = {"name": tenant, "scopes": [DEFAULT_SCOPE], "keys": [], **terms}
    if known := [entry for entry in keys.tenants if entry.name == tenant]:
        if terms:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in terms)
            raise CommandError(
                f"{flags}: {tenant} is in the file already; change the permissions of its keys there",
                Exit.USAGE,
            )
        facts = entry_facts(known[0])
    facts["keys"] = [*facts["keys"], digest]
    try:
        return parse_api_keys(msgspec.json.encode({"tenants": [facts]})).tenants[0]
    except InvalidInput as error:
        name = error.field.removeprefix("tenants[0].").replace("_", "-").partition("[")[0]
        flag = "--tenant" if name == "name" else f"--{name}"
        raise CommandError(f"{flag}: {error.fix}", Exit.USAGE) from error


def with_entry(keys: "ApiKeys", entry: "TenantEntry") -> "ApiKeys":
    """Put an entry in the place of the tenant's old one, or at the end."""
    from moesaic.api_keys import ApiKeys

    tenants = {known.name: known for known in keys.tenants}
    tenants[entry.name] = entry
    return ApiKeys(list(tenants.values()))


def entry_facts(entry: "TenantEntry") -> dict[str, Any]:
    """Turn an entry into JSON values, as it stands in the file."""
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(entry)
    return facts
