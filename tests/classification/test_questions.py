"""Questions that each are a read of their own: labels one by one, decisions, relevance."""

import math
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.classification.candidates import odds, yes_or_no
from moesaic.classification.decisions import Asked, Turn, evidence_of, mean_level, put
from moesaic.classification.dialogue import Dialogue
from moesaic.classification.forms import Label, assemble, normal_form
from moesaic.classification.relevance import Relevance, relevance_of
from moesaic.classification.wording import PACKAGED
from moesaic.errors import InvalidInput
from tests.classification.conftest import END, relaxed

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=30)
NAMES = st.lists(
    WORDS.filter(lambda name: name.strip()), min_size=1, max_size=6, unique_by=str.strip
)
LOGPROBS = st.floats(-60, -0.01)


@relaxed
@given(names=NAMES, text=WORDS)
def test_prompts_about_labels_share_the_text(dialogue, tokenizer, names, text) -> None:
    form = normal_form(dialogue, [Label(name) for name in names], "Sort.", "multi")

    reads = list(form.reads(text))

    asked = [tokenizer.decode(read.prompt) for read in reads]
    values = {"instruction": "Sort.", "text": text.strip(), "label": "\0"}
    shared, _, _ = PACKAGED.render("multi", **values).partition("\0")
    assert all(shared in prompt for prompt in asked)
    columns = zip(*(read.prompt for read in reads), strict=False)
    common = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
    assert shared[:-1] in tokenizer.decode(common)  # the quotation mark may be one with a letter
    for name, prompt in zip(names, asked, strict=True):
        assert f'"{name.strip()}"' in prompt
    assert {read.candidates for read in reads} == {yes_or_no(dialogue)}


@relaxed
@given(names=NAMES, data=st.data())
def test_labels_asked_one_by_one_do_not_depend_on_each_other(dialogue, names, data) -> None:
    form = normal_form(dialogue, [Label(name) for name in names], method="multi")
    reads = data.draw(
        st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=len(names), max_size=len(names))
    )

    answer = assemble(form, reads)

    for read, prob in zip(reads, answer.probs, strict=True):
        assert prob == pytest.approx(1 / (1 + math.exp(read[1] - read[0])))
    best = max(range(len(names)), key=lambda i: (answer.probs[i], reads[i][0], -i))
    assert answer.label == answer.ranked[0].label == names[best].strip()
    assert answer.label_mass == min(label.label_mass for label in answer.ranked)
    assert answer.label_mass == pytest.approx(min(min(1, sum(map(math.exp, r))) for r in reads))


def test_a_number_that_is_missing_is_no_answer(dialogue) -> None:
    multi = normal_form(dialogue, [Label("a"), Label("b")], method="multi")
    decision = put(dialogue, Asked("predicate", "Is it?"), "questions[0]")

    for broken in ([[-1.0, -2.0]], [[-1.0], [-2.0]], [[-1.0, -1.0], [-1.0, math.nan]]):
        with pytest.raises(ValueError, match="expected"):
            assemble(multi, broken)
    with pytest.raises(ValueError, match="expected 2"):
        decision.odds([-1.0])


def test_yes_and_no_are_scored_whole_where_they_are_no_single_tokens(
    tokenizer, make_template
) -> None:
    own = {"version": "mine", "words": {"yes": "certainly", "no": "by no means"}}
    wording = PACKAGED.replaced(own, "moesaic.json")
    dialogue = Dialogue.of(tokenizer, make_template(), [END], wording)

    yes, no = yes_or_no(dialogue)

    assert [len(c) > 1 for c in yes_or_no(dialogue)] == [True, True]
    assert yes[-1] == no[-1] == END
    assert tokenizer.decode(list(no[:-1])) == "by no means"


def test_without_a_template_the_question_ends_as_the_words_say(tokenizer) -> None:
    wording = PACKAGED.replaced({"version": "mine", "words": {"tail": "\n=>"}}, "moesaic.json")

    dialogue = Dialogue.of(tokenizer, None, [END], wording)

    assert tokenizer.decode(dialogue.ask("Is it?")) == "Is it?\n=>"


@relaxed
@given(
    kind=st.sampled_from(["choice", "score"]),
    names=NAMES.filter(lambda names: len(names) > 1),
    order=st.sampled_from([("token", "choice", "sequence"), ("token", "sequence"), ("choice",)]),
)
def test_options_are_told_apart_and_stand_in_the_prompt(
    dialogue, tokenizer, kind, names, order
) -> None:
    asked = Asked(kind, "Which?", [Label(name) for name in names])

    question = put(dialogue, asked, "questions[0]", order)

    read = question.read("the input")
    prompt = tokenizer.decode(read.prompt)
    assert len(set(read.candidates)) == len(names)
    assert prompt.index("the input") < prompt.index("Which?")
    assert all(name.strip() in prompt for name in names)
    if question.template == "decide_by_number":
        digits = [tokenizer.decode(list(candidate)) for candidate in read.candidates]
        assert digits == [str(i) for i in range(len(names))]


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (Asked("predicate", " "), "questions[7].instructions"),
        (Asked("choice", "a", [Label("b")]), "questions[7].choices"),
        (Asked("choice", "a", [Label("b"), Label("b ")]), "questions[7].choices[1]"),
        (Asked("score", "a", [Label("b"), Label("")]), "questions[7].levels[1]"),
    ],
)
def test_what_is_wrong_with_a_question_is_named(dialogue, asked: Asked, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        put(dialogue, asked, "questions[7]")

    assert caught.value.field == field


def test_options_that_the_model_s_methods_cannot_tell_apart_are_named(dialogue) -> None:
    options = [Label(f"option {i}") for i in range(27)]

    with pytest.raises(InvalidInput, match="at most 26") as caught:
        put(dialogue, Asked("choice", "a", options), "questions[0]", ("token", "choice"))

    assert caught.value.field == "questions[0].choices"


@given(st.lists(LOGPROBS, min_size=2, max_size=10))
def test_the_mean_level_is_between_the_first_and_the_last(logprobs: list[float]) -> None:
    shares, mass = odds(logprobs)

    assert math.fsum(shares) == pytest.approx(1)
    assert -1e-9 <= mean_level(shares) <= len(logprobs) - 1 + 1e-9
    assert 0 < mass <= 1


def test_a_conversation_is_told_with_who_said_what() -> None:
    turns = [Turn("system", "Be fair."), Turn("user", " Hello ")]

    assert evidence_of(turns) == "System: Be fair.\n\nUser: Hello"
    assert evidence_of([Turn("user", "Hello")]) == "Hello"
    assert evidence_of([Turn("assistant", "Hello")]) == "Assistant: Hello"


def test_documents_of_a_query_are_judged_behind_it(dialogue, tokenizer) -> None:
    relevance = Relevance(dialogue, "Is it useful?")

    prompts = [tokenizer.decode(relevance.read("a {query}", text).prompt) for text in ("b", "c")]

    values = {"instruction": "Is it useful?", "query": "a {query}", "document": "\0"}
    head, _, _ = PACKAGED.render("relevance", **values).partition("\0")
    assert [prompt.partition(head)[2][0] for prompt in prompts] == ["b", "c"]
    assert relevance_of([math.log(0.3), math.log(0.1)]) == pytest.approx((0.75, 0.4))
