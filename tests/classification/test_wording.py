"""The words of prompts: data with a version, some of which a model may replace."""

import json
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.classification import wording
from moesaic.classification.prompts import question
from moesaic.classification.wording import PACKAGED
from moesaic.errors import CheckpointError

FILE = json.loads(resources.files("moesaic.classification").joinpath("wording.json").read_text())
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def test_the_packaged_words_are_those_that_were_published_under_their_version() -> None:
    # Changed words need a new version, and then this line changes with it.
    assert PACKAGED.version == "moesaic-1+12e15c00"


def test_the_demo_checkpoint_is_asked_as_it_was_trained() -> None:
    listed = "Pick. Choose exactly one of: a; b (like c).\n\n"
    by_letter = "Pick. Choose exactly one of:\nA. a\nB. b (like c)\n\n"

    for method, expected in (("token", listed), ("sequence", listed), ("choice", by_letter)):
        assert question("", ["a", "b (like c)"], "Pick.", method) == expected
        assert question(" text ", ["a", "b (like c)"], "Pick.", method) == expected + "text"


@given(st.fixed_dictionaries({name: TEXT for name in ("instruction", "text", "label")}))
def test_braces_in_values_are_text(values: dict[str, str]) -> None:
    asked = PACKAGED.render("multi", **values)

    assert all(value in asked for value in values.values())
    assert PACKAGED.render("multi", instruction="{text}", text="{label}", label="{x}").startswith(
        "{text}\n\n{label}\n\n"
    )


def test_a_model_replaces_only_what_is_different() -> None:
    own = {"version": "mine", "templates": {"multi": "{text}! {instruction} Is it {label}?"}}

    words = PACKAGED.replaced(own, "moesaic.json")

    assert words.render("multi", text="a", instruction="b", label="c") == "a! b Is it c?"
    assert words.templates["token"] == PACKAGED.templates["token"]
    assert words.version.startswith("mine+")
    other = PACKAGED.replaced({**own, "words": {"yes": "Yes"}}, "moesaic.json")
    assert other.version.startswith("mine+")
    assert (
        other.version != words.version
    )  # other words are told apart though they have the same name


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ("words", "wording: expected an object"),
        ({}, "wording.version"),
        ({"version": "a b"}, "wording.version"),
        ({"version": "a" * 65}, "wording.version"),
        ({"version": "a", "prompts": {}}, "wording.prompts: is not one of"),
        ({"version": "a", "words": []}, "wording.words: expected an object"),
        ({"version": "a", "words": {"maybe": "x"}}, "wording.words.maybe: is not one of"),
        ({"version": "a", "words": {"yes": " "}}, "wording.words.yes: expected a text"),
        ({"version": "a", "templates": {"token": "{text}"}}, "templates.token: must have"),
        ({"version": "a", "templates": {"multi": "{text}{text}{label}"}}, "each once"),
    ],
)
def test_bad_words_are_named(own: Any, problem: str) -> None:
    with pytest.raises(CheckpointError, match=r"moesaic\.json") as caught:
        PACKAGED.replaced(own, "moesaic.json")

    assert problem in str(caught.value)


def test_every_template_of_the_file_is_one_that_is_used() -> None:
    assert sorted(FILE["templates"]) == sorted(wording.PLACEHOLDERS)
    assert sorted(FILE["words"]) == sorted(wording.WORDS)


@pytest.mark.parametrize(
    "name", [name for name, needed in wording.PLACEHOLDERS.items() if "|" in needed]
)
def test_what_siblings_share_comes_first(name: str) -> None:
    shared, _, own = (part.split() for part in wording.PLACEHOLDERS[name].partition("|"))
    template = PACKAGED.templates[name]

    places = {slot: template.index(f"{{{slot}}}") for slot in [*shared, *own]}

    assert max(places[slot] for slot in shared) < min(places[slot] for slot in own)
