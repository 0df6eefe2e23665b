"""Writes ``costs.json`` from what tests took: ``python -m tests.tiers.costs RECORDS``, as ``make costs`` does."""

import json
import sys
from collections import defaultdict
from pathlib import Path

from tests.tiers.chosen import COSTS, FREE_S, Costs


def main(records: Path) -> None:
    """Sum up the costs of each function; functions that cost little are summed up by file.

    Files that the records leave out keep their costs.
    """
    before = Costs.read()
    functions: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in records.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        cost_s = max(record["clock_s"], record["cpu_s"])
        functions[record["file"]][record["function"]].append(cost_s)
    others_s = {
        file: cost_s
        for file, cost_s in before.others_s.items()
        if file not in functions and Path(file).is_file()
    }
    kept = {file: dict(before.functions.get(file, {})) for file in others_s}
    for file, costs in sorted(functions.items()):
        dear = {name: each for name, each in sorted(costs.items()) if sum(each) >= FREE_S}
        kept[file] = {name: (len(each), round(sum(each), 2)) for name, each in dear.items()}
        others_s[file] = round(
            sum(sum(each) for name, each in costs.items() if name not in dear), 2
        )
    kept = {file: each for file, each in sorted(kept.items()) if each}
    found = {"functions": kept, "others_s": dict(sorted(others_s.items()))}
    text = json.dumps(found, indent=1)
    # A line for each function.
    COSTS.write_text(
        text.replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]") + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
