"""``moesaic api-key``: make keys for tenants, and show the tenants of a file."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.cli.clients.rest_key import KEYS_FILE_VARIABLE
from moesaic.cli.files.keys_file import (
    entry_facts,
    read_keys,
    with_entry,
    with_key,
    write_keys,
)
from moesaic.cli.terminal.console import print_json, print_table, say
from moesaic.cli.terminal.options import JsonOption, valid_text
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.api_keys import TenantEntry

app = typer.Typer(help="Keys of the tenants that may call the gateway.", no_args_is_help=True)

SHOWN_DIGITS = 12  # of a digest: enough to find it in the file

FileOption = Annotated[
    str,
    typer.Option(
        "--file", envvar=KEYS_FILE_VARIABLE, callback=valid_text, help="The gateway's file of keys."
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Limit in each gateway process.")]


@app.command()
def new(
    tenant: Annotated[
        str, typer.Option(callback=valid_text, help="Name of the tenant that gets the key.")
    ],
    scopes: Annotated[
        str | None,
        typer.Option(
            callback=valid_text,
            help="Scopes that the key allows, of infer, batch, console, admin (default: infer).",
        ),
    ] = None,
    requests_per_minute: LimitOption = None,
    tokens_per_minute: LimitOption = None,
    max_concurrent: LimitOption = None,
    expires: Annotated[
        str | None,
        typer.Option(
            callback=valid_text,
            help="Date or time at which the keys expire, such as 2030-01-31 or 2030-01-31T12:00Z.",
        ),
    ] = None,
    file: FileOption = "",
    as_json: JsonOption = False,
) -> None:
    """Make a key and print it once. Save it: only its digest is stored.

    The digest is added to --file, if given; a tenant that is already in it keeps its old keys.
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
    keys = read_keys(path) if path is not None and path.exists() else ApiKeys([])
    entry = with_key(keys, tenant, terms, digest_of(key))
    if path is not None:
        write_keys(path, with_entry(keys, entry))
    if as_json:
        print_json({"key": key, "file": file or None, "tenant": entry_facts(entry)})
        return
    print(key, flush=True)
    if path is not None:
        say(f"{tenant} has {len(entry.keys)} key(s) in {file} now; this one is shown only once")
    else:
        say("an entry for the gateway's file of keys; the key itself is shown only once")
        print_json(entry_facts(entry))


@app.command()
def ls(file: FileOption = "", as_json: JsonOption = False) -> None:
    """Show the tenants in a file, with their scopes, limits, and the first characters of their keys' digests."""
    if not file:
        raise CommandError(f"--file ({KEYS_FILE_VARIABLE}): name the file of keys", Exit.USAGE)
    tenants = read_keys(Path(file)).tenants
    if as_json:
        print_json([{**entry_facts(entry), "expired": entry.is_expired} for entry in tenants])
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


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandError(f"--expires: {error}".lower(), Exit.USAGE) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
