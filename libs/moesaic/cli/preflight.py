"""What must hold before a suite starts; every problem names the flag or variable to change."""

import asyncio
import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.cli.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.models.config import ModelConfig


def check_model(model: str) -> "ModelConfig":
    """Read a model's configuration, and make sure that the other files are there and valid.

    Raises:
        CommandError: there is no model that can be served at ``--model``.
    """
    from moesaic.classification.wording import PACKAGED
    from moesaic.errors import CheckpointError, InvalidInput
    from moesaic.models.chat import ChatTemplate
    from moesaic.models.config import load_config
    from moesaic.models.fields import read_json
    from moesaic.models.inventory import check_tensors
    from moesaic.models.tokenizer import Tokenizer
    from moesaic.models.weight_files import list_tensors

    if not Path(model).is_dir():
        raise CommandError(
            f"--model {model}: no such directory; give one with config.json, tokenizer.json and "
            "safetensors files",
            Exit.USAGE,
        )
    try:
        config = load_config(Path(model))
        check_tensors(config, list_tensors(Path(model)))
        Tokenizer.load(Path(model))
        serving = Path(model) / "moesaic.json"
        told = read_json(serving) if serving.exists() else {}
        if told.get("wording") is not None:
            PACKAGED.replaced(told["wording"], serving.name)
        with contextlib.suppress(InvalidInput):  # there is none, so there are no chats
            ChatTemplate.load(Path(model))
    except CheckpointError as error:
        raise CommandError(f"--model {model}: {error}", Exit.USAGE) from error
    return config


def check_redis(url: str) -> None:
    """Make sure that a Redis server answers at ``url``.

    Raises:
        CommandError: naming ``REDIS_URL`` (its password hidden) and what happened.
    """
    from moesaic.cluster import redis_clients
    from moesaic.errors import InvalidInput, NotReady

    try:
        asyncio.run(redis_clients.check_redis(url))
    except InvalidInput as error:
        raise CommandError(f"REDIS_URL: {error.fix}", Exit.USAGE) from error
    except NotReady as error:
        raise CommandError(
            f"REDIS_URL: {error}; start that server, correct the address, or unset REDIS_URL to "
            "get a server of the suite's own",
            Exit.UNHEALTHY,
        ) from error


def check_cluster(url: str, cluster: str, names: Collection[str]) -> None:
    """Make sure that no other suite is registered under the ids that this one's processes get.

    Of a suite that was killed leases are left for some seconds: they are waited out.

    Args:
        url: of a Redis server that answers.
        cluster: which names on it.
        names: worker ids.

    Raises:
        CommandError: somebody has one of them.
    """
    if taken := asyncio.run(_taken(url, cluster, names)):
        raise CommandError(
            f"REDIS_URL: a suite is registered there already ({', '.join(taken)} of cluster "
            f"{cluster!r}); stop it, give this one a cluster of its own with MOESAIC_CLUSTER=NAME, "
            "or unset REDIS_URL to get a server of the suite's own",
            Exit.USAGE,
        )


async def _taken(url: str, cluster: str, names: Collection[str]) -> list[str]:
    from moesaic.cluster.bus import Bus
    from moesaic.cluster.registry import LEASE_S, leased

    end_s = time.monotonic() + LEASE_S + 1
    async with Bus.connect(url, cluster) as bus:
        while True:
            taken = sorted(await leased(bus, names))
            if not taken or time.monotonic() > end_s:
                return taken
            await asyncio.sleep(0.2)
