"""Heads are told to look where the answer stands, and at no place that the question cannot see."""

import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from models.training.curriculum import copying, relevance
from models.training.curriculum.items import Group, Mention, Question, by_letter, predicate
from models.training.evidence import KEY_HEAD, LAYERS, evidence_losses, to_looks
from models.training.fused import heads_of, rms_norm
from models.training.looks import Look
from models.training.network import Block, Network, Shape
from models.training.packs import Pack, Packer, Part
from models.training.train import step_loss, to_batch
from moesaic.classification.prompts import question as word_question

STORY = "Anna was in the mill. Tom handed the lamp to Anna. She went to the barn.\n\n"
SUBJECTS = ((20, "Anna"), (49, "Tom"), (71, "Anna"))


@pytest.fixture(scope="module")
def packer(few: None, tokenizer: Tokenizer) -> Packer:
    return Packer(tokenizer, 0, {"copying": 0.5, "rerank": 0.5})


def _behind(
    packer: Packer, tokenizer: Tokenizer, *questions: Question
) -> list[tuple[str, list[str]]]:
    """Kinds of all looks, and the text up to each place."""
    part = packer.lay_out(Group(STORY, questions, subjects=SUBJECTS), 400)
    assert part is not None
    return [(look.kind, _texts(tokenizer, part, look)) for look in part.looks]


def _texts(tokenizer: Tokenizer, part: Part, look: Look) -> list[str]:
    own = part.sibling[look.end]
    seen = [t for t in range(look.end) if part.sibling[t] in (0, own)]
    assert set(look.at.tolist()) <= set(seen)
    return [
        tokenizer.decode([int(part.tokens[t]) for t in seen if t <= place]) for place in look.at
    ]


def test_a_letter_follows_from_the_word_in_the_text_and_in_the_list(
    packer: Packer, tokenizer: Tokenizer
) -> None:
    asked = by_letter("where", "Where is Anna?", ["mill", "barn", "barns"], "barn")

    [(told, in_text), (listed, in_list)] = _behind(packer, tokenizer, asked)

    assert (told, listed) == ("told", "listed")
    assert [text[-8:] for text in in_text] == ["the barn"]
    assert [text[-7:] for text in in_list] == ["B. barn"]


def test_a_person_is_known_at_the_end_of_what_is_told_of_them(
    packer: Packer, tokenizer: Tokenizer
) -> None:
    asked = replace(by_letter("who", "Who has the lamp?", ["Tom", "Anna"], "Anna"), about="")

    [(_, in_text), _] = _behind(packer, tokenizer, asked)

    assert [text[-8:] for text in in_text] == ["the mill", " to Anna", "the barn"]


@pytest.mark.parametrize(("said", "holds"), [("barn", True), ("mill", False)])
def test_what_is_not_so_is_told_by_the_first_token(
    packer: Packer, tokenizer: Tokenizer, said: str, holds: bool
) -> None:
    asked = predicate("is it so", f"Anna is in the {said}.", holds, hint="barn")

    [(_, in_text), (_, stated)] = _behind(packer, tokenizer, asked)

    assert [text[-8:] for text in in_text] == ["the barn"]
    assert [text[-8:] for text in stated] == (["the barn"] if holds else [""])


def test_a_letter_of_options_before_the_text_is_looked_up_there(
    packer: Packer, tokenizer: Tokenizer
) -> None:
    head = word_question("", ["credit cards", "work"], "What is it about?", "choice")
    asked = Question("intent", "decide", "I lost my credit cards", "A", ("A", "B"), "credit cards")

    part = packer.lay_out(Group(head, (asked,)), 400)

    assert part is not None
    [look] = part.looks
    assert look.kind == "listed"
    assert [text[-15:] for text in _texts(tokenizer, part, look)] == ["A. credit cards"]


@pytest.mark.parametrize(("label", "ends"), [("exchange rate", '"exchange rate'), ("work", "")])
def test_a_label_in_quotation_marks_is_found(
    packer: Packer, tokenizer: Tokenizer, label: str, ends: str
) -> None:
    tail = f'Does the label "{label}" apply to this text?'
    answer = "yes" if ends else "no"
    asked = Question("multi", "predicate", tail, answer, ("yes", "no"), hint="exchange rate")

    looks = dict(_behind(packer, tokenizer, asked))

    assert [text[-len(ends) or len(text) :] for text in looks["listed"]] == [ends]


def test_a_number_is_no_part_of_a_longer_one(packer: Packer, tokenizer: Tokenizer) -> None:
    asked = by_letter("how many", "How many?", ["12", "2", "21"], "2")

    looks = dict(_behind(packer, tokenizer, asked))

    assert [text[-4:] for text in looks["listed"]] == ["B. 2"]


def test_all_that_is_looked_at_can_be_seen(packer: Packer) -> None:
    for _ in range(20):
        pack = packer.pack(384)
        mask = pack.mask()
        assert pack.looks
        for look in pack.looks:
            assert len(look.at)
            assert mask[look.end, look.at].all()
            assert look.kind == "said" or pack.hint[look.end] >= 0


def test_ahead_of_a_word_said_again_its_own_token_is_looked_at(
    few: None, tokenizer: Tokenizer
) -> None:
    packer, copied, looks, unlike = Packer(tokenizer, 0, {"tales": 0.7, "words": 0.3}), 0, 0, 0
    for _ in range(20):
        pack = packer.pack(384)
        for look in pack.looks:
            if look.at.tolist() == [document_start(pack, look)]:
                continue  # nothing is to be copied
            said = pack.tokens[look.end + 1]
            copied += int((pack.tokens[look.at] == said).any())
            looks += 1
        for place, token in pack.unlike:
            assert pack.tokens[place + 1] != token
            assert pack.weight[place] > 0
        unlike += len(pack.unlike)
    assert unlike > 50
    # At the beginning of a text a word has no space before it, and may be cut in other tokens.
    assert copied > 0.85 * looks


def document_start(pack: Pack, look: Look) -> int:
    return int(np.flatnonzero(pack.document == pack.document[look.end])[0])


def test_a_word_s_tokens_are_looked_at_one_by_one(packer: Packer, tokenizer: Tokenizer) -> None:
    answer = "Sneerad came last. Then Anna met Sneerad."
    mentions = (Mention(0, "Sneerad"), Mention(24, "Anna", ("Sneerad",)), Mention(33, "Sneerad"))
    asked = Question("tell", "chat", "Tell of Sneerad and Anna.", answer, mentions=mentions)

    part = packer.lay_out(Group("", (asked,)), 400)

    assert part is not None
    said = [
        (tokenizer.decode([int(part.tokens[look.end + 1])]), _last_words(tokenizer, part, look))
        for look in part.looks
        if look.at.tolist() != [0]
    ]
    nothing = [part.tokens[: look.end + 1] for look in part.looks if look.at.tolist() == [0]]
    ends = [tokenizer.decode(before.tolist())[-5:] for before in nothing]
    assert ends == ["eerad", " Anna", "eerad"]
    pieces = tokenizer.encode(" Sneerad", add_special_tokens=False).tokens
    assert "".join(word for word, _ in said[-len(pieces) :]) == " Sneerad"
    assert all(set(places) == {word} for word, places in said[-len(pieces) + 1 :])
    assert [
        (tokenizer.decode([int(part.tokens[at])]), tokenizer.decode([token]))
        for at, token in part.unlike
    ] == [(" Then", " S")]


def _last_words(tokenizer: Tokenizer, part: Part, look: Look) -> list[str]:
    return [tokenizer.decode([int(part.tokens[at])]) for at in look.at]


def test_documents_that_do_not_answer_are_told_by_the_first_token(packer: Packer) -> None:
    rng = random.Random(0)
    for _ in range(20):
        group = relevance.judged(rng, "train")
        part = packer.lay_out(group, 1000)
        assert part is not None
        looks = {int(part.sibling[look.end]): look.at.tolist() for look in part.looks}
        for number, question in enumerate(group.questions, start=1):
            assert (looks.get(number) == [0]) == (question.answer == "no")


def test_the_loss_is_that_of_the_attention_paid(packer: Packer) -> None:
    torch.manual_seed(0)
    shape = Shape(num_experts=4, expert_size=16)
    network, packs = Network(shape), [packer.pack(256)]
    while {look.kind for pack in packs for look in pack.looks} != set(LAYERS):
        packs.append(packer.pack(256))
    batch = to_batch(packs, torch.device("cpu"))
    tapped: list[torch.Tensor] = []
    network(batch["tokens"], batch["mask"], batch["positions"], tapped)

    found = evidence_losses(network, tapped, batch)

    assert set(found) == set(LAYERS)
    for kind, layer in LAYERS.items():
        paid = _attention(network, layer, tapped[layer - 1], batch)
        expected = [
            -paid[i, head, look.end, look.at].sum().log()
            for i, pack in enumerate(packs)
            for look in pack.looks
            if look.kind == kind
            for head in range(2 * KEY_HEAD, 2 * KEY_HEAD + 2)
        ]
        torch.testing.assert_close(found[kind], torch.stack(expected).mean())


def test_what_cannot_stand_there_and_what_stood_before_have_losses(
    few: None, tokenizer: Tokenizer
) -> None:
    torch.manual_seed(0)
    network, packer = (
        Network(Shape(num_experts=4, expert_size=16)),
        Packer(tokenizer, 0, {"tales": 1}),
    )
    packs = [packer.pack(384)]
    batch = to_batch(packs, torch.device("cpu"))
    tapped: list[torch.Tensor] = []
    hidden, _, _ = network(batch["tokens"], batch["mask"], batch["positions"], tapped)

    losses = step_loss(network, batch)

    embedding, [pack] = network.embed_tokens.weight, packs
    chances = (hidden[0] @ embedding.T).softmax(dim=-1)
    unlike = [-(1 - chances[place, token]).log() for place, token in pack.unlike]
    assert losses.unlike == pytest.approx(torch.stack(unlike).mean().item(), rel=1e-3)
    thought = (network.norm(tapped[LAYERS["said"]][0]) @ embedding.T).log_softmax(dim=-1)
    echo = [
        -thought[look.end, pack.tokens[look.end + 1]]
        for look in pack.looks
        if look.kind == "said" and pack.tokens[look.end + 1] in pack.tokens[look.at]
    ]
    assert losses.echo == pytest.approx(torch.stack(echo).mean().item(), rel=1e-3)


def _attention(
    network: Network, layer: int, stream: torch.Tensor, batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    """All attention of a layer, ``[B, heads, T, T]``."""
    block, shape = network.layers[layer], network.shape
    assert isinstance(block, Block)
    heads, eps = block.self_attn, shape.rms_eps
    normed = rms_norm(stream, block.input_layernorm.weight, eps)
    cos, sin = (table[batch["positions"]].unsqueeze(2) for table in (network.cos, network.sin))
    query = heads.q_proj(normed).unflatten(-1, (-1, shape.head_dim))
    key = heads.k_proj(normed).unflatten(-1, (-1, shape.head_dim))
    query = heads_of(query, heads.q_norm.weight, cos, sin, eps, 1)
    key = heads_of(key, heads.k_norm.weight, cos, sin, eps, 2)
    scores = query @ key.transpose(2, 3) * shape.head_dim**-0.5
    return scores.masked_fill(~batch["mask"], -torch.inf).softmax(dim=-1)


def test_a_batch_without_questions_has_no_such_loss(packer: Packer) -> None:
    pack = replace(packer.pack(64), looks=[])
    looks = to_looks([pack], torch.device("cpu"))

    assert evidence_losses(Network(Shape(num_experts=4)), [], looks) == {}


@pytest.mark.parametrize("by_name", [True, False])
def test_a_recalled_fact_is_looked_up_at_its_end(
    packer: Packer, tokenizer: Tokenizer, by_name: bool
) -> None:
    checked = 0
    for seed in range(20):
        group = copying.recall(random.Random(seed), "train")
        part = packer.lay_out(group, 1000)
        assert part is not None
        told = {int(part.sibling[k.end]): k for k in part.looks if k.kind == "told"}
        facts = group.head.strip().removesuffix(".").split(". ")
        for number, question in enumerate(group.questions, start=1):
            if bool(question.about) == by_name:
                # "Anna is in the mill": by the person the mill is found, by the mill the person, both at its end.
                [fact] = [f for f in facts if question.hint in re.findall(r"\w+", f)]
                [text] = _texts(tokenizer, part, told[number])
                # A colour ends its sentence, and a number is followed by coins.
                ends = fact.removesuffix(" coins") if by_name else fact
                assert text.endswith(ends)
                checked += 1
    assert checked >= 10
