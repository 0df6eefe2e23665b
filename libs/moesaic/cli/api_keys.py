"""``moesaic api-key``: make keys for tenants, and show who has some."""

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.api_key import KEYS_FILE_VARIABLE
from moesaic.cli.console import print_json, print_table, say
from moesaic.cli.options import JsonOption, valid_text
from moesaic.cli.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.api_keys import ApiKeys, TenantEntry

app = typer.Typer(help="Keys of the tenants that may call the gateway.", no_args_is_help=True)

DEFAULT_SCOPE = "infer"
SHOWN_DIGITS = 12  # of a digest: enough to find it in the file

FileOption = Annotated[
    str,
    typer.Option(
        "--file", envvar=KEYS_FILE_VARIABLE, callback=valid_text, help="The gateway's file of keys."
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="In each gateway process.")]


@app.command()
def new(
    tenant: Annotated[str, typer.Option(callback=valid_text, help="Whose key it is.")],
    scopes: Annotated[
        str | None,
        typer.Option(
            callback=valid_text, help="What it allows, of infer, batch, admin (default: infer)."
        ),
    ] = None,
    requests_per_minute: LimitOption = None,
    tokens_per_minute: LimitOption = None,
    max_concurrent: LimitOption = None,
    expires: Annotated[
        str | None,
        typer.Option(callback=valid_text, help="When it ends, as 2030-01-31 or 2030-01-31T12:00Z."),
    ] = None,
    file: FileOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it: nothing keeps it but what you do. Only its digest goes into the file.

    A tenant who is in the file already gets the key besides the old ones.
    """
    from moesaic.api_keys import ApiKeys, digest_of, new_api_key

    key, path = new_api_key(), Path(file) if file else None
    terms = {
        "scopes": scopes and [scope.strip() for scope in scopes.split(",")],
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
        "expires": expires and _moment(expires),
    }
    terms = {name: value for name, value in terms.items() if value is not None}
    keys = _read(path) if path is not None and path.exists() else ApiKeys([])
    entry = _with_key(keys, tenant, terms, digest_of(key))
    if path is not None:
        _write(path, _replaced(keys, entry))
    if as_json:
        print_json({"key": key, "file": file or None, "tenant": _facts(entry)})
        return
    print(key, flush=True)
    if path is not None:
        say(f"{tenant} has {len(entry.keys)} key(s) in {file} now; this one is shown only once")
    else:
        say("an entry for the gateway's file of keys; the key itself is shown only once")
        print_json(_facts(entry))


@app.command()
def ls(file: FileOption = "", as_json: JsonOption = False) -> None:
    """Show the tenants of a file: the beginnings of their keys' digests, scopes and limits."""
    if not file:
        raise CommandError(f"--file ({KEYS_FILE_VARIABLE}): say which file of keys", Exit.USAGE)
    tenants = _read(Path(file)).tenants
    if as_json:
        print_json([{**_facts(entry), "expired": entry.is_expired} for entry in tenants])
        return
    columns = ("tenant", "scopes", "keys", "requests/min", "tokens/min", "at once", "expires")
    print_table(columns, (_row(entry) for entry in tenants))


def _row(entry: "TenantEntry") -> list[object]:
    limits = (entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent)
    digests = (key.removeprefix("sha256:")[:SHOWN_DIGITS] for key in entry.keys)
    expires = entry.expires.isoformat() if entry.expires else "never"
    return [
        entry.name,
        ", ".join(entry.scopes),
        ", ".join(digests),
        *(limit or "-" for limit in limits),
        f"{expires} (over)" if entry.is_expired else expires,
    ]


def _facts(entry: "TenantEntry") -> dict[str, Any]:
    import msgspec

    facts: dict[str, Any] = msgspec.to_builtins(entry)
    return facts


def _with_key(keys: "ApiKeys", tenant: str, terms: dict[str, Any], digest: str) -> "TenantEntry":
    """The entry of a tenant, new or known, with one key more; a gateway would take it."""
    import msgspec

    from moesaic.api_keys import parse_api_keys
    from moesaic.errors import InvalidInput

    facts = {"name": tenant, "scopes": [DEFAULT_SCOPE], "keys": [], **terms}
    if known := [entry for entry in keys.tenants if entry.name == tenant]:
        if terms:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in terms)
            raise CommandError(
                f"{flags}: {tenant} is in the file already; what its keys allow is changed there",
                Exit.USAGE,
            )
        facts = _facts(known[0])
    facts["keys"] = [*facts["keys"], digest]
    try:
        return parse_api_keys(msgspec.json.encode({"tenants": [facts]})).tenants[0]
    except InvalidInput as error:
        name = error.field.removeprefix("tenants[0].").replace("_", "-").partition("[")[0]
        flag = "--tenant" if name == "name" else f"--{name}"
        raise CommandError(f"{flag}: {error.fix}", Exit.USAGE) from error


def _replaced(keys: "ApiKeys", entry: "TenantEntry") -> "ApiKeys":
    from moesaic.api_keys import ApiKeys

    tenants = {known.name: known for known in keys.tenants}
    tenants[entry.name] = entry  # in its old place, if it had one
    return ApiKeys(list(tenants.values()))


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandError(f"--expires: {error}".lower(), Exit.USAGE) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _read(path: Path) -> "ApiKeys":
    from moesaic.api_keys import read_api_keys
    from moesaic.errors import InvalidInput

    try:
        return read_api_keys(path)
    except InvalidInput as error:
        raise CommandError(f"--file: {error.fix}", Exit.USAGE) from error


def _write(path: Path, keys: "ApiKeys") -> None:
    """Replace the file as a whole: a gateway may be reading it."""
    from moesaic.api_keys import dump_api_keys

    place = path.resolve()  # a link stays one
    whole = place.with_name(f"{place.name}.new")
    try:
        whole.unlink(missing_ok=True)  # whatever it is: nothing is written through it
        with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(dump_api_keys(keys))
            out.flush()
            os.fsync(out.fileno())
        if place.exists():
            old = place.stat()
            with contextlib.suppress(PermissionError):  # only root can give a file away
                os.chown(whole, old.st_uid, old.st_gid)
            whole.chmod(old.st_mode & 0o777)
        whole.replace(place)
    except OSError as error:
        raise CommandError(f"--file: cannot write {path}: {error.strerror}") from error
