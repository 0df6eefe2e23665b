import asyncio
import json
import socket

import pytest

from moesaic.services.gateway.generate import deliver
from moesaic.v1 import attention_pb2 as pb


async def test_a_client_that_does_not_read_is_given_up_and_others_go_on(
    open_house, scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "SEND_S", 0.3)
    token_id = scripts.ids("yes")[0]
    entry = pb.TokenLogprob(logprob=-1.0, top_token_ids=range(5, 25), top_logprobs=[-1.0] * 20)

    async def much(submit: pb.Submit, emit) -> None:
        if submit.generation.HasField("top_logprobs"):
            emit(
                tokens=pb.Tokens(token_index=0, token_ids=[token_id] * 200, logprobs=[entry] * 200)
            )
        emit(finished=scripts.finished(submit, 200))

    async with open_house(much) as house:
        body = {"prompt": [[5]] * 200, "max_tokens": 200, "logprobs": 20, "stream": True}
        content = json.dumps(body).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            host, port = house.url.removeprefix("http://").split(":")
            await asyncio.get_running_loop().sock_connect(slow, (host, int(port)))
            head = [
                "POST /v1/completions HTTP/1.1",
                "host: localhost",
                "content-type: application/json",
                f"content-length: {len(content)}",
            ]
            request = "\r\n".join([*head, "", ""]).encode() + content
            await asyncio.get_running_loop().sock_sendall(slow, request)
            await house.until(lambda: house.workers[0].submits)
            other = await house.client.post("/v1/completions", json={"prompt": "a"})
            await house.until(lambda: house.gateway.num_inflight == 0)
            lines = [line for line in house.logs if line["event"] == "request.finished"]

    assert other.status_code == 200
    assert [(line["outcome"], line["code"]) for line in lines if line["stream"]] == [
        ("errored", "slow_client")
    ]
