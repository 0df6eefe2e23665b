"""Write the HF directory of the demo checkpoint, and measure what is written."""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from models.training import answers, card, corpus, evaluate, judge, samples
from models.training.network import Network, Shape
from models.training.sources import exercises
from models.training.state import load
from models.training.train import optimizer_of
from moesaic.classification.prompts import Method

MAX_HELD_OUT_TOKENS = 60_000
CHOICE_ALSO = ("clinc_domain",)
GENERATION_ROWS = {"gen_arithmetic": 0, "gen_ascii_word": 0, "gsm8k": 300}  # 0: all
FAMILY_ROWS, STORIES, RANKINGS, ROUTED_ROWS = 200, 200, 200, 150


def export(arguments: argparse.Namespace) -> None:
    """Export, measure the exported weights, write the model card and its samples."""
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    network = Network(Shape())
    counters = load(arguments.work / "state.safetensors", network, optimizer_of(network))
    tokenizer = Tokenizer.from_file(str(arguments.work / "tokenizer.json"))
    write_directory(out, network, tokenizer, arguments.work)
    round_weights(network)
    network.eval()
    results, rows, told = measure(out, network, tokenizer, arguments.rows)
    training = {**vars(counters), "note": arguments.note}
    (out / "measured.json").write_text(json.dumps({"training": training, **results}, indent=1))
    measured = json.loads((out / "measured.json").read_text())
    (out / "README.md").write_text(card.render(measured, network))
    (out / "SAMPLES.md").write_text(samples.render(rows, told))


def write_directory(out: Path, network: Network, tokenizer: Tokenizer, work: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer as any HF implementation loads them."""
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


# Of many labels the model knows the words better than it looks up letters.
SERVING = {"classify_methods": ["token", "sequence"]}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def round_weights(network: Network) -> None:
    """Measure what is shipped: the weights as bfloat16 holds them."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16().float())


def measure(
    out: Path, network: Network, tokenizer: Tokenizer, most_rows: int
) -> tuple[dict[str, Any], list[judge.Row], list[judge.Continuation]]:
    """Everything the model card reports as plain values, and the rows behind the curriculum's."""
    rows = judge.questions(out, most_rows or FAMILY_ROWS)
    told = judge.continuations(out, most_rows or STORIES)
    first = judge.rankings(out, most_rows or RANKINGS)
    results: dict[str, Any] = {
        "families": judge.families(rows),
        "choices": judge.choices(rows),
        "stories": judge.consistency(told),
        "rankings": {"rows": most_rows or RANKINGS, "documents": judge.DOCUMENTS, "first": first},
    }
    print(json.dumps(results, indent=1))
    results |= _of_the_sets(network, tokenizer, most_rows)
    exact = []
    for name, enough in GENERATION_ROWS.items():
        result = answers.exactness(out, name, most_rows or enough)
        exact.append(vars(result))
        print(f"{result.name}: {result.exact:.1%} of {result.rows} exact")
    return results | {"answers": exact}, rows, told


def _of_the_sets(network: Network, tokenizer: Tokenizer, most_rows: int) -> dict[str, Any]:
    """Measure the labelled sets, the perplexity and the routing."""
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
    names, shares = evaluate.routing(network, tokenizer, _routed())
    overall = shares.mean(axis=0)
    return {
        "accuracy": accuracies,
        "perplexity": perplexities,
        "routing": {
            "tasks": names,
            "entropy_bits_per_layer": evaluate.entropy_bits(overall).tolist(),
            "entropy_bits_within_task": evaluate.entropy_bits(shares).mean(axis=1).tolist(),
            "busiest_expert_share_per_layer": overall.max(axis=-1).tolist(),
            "idlest_expert_share_per_layer": overall.min(axis=-1).tolist(),
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


def _routed() -> dict[str, list[str]]:
    """Some texts of every kind, for the routing statistics."""
    texts = {
        name: [text for text, _ in corpus.read_task(name, "test").rows[:ROUTED_ROWS]]
        for name in corpus.INSTRUCTIONS
        if name != "clinc150"  # the texts of clinc_domain
    }
    for source, makers in exercises().items():
        rng = random.Random(f"routed {source}")
        groups = [makers[i % len(makers)](rng, "test") for i in range(ROUTED_ROWS)]
        texts[source] = [
            f"{corpus.USER_HEAD}{g.head}{g.questions[0].tail}{corpus.ASSISTANT_HEAD}{g.questions[0].answer}"
            for g in groups
        ]
    for name in ("gen_ascii_word", "gsm8k"):
        texts[name] = [str(row["prompt"]) for row in corpus.read_rows(name, "test")[:ROUTED_ROWS]]
    for name in ("pepys_diary", "war_and_peace", "wiki_passages"):
        texts[name] = [text[:1500] for text in corpus.read_documents(name)[1][:20]]
    return texts
