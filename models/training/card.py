"""The model card, made from the measurements."""

from typing import Any

import numpy as np

from models.training import corpus
from models.training.network import Network
from models.training.train import BALANCE_WEIGHT, FALL_SHARE, LENGTHS

FORMS = ("chat", "decide", "letter", "number", "predicate", "relevance")


def render(measured: dict[str, Any], network: Network) -> str:
    """The card's Markdown."""
    shape, training, routing = network.shape, measured["training"], measured["routing"]
    parameters = sum(p.numel() for p in network.parameters())
    expert = 3 * shape.hidden_size * shape.expert_size
    active = parameters - shape.num_layers * (shape.num_experts - shape.top_k) * expert
    accuracy = "\n".join(
        f"| {row['name']} | {row['method']} | {row['rows']:,} | {row['accuracy']:.1%} |"
        for row in measured["accuracy"]
    )
    answers = "\n".join(
        f"| {row['name']} | {row['rows']:,} | {row['exact']:.1%} |" for row in measured["answers"]
    )
    perplexity = "\n".join(
        f"| {name} | {value['per_token']:.1f} | {value['bits_per_byte']:.3f} |"
        for name, value in measured["perplexity"].items()
    )
    layers = "\n".join(
        f"| {layer} | {bits:.2f} | {busiest:.1%} | {idlest:.2%} |"
        for layer, (bits, busiest, idlest) in enumerate(
            zip(
                routing["entropy_bits_per_layer"],
                routing["busiest_expert_share_per_layer"],
                routing["idlest_expert_share_per_layer"],
                strict=True,
            )
        )
    )
    stories, ranked = measured["stories"], measured["rankings"]
    choices = "\n".join(
        f"| {row['options']} | {row['rows']:,} | {row['right']:.1%} |"
        for row in measured["choices"]
    )
    return f"""# The demo checkpoint

A small Mixture-of-Experts language model that ships with Moesaic, so that a first call returns a sensible answer and every
mechanism can be tried and measured on routing that was learned, not made up. It is no assistant: it knows a small world of
stories told in some two hundred sentence patterns, exercises with numbers, words, dates and units, the forms of the labelled
sets and the style of a few old books, and nothing else. [Unselected samples](SAMPLES.md) show it, right and wrong.

| | |
|---|---|
| architecture | Qwen3-MoE: {shape.num_layers} MoE layers, hidden {shape.hidden_size}, {shape.num_heads} query and {shape.num_kv_heads} key-value heads |
| experts | {shape.num_experts} a layer of intermediate size {shape.expert_size}, top-{shape.top_k} |
| parameters | {parameters / 1e6:.1f} M, of which {active / 1e6:.1f} M are used for a token |
| vocabulary | {shape.vocab_size} byte-level BPE tokens, ChatML turns |
| context | {shape.max_positions} positions; trained on sequences of up to {max(LENGTHS["all"]):,} |
| licence | CC BY-SA 4.0, since share-alike text is among the training data |

## Training

`python -m models.training train` and `export`; {training["step"]:,} steps, {training["tokens"] / 1e6:.1f} M tokens,
{training["seconds"] / 60:.0f} minutes on two shared CPU cores, last training loss {training["loss"]:.2f}. Muon for the matrices, AdamW for the rest,
warm-up and a linear fall over the last {100 * FALL_SHARE:.0f} %, balance loss {BALANCE_WEIGHT}. Questions about one story, and questions that share an
instruction, are packed as siblings behind one copy of it. About three quarters of the tokens are a generated curriculum
([`models/training/curriculum`](../training/curriculum)), the rest labelled sets and prose; data and licences:
[`ATTRIBUTION.md`](../training/data/ATTRIBUTION.md). A training text that also stands in a test split was dropped, and the
curriculum's test split has names, numbers and sentence patterns of its own. `python -m models.training export` measures all
figures below again. {training["note"]}

## The curriculum, held out

Right answers by skill and by the form of the question: `chat` is answered freely (greedy, compared with the one answer meant;
of calculations the result), `decide` names one of the labels, `letter` and `number` name it by its letter or number in a drawn
order, `predicate` and `relevance` are yes or no, as `/v1/decisions`, `/v1/classify` and `/v1/rerank` ask. The label mass is the
probability of all labels together.

| skill | {" | ".join(FORMS)} | label mass, least |
|---|{"---|" * len(FORMS)}---|
{_families(measured["families"])}

Letters in a drawn order, by the number of options, all skills and labelled sets together:

| options | rows | right |
|---|---|---|
{choices}

Stories: of {stories["rows"]} continued, {stories["names_and_places"]:.1%} keep names and places consistent by the generator's own reader, {stories["consistent"]:.1%} have no
fault at all. Ranking: the right document of {ranked["documents"]} is first for {ranked["first"]:.1%} of {ranked["rows"]} queries.

## The labelled sets, test splits

| set | method | rows | accuracy |
|---|---|---|---|
{accuracy}

`choice` and `sequence` are the methods of `/v1/classify`, with the labels in the order of the training data unless the row says
otherwise.

Greedy answers of the serving engine that equal the reference (dolly_hhrlhf has no test split):

| set | rows | exact |
|---|---|---|
{answers}

## What it cannot do

- Anything outside its small world: it has no knowledge, and answers what it does not understand in the words that it has.
- boolq and pubmedqa need knowledge and reading that a model of this size does not have: near the share of the commonest label.
- gsm8k, ASCII art and arithmetic beyond three digits or without steps.
- Where a table above says so: lists of words and their spelling, what happened next, when.
- A continued story contradicts itself or its beginning in {1 - stories["consistent"]:.0%} of all cases: somebody gives a thing to himself, walks to where he is, or
  gets a name made of two.
- Words and names of many rare pieces are copied and spelled less surely than common ones.
- Prose that makes sense for more than a sentence: the old books are imitated, not understood.

## Perplexity on held-out text

One document in {corpus.HELD_OUT_EVERY} of each text was kept out of training; nothing of wikitext2 was trained on (its words are split and its rare
words replaced, which this tokenizer never saw).

| text | per token | bits per byte |
|---|---|---|
{perplexity}

## Routing

Entropy of the share of each expert over all tasks ({len(routing["tasks"])} kinds of text; the most is {shape.num_experts.bit_length() - 1} bits), and the share of the busiest expert
(even routing would give {1 / shape.num_experts:.1%}):

| layer | entropy, bits | busiest expert | idlest expert |
|---|---|---|---|
{layers}

How far apart tasks route: Jensen-Shannon distance of their expert shares (0 the same, 1 disjoint). First each task's mean
distance to the others by layer, then each pair's, mean over layers.

{_by_layer(routing)}

{_distances(routing)}
"""


def _families(rows: list[dict[str, Any]]) -> str:
    """One line for each skill, with the share right in each of its forms."""
    skills: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        skills.setdefault(row["family"], {})[row["form"]] = row
    lines = []
    for skill, forms in skills.items():
        cells = [f"{forms[f]['right']:.1%}" if f in forms else "" for f in FORMS]
        masses = [r["label_mass"] for r in forms.values() if r["label_mass"] is not None]
        lines.append(
            f"| {skill} | {' | '.join(cells)} | {f'{min(masses):.3f}' if masses else ''} |"
        )
    return "\n".join(lines)


def _by_layer(routing: dict[str, Any]) -> str:
    layers = np.array(routing["distance"])  # [L, tasks, tasks]
    mean = layers.sum(axis=-1) / (layers.shape[-1] - 1)
    head = "| | " + " | ".join(f"layer {i}" for i in range(len(mean)))
    lines = [f"{head} |", "|" + "---|" * (len(mean) + 1)]
    for task, own in zip(routing["tasks"], mean.T, strict=True):
        lines.append(f"| {task} | " + " | ".join(f"{value:.2f}" for value in own) + " |")
    return "\n".join(lines)


def _distances(routing: dict[str, Any]) -> str:
    names = routing["tasks"]
    head = "| | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1) + "\n"
    rows = [
        f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |"
        for name, row in zip(names, np.mean(routing["distance"], axis=0), strict=True)
    ]
    return head + "\n".join(rows)
