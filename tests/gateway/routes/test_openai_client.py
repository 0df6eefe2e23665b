import asyncio

import openai
import pytest

from moesaic.v1 import attention_pb2 as pb


def connect(house, **options) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{house.url}/v1", api_key="none", **options)


async def test_the_client_chats_streams_and_lists_models(open_house, scripts) -> None:
    def talk() -> tuple[str, str, str, object]:
        with connect(house) as client:
            [model] = client.models.list().data
            messages = [{"role": "user", "content": "hello"}]
            whole = client.chat.completions.create(model=model.id, messages=messages)
            stream = client.chat.completions.create(
                model=model.id,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"moesaic": {"quality": "exact"}},
            )
            chunks = list(stream)
            streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            return model.id, whole.choices[0].message.content, streamed, chunks[-1].usage

    async with open_house(scripts.says("this is a story")) as house:
        model_id, whole, streamed, usage = await asyncio.to_thread(talk)

    assert model_id == "tiny"
    assert whole == streamed == "this is a story"
    assert usage.completion_tokens == len(scripts.ids("this is a story")) + 1


async def test_the_client_reads_our_errors(open_house, scripts) -> None:
    def fail() -> openai.BadRequestError:
        with connect(house) as client, pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="a", temperature=9)
        return caught.value

    async with open_house(scripts.says("yes")) as house:
        error = await asyncio.to_thread(fail)

    assert (error.code, error.param) == ("invalid_request", "temperature")
    assert error.request_id


async def test_the_client_retries_while_nothing_is_ready(open_house, scripts) -> None:
    def wait() -> str:
        with connect(house, max_retries=5) as client:
            return client.completions.create(model="tiny", prompt="a").choices[0].text

    async with open_house() as house:
        asking = asyncio.ensure_future(asyncio.to_thread(wait))
        await house.until(lambda: any(line["event"] == "request.finished" for line in house.logs))
        await house.add(scripts.says("yes"))
        assert await asking == "yes"


async def test_a_stream_that_breaks_raises_in_the_client(open_house, scripts) -> None:
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    async def script(submit, emit) -> None:
        emit(tokens=pb.Tokens(token_index=0, token_ids=scripts.ids("yes")))
        await begun.wait()
        emit(
            failure=pb.Failure(
                code="expert_unavailable", message="layer 3", http_status=503, retryable=True
            )
        )

    def read() -> str:
        with connect(house) as client:
            stream = client.completions.create(model="tiny", prompt="a", stream=True)
            text = next(stream).choices[0].text
            loop.call_soon_threadsafe(begun.set)
            with pytest.raises(openai.APIError, match="layer 3"):
                list(stream)
            return text

    async with open_house(script) as house:
        assert await asyncio.to_thread(read) == "yes"
