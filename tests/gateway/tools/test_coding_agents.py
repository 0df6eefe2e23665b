"""Claude Code and Codex at a real gateway, whose model is a script: it calls a tool, and tells what it read.

The demo model neither calls on its own nor reads such long prompts. ``make test-clients`` installs the clients.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moesaic.services.gateway.language import Language
from moesaic.v1 import attention_pb2 as pb
from tests.clients.npm import installed
from tests.gateway.conftest import Emit, OpenHouse, Script, Scripts
from tests.waiting import HANG_S

SECRET = "a heron, two moles and 17 lanterns"


@pytest.fixture
def language(model_directory: Path) -> Language:
    """The model's language, with room for prompts of agents."""
    path = model_directory / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 1 << 18}))
    return Language(model_directory)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project, where only a file tells the secret."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "secret.txt").write_text(SECRET)
    return project


def agent(scripts: Scripts, tool: str, arguments: dict[str, str]) -> Script:
    """Call a tool until its result is there, then tell it."""
    called = json.dumps({"name": tool, "arguments": arguments})

    async def script(submit: pb.Submit, emit: Emit) -> None:
        ids = list(submit.token_ids)
        prompt = scripts.language.tokenizer.decode(ids, skip_special_tokens=False)
        call = f"I look.\n<tool_call>\n{called}\n</tool_call>"
        await scripts.says(f"It says: {SECRET}." if SECRET in prompt else call)(submit, emit)

    return script


async def said(project: Path, *command: str, **variables: str) -> str:
    """Run an agent in a project, away from the settings of whoever runs the tests."""
    home = project.parent / "home"
    home.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=project,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), HANG_S)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


async def test_claude_code_calls_reads_and_answers(
    open_house: OpenHouse, scripts: Scripts, project: Path
) -> None:
    claude = installed("@anthropic-ai/claude-code").parents[1] / ".bin" / "claude"
    script = agent(scripts, "Bash", {"command": "cat secret.txt", "description": "Read it"})
    async with open_house(script, served_model_name="demo") as house:
        variables = {
            "ANTHROPIC_BASE_URL": house.url,
            "ANTHROPIC_AUTH_TOKEN": "unused",
            "ANTHROPIC_MODEL": "demo",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        asked = (
            "-p",
            "What is in secret.txt?",
            "--output-format",
            "json",
            "--allowedTools",
            "Bash",
        )
        told: dict[str, Any] = json.loads(await said(project, str(claude), *asked, **variables))
        num_requests = len(house.workers[0].submits)

    assert told["result"] == f"It says: {SECRET}."
    assert (told["is_error"], told["num_turns"], num_requests) == (False, 2, 2)


async def test_codex_calls_reads_and_answers(
    open_house: OpenHouse, scripts: Scripts, project: Path
) -> None:
    codex = installed("@openai/codex").parents[1] / ".bin" / "codex"
    async with open_house(
        agent(scripts, "exec_command", {"cmd": "cat secret.txt"}), served_model_name="demo"
    ) as house:
        home = project.parent / "codex"
        home.mkdir()
        (home / "config.toml").write_text(
            'model = "demo"\nmodel_provider = "moesaic"\n'
            '[model_providers.moesaic]\nname = "Moesaic"\nwire_api = "responses"\n'
            f'base_url = "{house.url}/v1"\n'
        )
        asked = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        told = await said(
            project, str(codex), *asked, "What is in secret.txt?", CODEX_HOME=str(home)
        )
        num_requests = len(house.workers[0].submits)

    assert told.strip() == f"It says: {SECRET}."
    assert num_requests == 2
