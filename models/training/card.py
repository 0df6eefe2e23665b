"""The model card, made from the measurements."""

from typing import Any

from models.training import corpus
from models.training.network import Network
from models.training.train import BALANCE_WEIGHT


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
        f"| {layer} | {bits:.2f} | {busiest:.1%} |"
        for layer, (bits, busiest) in enumerate(
            zip(
                routing["entropy_bits_per_layer"],
                routing["busiest_expert_share_per_layer"],
                strict=True,
            )
        )
    )
    return f"""# The demo checkpoint

A small Mixture-of-Experts language model that ships with Moesaic, so that a first call returns a sensible label and every
mechanism can be tried and measured on routing that was learned, not made up. It is no assistant: it knows the texts below
and the forms of the labelled sets, and nothing else.

| | |
|---|---|
| architecture | Qwen3-MoE: {shape.num_layers} MoE layers, hidden {shape.hidden_size}, {shape.num_heads} query and {shape.num_kv_heads} key-value heads |
| experts | {shape.num_experts} a layer of intermediate size {shape.expert_size}, top-{shape.top_k} |
| parameters | {parameters / 1e6:.1f} M, of which {active / 1e6:.1f} M are used for a token |
| vocabulary | {shape.vocab_size} byte-level BPE tokens, ChatML turns |
| context | {shape.max_positions} positions; trained on sequences of up to 1,024 |
| licence | CC BY-SA 4.0, since share-alike text is among the training data |

## Training

`python -m models.training train` and `export`; {training["step"]:,} steps, {training["tokens"] / 1e6:.1f} M tokens,
{training["seconds"] / 60:.0f} minutes on two shared CPU cores, last training loss {training["loss"]:.2f}. AdamW, learning rate 2e-3 with
warm-up and a linear fall over the last fifth, balance loss {BALANCE_WEIGHT}. Questions that share an instruction are packed as siblings behind one copy
of it. Data and its licences: [`models/training/data/ATTRIBUTION.md`](../training/data/ATTRIBUTION.md). A training text that also stands in
a test split was dropped. `python -m models.training export` measures all figures below again.
{training["note"]}

## Accuracy on the test splits

| set | method | rows | accuracy |
|---|---|---|---|
{accuracy}

`choice` and `sequence` are the methods of `/v1/classify`, with the labels in the order of the training data unless the row says otherwise. The
model remembers which letter stands for which label instead of looking it up, so `choice` is of no use with labels in another order, and
`moesaic.json` leaves it out of `auto`. boolq and pubmedqa need knowledge and reading that a model of this
size does not have; the figures are near the share of the commonest label.

Greedy answers of the serving engine that equal the reference (dolly_hhrlhf has no test split):

| set | rows | exact |
|---|---|---|
{answers}

## Perplexity on held-out text

One document in {corpus.HELD_OUT_EVERY} of each text was kept out of training; nothing of wikitext2 was trained on (its words are split and its rare
words replaced, which this tokenizer never saw).

| text | per token | bits per byte |
|---|---|---|
{perplexity}

## Routing

Entropy of the share of each expert over all tasks ({len(routing["tasks"])} kinds of text; the most is {shape.num_experts.bit_length() - 1} bits), and the share of the busiest expert
(even routing would give {1 / shape.num_experts:.1%}):

| layer | entropy, bits | busiest expert |
|---|---|---|
{layers}

How far apart tasks route: Jensen-Shannon distance of their expert shares, mean over layers (0 the same, 1 disjoint).

{_distances(routing)}
"""


def _distances(routing: dict[str, Any]) -> str:
    names = routing["tasks"]
    head = "| | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1) + "\n"
    rows = [
        f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |"
        for name, row in zip(names, routing["distance"], strict=True)
    ]
    return head + "\n".join(rows)
