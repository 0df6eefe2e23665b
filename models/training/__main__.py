"""``python -m models.training train | export | texts``: make the demo checkpoint, or rows like its own."""

import argparse
from pathlib import Path


def main() -> None:
    """Parse the command line and run one step of the recipe."""
    parser = argparse.ArgumentParser(prog="python -m models.training", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/demo"), help="where state, log and tokenizer live"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train, or go on training, to --steps")
    train.add_argument("--steps", type=int, default=4000)
    train.add_argument(
        "--mixture", choices=("all", "basics"), default="all", help="basics: to begin with"
    )
    train.add_argument("--batch-tokens", type=int, default=6144)
    train.add_argument("--learning-rate", type=float, default=0.004, help="of the matrices (Muon)")
    train.add_argument("--adam-rate", type=float, default=3e-3, help="of all other weights (AdamW)")
    train.add_argument("--save-every", type=int, default=200)
    train.add_argument(
        "--start", type=Path, help="an exported checkpoint to go on from, where --work has no state"
    )
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--device", default="cpu", help="cpu or cuda")
    export = commands.add_parser(
        "export", help="write the HF directory with its measured model card"
    )
    export.add_argument("--out", type=Path, default=Path("models/demo"))
    export.add_argument("--note", default="", help="what the card should say of this run besides")
    export.add_argument(
        "--rows", type=int, default=0, help="measure on at most this many rows a set (0: all)"
    )
    texts = commands.add_parser(
        "texts", help="write rows of the training split, for moesaic distill"
    )
    texts.add_argument("--out", type=Path, default=Path("build/demo/texts.jsonl"))
    texts.add_argument("--rows", type=int, default=20_000)
    texts.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.command == "train":
        from models.training.train import train as run
    elif arguments.command == "texts":
        from models.training.texts import texts as run
    else:
        from models.training.export import export as run
    run(arguments)


if __name__ == "__main__":
    main()
