"""Processes are killed, hung and cut off; requests end with all their tokens or a typed error, and never wrong ones."""

import json
import random
import signal
import socket
import struct
from contextlib import ExitStack
from typing import Any

import httpx

from tests.system.asking import question, stream
from tests.system.control import paused
from tests.system.streams import STREAMS, TOKENS, around_fault, check
from tests.waiting import HANG_S


async def test_a_killed_expert_worker_costs_no_request(disaggregated: Any) -> None:
    before, after = await around_fault(
        disaggregated, lambda: disaggregated.signal("expert-1", signal.SIGKILL)
    )

    assert check(before, after) == STREAMS
    disaggregated.until_serving()


async def test_a_killed_expert_worker_and_a_short_deadline_give_typed_errors_in_time(
    disaggregated: Any,
) -> None:
    before, after = await around_fault(
        disaggregated, lambda: disaggregated.signal("expert-0", signal.SIGKILL), timeout_ms=1500
    )

    check(before, after)
    disaggregated.until_serving()


async def test_a_killed_attention_worker_hands_its_streams_to_the_other(wide: Any) -> None:
    before, after = await around_fault(wide, lambda: wide.signal("attention-0", signal.SIGKILL))

    assert check(before, after) == STREAMS
    wide.until_serving()


async def test_a_hung_expert_worker_hangs_nobody(disaggregated: Any) -> None:
    with ExitStack() as hung:
        before, after = await around_fault(
            disaggregated,
            lambda: hung.enter_context(paused(disaggregated, "expert-1")),
            timeout_ms=6000,
        )
        check(before, after)
    disaggregated.until_serving()

    async with httpx.AsyncClient(base_url=disaggregated.url, timeout=HANG_S) as client:
        assert (await stream(client, question(0, TOKENS))).text == before[0].text


async def test_serving_goes_on_without_redis(disaggregated: Any) -> None:
    before, after = await around_fault(
        disaggregated, lambda: disaggregated.signal("redis", signal.SIGKILL)
    )

    assert check(before, after) == STREAMS
    disaggregated.until_serving()


async def test_strangers_at_the_tensor_port_are_dropped_and_nobody_notices(
    disaggregated: Any,
) -> None:
    status = json.loads(disaggregated.cli("status", "--json").stdout)
    host, port = next(
        w["data_address"].rsplit(":", 1) for w in status["services"] if w["id"] == "expert-0"
    )
    rng = random.Random(1)
    greetings = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        rng.randbytes(4096),
        b"MOES" + struct.pack("<I", 2**32 - 1) * 64,
    ]
    sockets = []
    for greeting in greetings * 3:
        stranger = socket.create_connection((host, int(port)), timeout=HANG_S)
        stranger.sendall(greeting)
        sockets.append(stranger)

    async with httpx.AsyncClient(base_url=disaggregated.url, timeout=HANG_S) as client:
        outcome = await stream(client, question(3, TOKENS))

    assert outcome.finish_reason == "length"
    for stranger in sockets:
        stranger.settimeout(HANG_S)
        try:
            while stranger.recv(4096):
                pass  # whatever the listener says, it hangs up in the end
        except ConnectionError:
            pass
        stranger.close()
