"""``moesaic distill``: united experts for a model, which serve when demand exceeds what workers can."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.checks.model_names import found_model
from moesaic.cli.terminal.console import print_json, print_table, say
from moesaic.cli.terminal.options import JsonOption
from moesaic.cli.terminal.outcome import CommandError, Exit, correcting, using
from moesaic.cli.terminal.stages import Stages

if TYPE_CHECKING:
    from moesaic.models.configuration.config import ModelConfig
    from moesaic.models.text.chat import ChatTemplate
    from moesaic.models.weights.checkpoint import Checkpoint
    from moesaic.models.weights.united import UnitedManifest
    from moesaic_lab.distillation.recipe import Recipe
    from moesaic_lab.distillation.texts import LearningText

LEAST_ROWS = 32  # of an expert, on average
app = typer.Typer(add_completion=False)


@app.command()
def distill(
    model: Annotated[
        str,
        typer.Option(
            metavar="DIRECTORY|OWNER/NAME",
            help="HF-format model directory, or a repository of the Hugging Face hub.",
        ),
    ],
    data: Annotated[
        list[Path],
        typer.Option(
            help='Text similar to served requests: a UTF-8 file, or *.jsonl of {"text"} or '
            '{"messages"}; repeat the option for more files.'
        ),
    ],
    ways: Annotated[
        str,
        typer.Option(
            help="Experts in a group; each of several comma-separated numbers makes a file."
        ),
    ] = "2,4,8",
    tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens to learn from.")
    ] = 200_000,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each united expert.")] = 600,
    joint_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Joint training steps of all united experts of a way, towards the answers of "
            "the whole model (held in float32); 0: none.",
        ),
    ] = 0,
    joint_tokens: Annotated[
        int, typer.Option(min=1, help="Approximate number of tokens in a joint step.")
    ] = 1024,
    joint_threshold: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of exact expert choices in half of the joint steps (default: random in "
            "each step).",
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Directory of united experts to start from; needs --joint-steps and another --out."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write to (default: the model's).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random numbers.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: one for each core.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train united experts of MODEL on --data; repeat the command to continue a stopped run."""
    from moesaic_lab.distillation.recipe import Recipe

    recipe = Recipe(
        steps=0 if start else steps,
        joint_steps=joint_steps,
        joint_tokens=joint_tokens,
        joint_threshold=joint_threshold,
        seed=seed,
    )
    directory = Path(found_model(model))
    out = out or directory
    began = time.monotonic()
    try:
        with correcting(), using(f"--out {out}"):
            _require_start(start, out, joint_steps)
            manifests = _distilled(directory, data, ways, tokens, recipe, start, out, threads)
    except KeyboardInterrupt:
        raise CommandError(
            "interrupted; repeat the command to continue", Exit.INTERRUPTED
        ) from None
    elapsed_s = time.monotonic() - began
    if as_json:
        print_json({"elapsed_s": round(elapsed_s, 1), "ways": [_summary(m) for m in manifests]})
    else:
        _report(manifests, elapsed_s)


def _distilled(
    model: Path,
    data: list[Path],
    ways: str,
    tokens: int,
    recipe: "Recipe",
    start: Path | None,
    out: Path,
    threads: int,
) -> "list[UnitedManifest]":
    from contextlib import redirect_stdout
    from dataclasses import replace

    import torch

    from moesaic.models.configuration.config import load_config
    from moesaic.models.weights.checkpoint import Checkpoint
    from moesaic.models.weights.digest import weights_digest
    from moesaic_lab.distillation.recipe import DistillProgress
    from moesaic_lab.distillation.run import Distillation

    if threads:
        torch.set_num_threads(threads)
    config = load_config(model)
    wanted = _parsed_ways(ways, config)
    checkpoint = Checkpoint.of_model(model, config)
    if recipe.joint_steps:
        _require_whole_model(config, checkpoint, min(wanted))
    _require_writable(out)
    text = _read(model, config, data, tokens, recipe.seed)
    say(f"{text.num_tokens} tokens, {len(text.train)} sequences and {len(text.held_out)} held out")
    # It logs, and standard output is for results.
    with redirect_stdout(sys.stderr):
        config = replace(config, weights_digest=weights_digest(checkpoint.files))
    with Stages() as stages:

        def tell(progress: DistillProgress) -> None:
            stages.show(progress.stage, progress.done, progress.total, progress.note)

        distillation = Distillation(checkpoint, config, text, recipe, wanted, tell, start)
        return distillation.run(out)


def _require_start(start: Path | None, out: Path, joint_steps: int) -> None:
    """Refuse a beginning that would not be learned from, or that results would replace: a rerun begins there too."""
    from moesaic.errors import InvalidInput

    if start is None:
        return
    if not joint_steps:
        raise InvalidInput("--start", "give --joint-steps as well: nothing else is learned then")
    if start.resolve() == out.resolve():
        raise InvalidInput("--start", f"give another --out: results would replace {start}")


def _parsed_ways(ways: str, config: "ModelConfig") -> list[int]:
    from moesaic.errors import InvalidInput

    most, parsed = config.moe.num_experts, []
    for word in ways.split(","):
        if not word.strip().isascii() or not word.strip().isdigit():
            raise InvalidInput("--ways", f"expected numbers like 2,4,8, got {word!r}")
        parsed.append(int(word))
        if not 2 <= parsed[-1] <= most:
            raise InvalidInput(
                "--ways", f"a layer has {most} experts: give 2 to {most}, got {parsed[-1]}"
            )
    return parsed


def _require_whole_model(config: "ModelConfig", checkpoint: "Checkpoint", way: int) -> None:
    """Refuse joint steps for models that have no trainable form, or none that fits into memory."""
    import psutil

    from moesaic.errors import InvalidInput
    from moesaic_lab.distillation.frozen import float32_bytes, require_grouped_query

    require_grouped_query(config)
    # United experts are a part of the model, each with its gradient and two moments.
    needed, free = float32_bytes(checkpoint, config), psutil.virtual_memory().available
    needed += 4 * needed // way
    if needed > free:
        raise InvalidInput(
            "--joint-steps",
            f"the model takes about {needed >> 20} MiB to train, {free >> 20} MiB are free; give 0",
        )


def _require_writable(out: Path) -> None:
    """Refuse a directory that cannot be written to, before anything is computed."""
    import tempfile

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):
        pass


def _read(
    model: Path, config: "ModelConfig", data: list[Path], tokens: int, seed: int
) -> "LearningText":
    from moesaic.errors import InvalidInput
    from moesaic.models.text.tokenizer import Tokenizer
    from moesaic_lab.distillation.texts import CONTEXT, read_texts

    text = read_texts(
        data,
        Tokenizer.load(model),
        _Messages(model),
        tokens,
        min(CONTEXT, config.max_positions),
        seed,
    )
    moe = config.moe
    least = LEAST_ROWS * moe.num_experts // moe.top_k
    if text.num_tokens < least:
        raise InvalidInput(
            "--data" if tokens >= least else "--tokens",
            f"{text.num_tokens} tokens are too few for {moe.num_experts} experts of which a token has "
            f"{moe.top_k}: give {least} at least, better a hundred times as many",
        )
    return text


class _Messages:
    """Writes conversations as the model's template does, which is read for the first of them."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._template: ChatTemplate | None = None

    def __call__(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        from moesaic.models.text.chat import ChatTemplate

        if self._template is None:
            self._template = ChatTemplate.load(self._model)
        return self._template.render(messages, add_generation_prompt)


def _report(manifests: "list[UnitedManifest]", elapsed_s: float) -> None:
    """Print errors by layer and way, and what the whole model loses."""
    from moesaic.models.weights.united import file_name

    layers = sorted(manifests[0].errors)
    columns = ["layer", *(f"way {m.way}: mean, trained" for m in manifests)]
    rows = [
        [layer, *(f"{_mean(m.mean_errors[layer])}, {_mean(m.errors[layer])}" for m in manifests)]
        for layer in layers
    ]
    print_table(columns, rows, title="relative squared error, held out")
    for manifest in manifests:
        line = f"{file_name(manifest.way)}: learned from {manifest.rows} tokens"
        if (quality := manifest.quality) is not None:
            line += (
                f"; cross-entropy {quality.exact:.4f} as it is, {quality.united:.4f} by united experts alone, "
                f"{quality.agreement:.1%} the same likeliest token"
            )
        print(line)
    print(f"{elapsed_s / 60:.1f} minutes")


def _mean(errors: "list[float | None]") -> str:
    known = [error for error in errors if error is not None]
    return f"{sum(known) / len(known):.3f}" if known else "-"


def _summary(manifest: "UnitedManifest") -> dict[str, Any]:
    import msgspec

    fields: dict[str, Any] = msgspec.to_builtins(manifest, str_keys=True)
    return {name: value for name, value in fields.items() if name != "digests"}
