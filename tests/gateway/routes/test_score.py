"""``/v1/score``, ``/v1/rerank`` and ``/generative_scoring``: pairs in, numbers out."""

import math
from typing import Any

import pytest

DOCUMENTS = ["a story about a house", "music", "travel"]


@pytest.fixture
def by_document(scripts, language) -> Any:
    """A worker to which the second document is relevant, the third less, the first not at all."""
    odds = {DOCUMENTS[0]: 0.1, DOCUMENTS[1]: 0.6, DOCUMENTS[2]: 0.3}

    async def script(submit, emit) -> None:
        text = language.tokenizer.decode(list(submit.token_ids))
        yes = next(odds[document] for document in DOCUMENTS if f"Document: {document}\n" in text)
        await scripts.scores(math.log(yes), math.log(0.75 - yes))(submit, emit)

    return script


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "body",
    [
        {"text_1": "songs", "text_2": DOCUMENTS},
        {"queries": ["songs"], "documents": DOCUMENTS},
        {"queries": ["songs"] * 3, "items": DOCUMENTS},
        {"data_1": "songs", "data_2": DOCUMENTS},
    ],
)
async def test_pairs_are_scored_in_their_order(open_house, by_document, path, body) -> None:
    async with open_house(by_document) as house:
        answer = (await house.client.post(path, json={**body, "model": "tiny"})).json()

    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert {item["object"] for item in answer["data"]} == {"score"}
    assert [item["score"] for item in answer["data"]] == pytest.approx(
        [0.1 / 0.75, 0.6 / 0.75, 0.3 / 0.75]
    )
    assert [item["label_mass"] for item in answer["data"]] == pytest.approx([0.75] * 3)
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert answer["moesaic"]["prompt_version"].startswith("moesaic-")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_the_most_relevant_document_comes_first(open_house, by_document, path) -> None:
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    body = {"query": "songs", "documents": documents}
    async with open_house(by_document) as house:
        whole = (await house.client.post(path, json=body)).json()
        some = await house.client.post(
            path, json={**body, "top_n": 2, "return_documents": False, "instruction": "Be kind."}
        )
        prompt = house.workers[0].submits[-1].token_ids

    assert [result["index"] for result in whole["results"]] == [1, 2, 0]
    assert whole["results"][0]["document"] == {"text": "music"}
    assert whole["results"][0]["relevance_score"] == pytest.approx(0.8)
    assert whole["results"][0]["label_mass"] == pytest.approx(0.75)
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] > 0
    assert [result["index"] for result in some.json()["results"]] == [1, 2]
    assert all("document" not in result for result in some.json()["results"])
    assert "Be kind.\n\nQuery: songs" in house.gateway.language.tokenizer.decode(list(prompt))


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("item_first", [False, True])
async def test_items_are_scored_by_their_next_token(
    open_house, scripts, as_ids: bool, item_first: bool
) -> None:
    texts = {"query": "hello ", "items": ["yes", "no"]}
    labels = [7, 9, 11]
    ids = {"query": scripts.ids("hello "), "items": [scripts.ids("yes"), scripts.ids("no")]}
    body = {**(ids if as_ids else texts), "label_token_ids": labels, "item_first": item_first}
    async with open_house(scripts.scores(*map(math.log, (0.2, 0.1, 0.1)))) as house:
        shares = (await house.client.post("/generative_scoring", json=body)).json()
        plain = await house.client.post(
            "/generative_scoring", json={**body, "apply_softmax": False}
        )
        submits = house.workers[0].submits[:2]

    assert shares["id"].startswith("generative-scoring-")
    assert [item["index"] for item in shares["data"]] == [0, 1]
    assert shares["data"][0]["score"] == pytest.approx(0.5)
    assert shares["data"][0]["probs"] == pytest.approx([0.5, 0.25, 0.25])
    assert shares["data"][0]["label_mass"] == pytest.approx(0.4)
    assert plain.json()["data"][1]["score"] == pytest.approx(0.2)
    for item, submit in zip(ids["items"], submits, strict=True):
        both = [*item, *ids["query"]] if item_first else [*ids["query"], *item]
        assert list(submit.token_ids) == both
        assert [list(c.token_ids) for c in submit.scoring.candidates] == [[7], [9], [11]]
