"""Prints how much of the repository each part is, and its largest files and folders: for a look, not a limit.

Run it with ``make sizes``.
"""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = {".py", ".c", ".h"}
SHOWN = 10
PARTS = ("libs/moesaic", "libs/moesaic_lab", "services", "benchmarks", "models", "tests", "docs")


def is_generated(file: Path) -> bool:
    return "v1" in file.parts or file.name.endswith(("_pb2.py", "_pb2_grpc.py"))


def lengths() -> dict[Path, int]:
    """Lines of each file of code in the repository, by its path from the root."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    files = [Path(name) for name in listed.stdout.splitlines()]
    return {
        file: (ROOT / file).read_text(encoding="utf-8").count("\n")
        for file in files
        if file.suffix in CODE and (ROOT / file).is_file() and not is_generated(file)
    }


def table(heading: str, rows: list[tuple[str, int]]) -> None:
    print(f"\n{heading}")
    for name, number in rows:
        print(f"  {number:>7,}  {name}")


def main() -> None:
    of_file = lengths()
    by_part = {
        part: sum(lines for file, lines in of_file.items() if file.is_relative_to(part))
        for part in PARTS
    }
    table("lines of Python and C", list(by_part.items()))
    of_folder = Counter(str(file.parent) for file in of_file)
    product = {f: n for f, n in of_file.items() if not f.is_relative_to("tests")}
    longest = sorted(product.items(), key=lambda item: -item[1])[:SHOWN]
    table("longest files outside tests", [(str(file), lines) for file, lines in longest])
    table("folders with most files", of_folder.most_common(SHOWN))


if __name__ == "__main__":
    main()
