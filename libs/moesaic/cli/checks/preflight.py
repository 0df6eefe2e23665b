"""Checks before a suite starts; every problem names the flag or variable to change."""

import asyncio
import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.cli.terminal.outcome import CommandError, Exit
from moesaic.usage.packages import how_to_install, missing_packages

if TYPE_CHECKING:
    from moesaic.models.configuration.config import ModelConfig


def check_packages(topology: str, roles: Collection[str]) -> None:
    """Make sure that the packages of a suite's services are installed.

    Raises:
        CommandError: some are not, with the command that installs them.
    """
    lacking = [role for role in roles if missing_packages(role)]
    if not lacking:
        return
    # A machine without services lacks the Redis server, too.
    extras = lacking if len(lacking) == 1 else ()
    missing = missing_packages(*lacking, *(() if extras else ("up",)))
    how = how_to_install(*extras, torch="torch" in missing)
    raise CommandError(
        f"the {topology} topology needs packages that are not installed: {', '.join(missing)} -> {how}",
        Exit.USAGE,
    )


def check_config(model: str) -> "ModelConfig":
    """Read the configuration in a model's directory.

    Raises:
        CommandError: ``--model`` is no directory, or not of a model that can be served.
    """
    from moesaic.errors import CheckpointError
    from moesaic.models.configuration.config import load_config

    if not os.path.isdir(model):
        raise CommandError(
            f"--model {model}: no such directory. Give one with config.json, tokenizer.json and "
            "safetensors files, or a repository of the Hugging Face hub as owner/name. "
            "If a directory has the owner's name, give owner/name@revision",
            Exit.USAGE,
        )
    try:
        return load_config(Path(model))
    except CheckpointError as error:
        raise CommandError(f"--model {model}: {error}", Exit.USAGE) from error


def check_model(model: str) -> "ModelConfig":
    """Read a model's configuration, and check its other files.

    Raises:
        CommandError: ``--model`` is no directory of a model that can be served.
    """
    from moesaic.classification.wording import PACKAGED
    from moesaic.errors import CheckpointError, InvalidInput
    from moesaic.models.configuration.fields import read_json
    from moesaic.models.text.chat import ChatTemplate
    from moesaic.models.text.tokenizer import Tokenizer
    from moesaic.models.weights.files import list_tensors
    from moesaic.models.weights.inventory import check_tensors

    config = check_config(model)
    try:
        check_tensors(config, list_tensors(Path(model)))
        Tokenizer.load(Path(model))
        serving = Path(model) / "moesaic.json"
        told = read_json(serving) if serving.exists() else {}
        if told.get("wording") is not None:
            PACKAGED.replaced(told["wording"], serving.name)
        # Without a template there are no chats.
        with contextlib.suppress(InvalidInput):
            ChatTemplate.load(Path(model))
    except CheckpointError as error:
        raise CommandError(f"--model {model}: {error}", Exit.USAGE) from error
    return config


def check_redis(url: str) -> None:
    """Check that a Redis server answers at ``url``.

    Raises:
        CommandError: naming ``REDIS_URL``, its password hidden, and the failure.
    """
    from moesaic.cluster.redis import connection
    from moesaic.errors import InvalidInput, NotReady

    try:
        asyncio.run(connection.check_redis(url))
    except InvalidInput as error:
        raise CommandError(f"REDIS_URL: {error.fix}", Exit.USAGE) from error
    except NotReady as error:
        raise CommandError(
            f"REDIS_URL: {error}; start that server, correct the address, or unset REDIS_URL to "
            "get a server of the suite's own",
            Exit.UNHEALTHY,
        ) from error


def check_cluster(url: str, cluster: str, names: Collection[str]) -> None:
    """Check that no other suite is registered under the worker ids of this one.

    A killed suite's leases last for some seconds more, and this waits for their end.

    Args:
        url: of a Redis server that answers.
        cluster: its name on that server.
        names: worker ids.

    Raises:
        CommandError: one of them is taken.
    """
    if taken := asyncio.run(_taken(url, cluster, names)):
        raise CommandError(
            f"REDIS_URL: a suite is registered there already ({', '.join(taken)} of cluster "
            f"{cluster!r}). Stop it, set another cluster with MOESAIC_CLUSTER=NAME, "
            "or unset REDIS_URL to start a server for the suite",
            Exit.USAGE,
        )


async def _taken(url: str, cluster: str, names: Collection[str]) -> list[str]:
    from moesaic.cluster.redis.bus import Bus
    from moesaic.cluster.registry import LEASE_S, leased

    end_s = time.monotonic() + LEASE_S + 1
    async with Bus.connect(url, cluster) as bus:
        while True:
            taken = sorted(await leased(bus, names))
            if not taken or time.monotonic() > end_s:
                return taken
            await asyncio.sleep(0.2)
