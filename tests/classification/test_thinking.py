"""Questions to the demo model with a template that opens a thought."""

import json
from pathlib import Path

import pytest

from models.training.answers import Asked as Prompt
from models.training.answers import answer_all
from moesaic.classification.candidates import Odds
from moesaic.classification.decisions import Asked, put
from moesaic.services.gateway.language import Language

DEMO = Path(__file__).parents[2] / "models" / "demo"
OPENS = "{% if add_generation_prompt and SWITCH %}{{ '<think>\n' }}{% endif %}"
SWITCHES = [
    "(enable_thinking is not defined or enable_thinking)",
    "(thinking is not defined or thinking)",
    "(enable_thinking | default(true)) and (thinking | default(true))",
]


def odds_with(directory: Path, template: str) -> list[Odds]:
    """Ask the demo model, with a longer chat template."""
    for path in DEMO.glob("*.*"):
        if path.name != "tokenizer_config.json" and not (directory / path.name).exists():
            (directory / path.name).symlink_to(path)
    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] += template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    dialogue = Language(directory).dialogue
    asked = [Asked("predicate", f"The cat is {color}.") for color in ("red", "black")]
    questions = [put(dialogue, one, "questions") for one in asked]
    reads = [question.read("Anna has a black cat and a green ball.") for question in questions]
    answers = answer_all(directory, [Prompt(tuple(r.prompt), r.candidates) for r in reads])
    return [
        question.odds([float(logprob) for logprob in logprobs])
        for question, logprobs in zip(questions, answers, strict=True)
    ]


@pytest.mark.parametrize("switch", SWITCHES)
def test_the_prompt_of_a_question_ends_where_the_model_answers(tmp_path: Path, switch: str) -> None:
    (no, without), (yes, with_it) = odds_with(tmp_path, OPENS.replace("SWITCH", switch))

    assert no[0] < 0.2 < 0.8 < yes[0]
    assert min(without, with_it) > 0.999


def test_thoughts_that_cannot_be_turned_off_are_closed(tmp_path: Path) -> None:
    template = OPENS.replace("SWITCH", "true")

    odds = odds_with(tmp_path, template)

    # The model does not know the tags, but it answers after the closing tag.
    assert min(mass for _, mass in odds) > 0.9
