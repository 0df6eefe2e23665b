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

This small Mixture-of-Experts language model ships with Moesaic. A first call returns a sensible answer, and every mechanism
can be tried and measured on learned routing. It is no assistant. It knows only:

- a small world of stories, told in some two hundred sentence patterns;
- exercises with numbers, words, dates and units;
- the forms of the labelled sets;
- the style of a few old books.

[Unselected samples](SAMPLES.md) show right and wrong answers.

| | |
|---|---|
| architecture | Qwen3-MoE: {shape.num_layers} MoE layers, hidden {shape.hidden_size}, {shape.num_heads} query and {shape.num_kv_heads} key-value heads |
| experts | {shape.num_experts} a layer of intermediate size {shape.expert_size}, top-{shape.top_k} |
| parameters | {parameters / 1e6:.1f} M, of which {active / 1e6:.1f} M are used for a token |
| vocabulary | {shape.vocab_size} byte-level BPE tokens, ChatML turns |
| context | {shape.max_positions} positions; trained on sequences of up to {max(LENGTHS["all"]):,} |
| licence | CC BY-SA 4.0, since share-alike text is among the training data |

## Training

| | |
|---|---|
| commands | `python -m models.training train` and `export`; `export` measures all figures of this page again |
| length | {training["step"]:,} steps, {training["tokens"] / 1e6:.1f} M tokens, {training["seconds"] / 60:.0f} minutes on two shared CPU cores |
| last training loss | {training["loss"]:.2f} |
| optimisers | Muon for the matrices, AdamW for the other parameters |
| schedule | warm-up, and a linear fall over the last {100 * FALL_SHARE:.0f} % |
| balance loss | {BALANCE_WEIGHT} |
| data | three quarters a generated curriculum ([`models/training/curriculum`](../training/curriculum)), the remainder labelled sets and prose |
| licences of the data | [`ATTRIBUTION.md`](../training/data/ATTRIBUTION.md) |

Questions about one story are packed as siblings behind one copy of it. So are questions that share an instruction. Training
texts that also stand in a test split were dropped. The test split of the curriculum has its own names, numbers and sentence
patterns. {training["note"]}

## The curriculum, held out

The table has right answers by skill and by the form of the question. The label mass is the probability of all labels together.

| form | answer |
|---|---|
| `chat` | free and greedy, compared with the one expected answer; of calculations the result |
| `decide` | one of the labels |
| `letter`, `number` | the letter or number of a label, in a drawn order |
| `predicate`, `relevance` | yes or no, as `/v1/decisions`, `/v1/classify` and `/v1/rerank` ask |

| skill | {" | ".join(FORMS)} | label mass, least |
|---|{"---|" * len(FORMS)}---|
{_families(measured["families"])}

Letters in a drawn order, by the number of options, all skills and labelled sets together:

| options | rows | right |
|---|---|---|
{choices}

Of {stories["rows"]} continued stories, {stories["names_and_places"]:.1%} keep names and places consistent, by the generator's own reader. {stories["consistent"]:.1%} have no
fault at all. In ranking, the right document of {ranked["documents"]} is first for {ranked["first"]:.1%} of {ranked["rows"]} queries.

## The labelled sets, test splits

| set | method | rows | accuracy |
|---|---|---|---|
{accuracy}

`choice` and `sequence` are the methods of `/v1/classify`. Labels have the order of the training data, unless the row says
otherwise.

Greedy answers of the serving engine that equal the reference (dolly_hhrlhf has no test split):

| set | rows | exact |
|---|---|---|
{answers}

## What it cannot do

- It has no knowledge outside its small world. It answers other questions in the words that it has.
- Its accuracy on boolq and pubmedqa is near the share of the commonest label. They need more knowledge and reading than a
  model of this size has.
- It fails at gsm8k, at ASCII art, and at arithmetic beyond three digits or without steps.
- The table above shows more weak skills: lists of words and their spelling, "what then" and "when".
- A continued story contradicts itself or its beginning in {1 - stories["consistent"]:.0%} of all cases. A person gives a thing to himself, walks to
  his present place, or gets a name made of two.
- It copies and spells words and names of many rare pieces less surely than common ones.
- Its prose makes sense for one sentence at most. It imitates the old books without understanding.

## Perplexity on held-out text

One document in {corpus.HELD_OUT_EVERY} of each text was kept out of training. The model was not trained on wikitext2. In wikitext2 words are
split and rare words replaced, which this tokenizer never saw.

| text | per token | bits per byte |
|---|---|---|
{perplexity}

## Routing

The table has the entropy of the expert shares over all tasks ({len(routing["tasks"])} kinds of text; {shape.num_experts.bit_length() - 1} bits at most). It also has the shares of the
busiest and the idlest expert. Even routing would give {1 / shape.num_experts:.1%}.

| layer | entropy, bits | busiest expert | idlest expert |
|---|---|---|---|
{layers}

The next tables show how differently tasks route, by the Jensen-Shannon distance of their expert shares (0: equal, 1: disjoint).
The first has the mean distance of each task to the others by layer, the second that of each pair, mean over layers.

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
