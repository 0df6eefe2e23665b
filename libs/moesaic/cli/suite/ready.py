"""The lines printed once a suite is ready, for people and for programs."""

import json
import shlex
from typing import TYPE_CHECKING, Any

from moesaic.cli.clients.rest_key import API_KEY_VARIABLE

if TYPE_CHECKING:
    from moesaic.cli.machine.state import SuiteState


def ready_facts(state: "SuiteState") -> dict[str, Any]:
    """Facts of the suite, for ``--json``."""
    import msgspec

    return {
        "url": state.url,
        "model": state.model_name,
        "topology": state.topology,
        "pid": state.pid,
        "processes": msgspec.to_builtins(state.processes),
    }


def _typed_command() -> str:
    """Give the words that run this command again from this directory."""
    import shutil
    import sys
    from pathlib import Path

    if shutil.which("moesaic"):
        return "moesaic"
    # Run as python -m moesaic.cli.
    module = Path(sys.argv[0]).name != "moesaic"
    program = Path(sys.executable if module else sys.argv[0]).absolute()
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return shlex.quote(str(program)) + (" -m moesaic.cli" if module else "")


def ready_text(state: "SuiteState", took_s: float, *, detached: bool, wants_key: bool) -> str:
    """Text for people: the suite's address, and calls to try."""
    name = state.model_name
    question = {"model": name, "input": "i want to book a flight", "labels": ["travel", "banking"]}
    chat = {"model": name, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    moesaic = _typed_command()
    end = f"{moesaic} down" if detached else "Ctrl-C"
    headers = "-H 'Content-Type: application/json'"
    if wants_key:
        headers += f' -H "Authorization: Bearer ${API_KEY_VARIABLE}"'

    def curl(route: str, body: dict[str, Any]) -> str:
        return f"curl -s {state.url}{route} {headers} -d {shlex.quote(json.dumps(body))}"

    return f"""
Moesaic serves {name} at {state.url} ({state.topology}, ready after {took_s:.1f} s)

Classify:  {curl("/v1/classify", question)}
Chat:      {curl("/v1/chat/completions", chat)}
Or:        {moesaic} classify 'i want to book a flight' --labels travel,banking
           {moesaic} generate 'Hello!'

Services and their admin addresses: {moesaic} status      Logs: run/*.log      Stop: {end}
"""
