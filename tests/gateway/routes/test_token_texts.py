"""Tokens in log-probabilities: their own bytes, their blanks, and their offsets in the text."""

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.services.gateway.language import Language
from moesaic.v1 import attention_pb2 as pb
from tests.gateway.conftest import CHAT_TEMPLATE, CONFIG
from tests.models.text.tokenizer_cases import CONFIG as TOKENIZER
from tests.models.text.tokenizer_cases import write

KINDS = ("o200k", "digits", "mixtral", "metaspace-first", "unigram-always")
PARTED = "the cats \U00012345 世界, sat"  # these characters are single tokens of no kind


@pytest.fixture(params=KINDS)
def spoken(request: pytest.FixtureRequest, tmp_path: Path) -> Language:
    """A model with one kind of tokenizer."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    model = {**CONFIG, "vocab_size": 500}
    return Language(write(tmp_path, request.param, {TOKENIZER: named}, model))


def saying(token_ids: list[int], top: list[int]) -> Any:
    """A worker that answers with these tokens and likelier ones, with log-probabilities of the prompt."""

    def entry(token_id: int) -> pb.TokenLogprob:
        logprobs = [-0.5 - place for place in range(len(top))]
        return pb.TokenLogprob(
            logprob=-9.0, rank=9, top_token_ids=top, top_logprobs=logprobs[: len(top)]
        )

    async def script(submit: pb.Submit, emit: Any) -> None:
        if submit.generation.HasField("prompt_logprobs"):
            told = [entry(token_id) for token_id in submit.token_ids[1:]]
            emit(prompt_logprobs=pb.PromptLogprobs(first_position=1, logprobs=told))
        for index, token_id in enumerate(token_ids):
            told = [entry(token_id)] if submit.generation.HasField("top_logprobs") else []
            emit(tokens=pb.Tokens(token_index=index, token_ids=[token_id], logprobs=told))
        finished = pb.Finished(
            reason=pb.FINISH_REASON_LENGTH,
            prompt_tokens=len(submit.token_ids),
            completion_tokens=len(token_ids),
        )
        emit(finished=finished)

    return script


async def asked(house: Any, route: str, body: dict[str, Any]) -> list[Any]:
    """The choices of an answer, or of its chunks."""
    response = await house.client.post(route, json=body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return list(response.json()["choices"])
    blocks = [line.removeprefix("data: ") for line in response.text.split("\n\n")]
    return [json.loads(block)["choices"][0] for block in blocks if block.startswith("{")]


def texts_of(language: Language) -> tuple[list[int], list[int]]:
    """An answer with parts of characters, some of which are the most likely tokens."""
    ids = language.tokenizer.encode(PARTED, add_special_tokens=False)
    lone = [i for i in ids if "\ufffd" in language.tokenizer.decode([i])]
    return ids, [*dict.fromkeys([*lone, *ids])][:5]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_of_a_chat_has_its_own_bytes(open_house, spoken: Language, stream) -> None:
    ids, top = texts_of(spoken)
    body = {
        "messages": [{"role": "user", "content": "a"}],
        **{"logprobs": True, "top_logprobs": 5, "stream": stream, "max_tokens": 40},
    }
    async with open_house(saying(ids, top), language=spoken) as house:
        choices = await asked(house, "/v1/chat/completions", body)

    said = [c["delta"] if stream else c["message"] for c in choices]
    text = "".join(part.get("content") or "" for part in said)
    entries = [e for c in choices if c["logprobs"] for e in c["logprobs"]["content"]]
    assert text == spoken.tokenizer.decode(ids)
    assert len(entries) == len(ids)
    shown = [place for place, i in enumerate(ids) if i not in spoken.tokenizer.special_token_ids]
    assert b"".join(bytes(entries[place]["bytes"]) for place in shown) == text.encode()
    for place, entry in enumerate(entries):
        spelled = [spoken.spelling.of(other, place == 0) for other in top]
        assert [bytes(other["bytes"]) for other in entry["top_logprobs"]] == spelled
        for each in (entry, *entry["top_logprobs"]):
            known = bytes(each["bytes"]).decode(errors="backslashreplace")
            assert each["token"] == known


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_a_completion_keep_their_blanks_and_offsets_are_those_of_the_text(
    open_house, spoken: Language, stream
) -> None:
    ids, top = texts_of(spoken)
    body = {
        "prompt": "The cats sat, 世.",
        **{"logprobs": 5, "echo": True, "stream": stream, "max_tokens": 40, "n": 2},
    }
    async with open_house(saying(ids, top), language=spoken) as house:
        choices = await asked(house, "/v1/completions", body)
        [submit, *_] = house.workers[0].submits

    prompt = spoken.tokenizer.encode("The cats sat, 世.")
    assert list(submit.token_ids) == prompt
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        text = "".join(choice["text"] for choice in mine)
        assert text == body["prompt"] + spoken.tokenizer.decode(ids)
        told = [choice["logprobs"] for choice in mine if choice["logprobs"]]
        tokens, offsets, numbers, tops = (
            [x for part in told for x in part[name]]
            for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
        )
        assert len(tokens) == len(prompt) + len(ids)
        special = spoken.tokenizer.special_token_ids
        for token, offset, token_id in zip(tokens, offsets, [*prompt, *ids], strict=True):
            if token.startswith("bytes:"):
                spelled = spoken.spelling.of(token_id, False)
                assert token == "bytes:" + spelled.decode(errors="backslashreplace")
                assert spelled[:1] in text[offset].encode() or spelled.startswith(b" ")
            elif token_id not in special:
                assert text[offset : offset + len(token)] == token
        assert {" cats", " sat"} & set(tokens)
        assert offsets == sorted(offsets)
        assert len(set(offsets)) > 10
        for token, number, top_of in zip(tokens[1:], numbers[1:], tops[1:], strict=True):
            assert top_of[token] == number


async def test_parts_of_characters_are_listed_one_by_one(open_house, spoken: Language) -> None:
    ids, top = texts_of(spoken)
    others = [i for i in top if i != ids[-1]][:4]
    async with open_house(saying(ids[-1:], others), language=spoken) as house:
        body = {"prompt": [5, 6], "logprobs": 4, "max_tokens": 1}
        [choice] = await asked(house, "/v1/completions", body)

    [told] = choice["logprobs"]["top_logprobs"]
    assert list(told.values()) == [*(-0.5 - place for place in range(len(others))), -9.0]


async def test_of_tokens_with_one_text_the_most_likely_and_the_chosen_one_are_listed(
    open_house, tmp_path: Path
) -> None:
    language = Language(write(tmp_path, "mixtral", {}, {**CONFIG, "vocab_size": 500}))
    ids = [language.tokenizer.token_to_id(token) for token in ("▁t", "t", "▁s", "s")]
    assert None not in ids
    # The first token of an answer loses its blank.
    for chosen, told in ((ids[2], {"t": -0.5, "s": -9.0}), (ids[1], {"t": -9.0, "s": -2.5})):
        async with open_house(saying([chosen], ids), language=language) as house:
            body = {"prompt": [5, 6], "logprobs": 4, "max_tokens": 1}
            [choice] = await asked(house, "/v1/completions", body)

        assert choice["logprobs"]["top_logprobs"] == [told]
        assert choice["logprobs"]["token_logprobs"] == [-9.0]


async def test_the_strings_of_tokenize_keep_their_blanks(open_house, spoken: Language) -> None:
    text = "The cats sat."
    async with open_house(language=spoken) as house:

        async def strings(**body: Any) -> list[str]:
            answer = await house.client.post("/tokenize", json={"return_token_strs": True, **body})
            return list(answer.json()["token_strs"])

        plain = await strings(prompt=text, add_special_tokens=False)
        framed = await strings(prompt=text)
        chat = await strings(messages=[{"role": "user", "content": text}])

    assert "".join(plain) == text
    assert {" cats", " sat", " s"} & set(plain)
    assert "".join(framed).removeprefix("<s>").removesuffix("</s>") == text
    ids = await spoken.encode_chat(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        template_kwargs={},
        control_tokens=False,
    )
    assert "".join(chat) == spoken.tokenizer.decode(ids.token_ids, skip_special_tokens=False)


async def test_tokens_named_by_their_ids_keep_their_own_bytes(open_house, tmp_path: Path) -> None:
    named = {"chat_template": CHAT_TEMPLATE}
    language = Language(write(tmp_path, "o200k", {TOKENIZER: named}, {**CONFIG, "vocab_size": 500}))
    ids, top = texts_of(language)
    body = {
        "messages": [{"role": "user", "content": "a"}],
        **{"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True},
    }
    async with open_house(saying(ids, top[:1]), language=language) as house:
        [choice] = await asked(house, "/v1/chat/completions", body)

    told = choice["logprobs"]["content"]
    assert [entry["token"] for entry in told] == [f"token_id:{i}" for i in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == PARTED
