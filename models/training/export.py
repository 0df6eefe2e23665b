"""Write the HF directory of the demo checkpoint, and measure what is written."""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.training import answers, card, corpus, evaluate
from models.training.network import Network, Shape
from models.training.train import load, optimizer_of
from moesaic.classification.prompts import Method

MAX_HELD_OUT_TOKENS = 60_000
CHOICE_ALSO = ("clinc_domain",)
GENERATION_ROWS = {"gen_arithmetic": 0, "gen_ascii_word": 0, "gsm8k": 300}  # 0: all


def export(arguments: argparse.Namespace) -> None:
    """Export, measure the exported weights, write the model card."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    network = Network(Shape())
    state = load(arguments.work / "state.safetensors", network, optimizer_of(network, 1e-3))
    tokenizer = Tokenizer.from_file(str(arguments.work / "tokenizer.json"))
    _write_directory(out, network, tokenizer, arguments.work)
    _round_weights(network)
    network.eval()
    results = measure(network, tokenizer, arguments.rows)
    results["answers"] = []
    for name, most_rows in GENERATION_ROWS.items():
        result = answers.exactness(out, name, arguments.rows or most_rows)
        results["answers"].append(vars(result))
        print(f"{result.name}: {result.exact:.1%} of {result.rows} exact")
    log = [json.loads(line) for line in (arguments.work / "log.jsonl").read_text().splitlines()]
    training = state | {"loss": log[-1]["loss"], "note": arguments.note}
    (out / "measured.json").write_text(json.dumps({"training": training, **results}, indent=1))
    (out / "README.md").write_text(
        card.render(json.loads((out / "measured.json").read_text()), network)
    )


def _write_directory(out: Path, network: Network, tokenizer: Tokenizer, work: Path) -> None:
    ids = {token: tokenizer.token_to_id(token) for token in corpus.SPECIAL_TOKENS}
    special = {
        "bos_token_id": ids[corpus.END_OF_TEXT],
        "eos_token_id": ids[corpus.TURN_END],
        "pad_token_id": ids[corpus.END_OF_TEXT],
    }
    _write_json(out / "config.json", network.shape.hf_config(special))
    generation = {
        "eos_token_id": [ids[corpus.TURN_END], ids[corpus.END_OF_TEXT]],
        "pad_token_id": ids[corpus.END_OF_TEXT],
    }
    _write_json(out / "generation_config.json", generation)
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": corpus.TURN_END,
            "pad_token": corpus.END_OF_TEXT,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": network.shape.max_positions,
            "chat_template": corpus.CHAT_TEMPLATE,
        },
    )
    _write_json(out / "moesaic.json", SERVING)
    shutil.copy(work / "tokenizer.json", out / "tokenizer.json")
    save_file(network.hf_tensors(), out / "model.safetensors", metadata={"format": "pt"})


# Which letter stands for which label is more than this model can look up in its context; and it knows questions for
# labels only as it was trained on them, before the text.
SERVING = {
    "classify_methods": ["token", "sequence"],
    "wording": {
        "version": "demo-1",
        "templates": {"decide": "{instructions} Choose exactly one of: {labels}.\n\n{input}"},
    },
}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _round_weights(network: Network) -> None:
    """Measure what is shipped: the weights as bfloat16 holds them."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16().float())


def measure(network: Network, tokenizer: Tokenizer, most_rows: int) -> dict[str, Any]:
    """Everything the model card reports, as plain values."""
    accuracies = []
    for task, method in _questions():
        result = evaluate.classify(network, tokenizer, task, method, most_rows)
        accuracies.append(vars(result))
        print(f"{result.name} ({result.method}): {result.accuracy:.1%} of {result.rows}")
    perplexities = {}
    for name in (*corpus.TEXTS, "wikitext2.test"):
        documents = corpus.read_documents(name)
        held_out = (
            documents[0] if name == "wikitext2.test" else documents[1]
        )  # none of it was trained on
        if not held_out:  # too few documents to keep one out
            continue
        per_token, bits = evaluate.perplexity(network, tokenizer, held_out, MAX_HELD_OUT_TOKENS)
        perplexities[name] = {"per_token": per_token, "bits_per_byte": bits}
        print(f"{name}: perplexity {per_token:.1f}, {bits:.3f} bits per byte")
    names, shares = evaluate.routing(network, tokenizer, _samples())
    return {
        "accuracy": accuracies,
        "perplexity": perplexities,
        "routing": {
            "tasks": names,
            "entropy_bits_per_layer": evaluate.entropy_bits(shares.mean(axis=0)).tolist(),
            "entropy_bits_within_task": evaluate.entropy_bits(shares).mean(axis=1).tolist(),
            "busiest_expert_share_per_layer": shares.mean(axis=0).max(axis=-1).tolist(),
            "distance": evaluate.task_distances(shares).tolist(),
        },
    }


def _questions() -> list[tuple[corpus.Task, Method]]:
    """The test splits and methods to measure, in the order of the card."""
    out: list[tuple[corpus.Task, Method]] = []
    for name in corpus.INSTRUCTIONS:
        task = corpus.read_task(name, "test")
        if name in CHOICE_ALSO:
            moved = corpus.shuffled(task)
            out += [(task, "choice"), (moved, "choice"), (moved, "sequence")]
        out.append((task, "sequence"))
    return out


def _samples() -> dict[str, list[str]]:
    """Some texts of every kind, for the routing statistics."""
    samples = {
        name: [text for text, _ in corpus.read_task(name, "test").rows[:150]]
        for name in corpus.INSTRUCTIONS
    }
    for name in ("gen_arithmetic", "gen_ascii_word", "gsm8k"):
        samples[name] = [str(row["prompt"]) for row in corpus.read_rows(name, "test")[:150]]
    for name in ("pepys_diary", "war_and_peace", "wiki_passages"):
        samples[name] = [text[:1500] for text in corpus.read_documents(name)[1][:20]]
    return samples
