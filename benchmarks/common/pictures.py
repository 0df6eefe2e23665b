"""Pictures of results: ``python -m benchmarks.common.pictures RESULT.json PICTURE.png`` draws one again.

Each benchmark with a picture has a module ``picture`` with ``draw(result, to)``; ``result`` holds ``config``,
``figures`` and ``series``, as ``moesaic bench --json`` writes them.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs/measured"
Result = Mapping[str, Any]
Draw = Callable[[Result, Path], None]


def draw_for_docs(draw: Draw, result: Result, name: str, quick: bool) -> None:
    """Draw a result for the docs; that of a quick run is drawn, too, but thrown away."""
    with tempfile.TemporaryDirectory() as thrown_away:
        draw(result, Path(thrown_away) / name if quick else DOCS / name)


def main() -> None:
    """Draw a result that was written with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.result.read_text(encoding="utf-8"))
    name = result["name"].replace("-", "_")
    import_module(f"benchmarks.{name}.picture").draw(result, arguments.picture)


if __name__ == "__main__":
    main()
