"""Biases and penalties of a batch, against one request at a time in dictionaries, and against
``transformers``."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from moesaic.engine.sequences.requests import GenerationTask, Request, RequestKey, Sampling
from moesaic.engine.sequences.sampling import process
from moesaic.engine.sequences.sequence import GenerationSequence
from moesaic.fairness import Claim

VOCAB = 12
TOKEN = st.integers(0, VOCAB - 1)
PENALTY = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.25, 2.0])


def answer_of(prompt: list[int], said: list[int], **task: object) -> GenerationSequence:
    generation = GenerationTask(max_tokens=100, **task)  # type: ignore[arg-type]
    request = Request(RequestKey("r"), tuple(prompt), generation)
    return GenerationSequence(
        request=request, claim=Claim(), task=generation, tokens=[*prompt, *said]
    )


def reference(logits: list[float], answer: GenerationSequence) -> list[float]:
    """The same, token by token, of the published formulas."""
    how, prompt = answer.task.sampling, answer.request.token_ids
    said = Counter(answer.tokens[len(prompt) - answer.task.num_resumed :])
    changed = []
    for token, value in enumerate(logits):
        value += dict(how.logit_bias).get(token, 0.0)
        if token in answer.tokens:
            factor = how.repetition_penalty
            value = value / factor if value > 0 else value * factor
        value -= how.frequency_penalty * said[token]
        value -= how.presence_penalty if token in said else 0.0
        early = answer.num_generated < answer.task.min_tokens
        masked = early and token in answer.task.stop_token_ids
        masked |= bool(how.allowed_token_ids) and token not in how.allowed_token_ids
        changed.append(-math.inf if masked else value)
    complete = {
        word[-1]
        for word in how.bad_words
        if answer.answer_tokens[len(answer.answer_tokens) - len(word) + 1 :] == list(word[:-1])
        and len(answer.answer_tokens) >= len(word) - 1
    }
    clean = [-math.inf if token in complete else value for token, value in enumerate(changed)]
    return changed if max(clean) == -math.inf else clean


@st.composite
def answers(draw: st.DrawFn) -> GenerationSequence:
    prompt = draw(st.lists(TOKEN, min_size=1, max_size=8))
    sampling = Sampling(
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.0, 1.3])),
        presence_penalty=draw(PENALTY),
        frequency_penalty=draw(PENALTY),
        logit_bias=tuple(draw(st.dictionaries(TOKEN, PENALTY, max_size=4)).items()),
        allowed_token_ids=tuple(draw(st.just(set()) | st.sets(TOKEN, min_size=1, max_size=9))),
        bad_words=tuple(draw(st.lists(st.tuples(TOKEN) | st.tuples(TOKEN, TOKEN), max_size=6))),
    )
    return answer_of(
        prompt,
        draw(st.lists(TOKEN, max_size=10)),
        sampling=sampling,
        num_resumed=draw(st.integers(0, len(prompt))),
        min_tokens=draw(st.sampled_from([0, 0, 5])),
        stop_token_ids=draw(st.frozensets(TOKEN, max_size=3)),
    )


@given(st.lists(answers(), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_every_row_gets_what_its_request_asks_for(
    batch: list[GenerationSequence], seed: int
) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()

    for token in (3, 3, 7):  # counts are kept from step to step
        expected = torch.tensor(
            [reference(row, a) for row, a in zip(logits.tolist(), batch, strict=True)]
        )
        torch.testing.assert_close(process(logits, batch), expected)
        torch.testing.assert_close(process(logits, batch), expected)  # nothing is counted twice
        for answer in batch:
            answer.tokens.append(token)

    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("task", "theirs"),
    [
        ({"sampling": Sampling(repetition_penalty=1.7)}, RepetitionPenaltyLogitsProcessor(1.7)),
        (
            {"sampling": Sampling(logit_bias=((4, 2.5), (9, -100.0)))},
            SequenceBiasLogitsProcessor({(4,): 2.5, (9,): -100.0}),
        ),
        (
            {"sampling": Sampling(bad_words=((7,), (1, 11), (5, 1, 4)))},
            NoBadWordsLogitsProcessor([[7], [1, 11], [5, 1, 4]], eos_token_id=0),
        ),
        (
            {"min_tokens": 3, "stop_token_ids": frozenset({2, 5})},
            MinNewTokensLengthLogitsProcessor(3, 3, [2, 5]),
        ),
    ],
)
@pytest.mark.parametrize("said", [[], [5, 1], [5, 1, 1, 11]])
def test_transformers_agrees(
    task: dict[str, object], theirs: LogitsProcessor, said: list[int]
) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    answer = answer_of([1, 2, 3], said, **task)

    ours = process(logits, [answer])

    torch.testing.assert_close(ours, theirs(torch.tensor([answer.tokens]), logits.clone()))


def test_bad_words_yield_where_nothing_else_is_left() -> None:
    asked = Sampling(allowed_token_ids=(3, 5), bad_words=((3,), (5, 5)))
    logits = torch.zeros(2, VOCAB)

    first, after = process(logits, [answer_of([5], said, sampling=asked) for said in ([], [5])])

    assert first.isfinite().nonzero().flatten().tolist() == [5]
    assert after.isfinite().nonzero().flatten().tolist() == [3, 5]


def test_requests_that_ask_for_nothing_cost_nothing() -> None:
    logits = torch.zeros(2, VOCAB)
    plain = [answer_of([1], [2], sampling=Sampling(temperature=1.0, top_p=0.5)) for _ in range(2)]

    assert process(logits, plain) is logits
    assert all(answer.logit_state is None for answer in plain)


@given(answers(), st.integers(0, 10))
@settings(max_examples=50, deadline=None)
def test_a_request_that_goes_on_elsewhere_is_treated_as_if_it_had_stayed(
    stayed: GenerationSequence, moved: int
) -> None:
    task, prompt = stayed.task, list(stayed.request.token_ids)
    moved = min(moved, stayed.num_generated)
    said = stayed.tokens[len(prompt) :]
    arrived = answer_of(
        prompt + said[:moved],
        said[moved:],
        sampling=task.sampling,
        num_resumed=task.num_resumed + moved,
        min_tokens=max(0, task.min_tokens - moved),
        stop_token_ids=task.stop_token_ids,
    )
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))

    assert torch.equal(process(logits, [stayed]), process(logits, [arrived]))
