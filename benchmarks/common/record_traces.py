"""Record the routing traces in ``benchmarks/data``: ``python -m benchmarks.common.record_traces FILE [--more DIR]``.

A real suite of the demo model answers requests of several task sets, one after the other; its
attention worker streams the choices of the gates. Each set is run twice: labels are scored
(prefill), then answers are generated eight and thirty-two at a time (prefill, then decode). So both
halves of a set have the same kinds of steps. ``--more`` names a directory of further sets in the
same format.
"""

import argparse
import asyncio
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.suite import running_suite
from models.training.sources import exercises
from moesaic.cli.clients.traces import Recording, record
from moesaic.placement.traffic.trace import Trace

DATA = Path(__file__).parents[2] / "models/training/data"
SETS = {  # test splits: the model was not trained on them
    "banking77": "classification/banking77.test.jsonl.gz",
    "boolq": "classification/boolq.test.jsonl.gz",
    "clinc_domain": "classification/clinc_domain.test.jsonl.gz",
    "pubmedqa": "classification/pubmedqa.test.jsonl.gz",
    "gsm8k": "generation/gsm8k.test.jsonl.gz",
    "wikitext2": "text/wikitext2.test.txt.gz",
}
CURRICULUM = ("stories", "sums", "words")  # of the demo model's: their test splits
MORE_SETS = {  # of tasks that the model has not seen at all
    "trec6": "classification/trec6.test.jsonl.gz",
    "sst5": "classification/sst5.test.jsonl.gz",
    "bbh_choice": "bigbench/bbh_choice.eval.jsonl.gz",
}
ROUNDS = 2
SCORED = 20  # of a round, rows whose labels are scored, eight at a time
GENERATED = {8: 8, 32: 32}  # of a round, prompts, by how many run at once
ANSWER_TOKENS = 40
PASSAGE_CHARS = 400
MAX_S = 300.0  # of one set


@dataclass(frozen=True)
class LabelledPrompt:
    """One request's text, and its labels if it has any."""

    text: str
    labels: tuple[str, ...] = ()


def rows_of(path: Path) -> Iterator[LabelledPrompt]:
    """The rows of one file, evenly taken from it."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        if path.name.endswith(".txt.gz"):
            text = file.read()
            passages = [text[at : at + PASSAGE_CHARS] for at in range(0, len(text), PASSAGE_CHARS)]
            yield from (LabelledPrompt(passage) for passage in _evenly(passages))
            return
        rows = [json.loads(line) for line in file]
    for row in _evenly(rows):
        yield LabelledPrompt(row.get("text") or row["prompt"], tuple(row.get("labels", ())))


def drawn_rows(source: str) -> Iterator[LabelledPrompt]:
    """Rows of one source of the curriculum: questions with labels are scored, all are answered."""
    rng, makers = random.Random(f"trace {source}"), exercises()[source]
    for number in range(ROUNDS * (SCORED + sum(GENERATED.values()))):
        group = makers[number % len(makers)](rng, "test")
        question = next((q for q in group.questions if q.form == "decide"), group.questions[0])
        yield LabelledPrompt(group.head + question.tail, question.labels)


def _evenly(rows: Sequence[Any]) -> Sequence[Any]:
    wanted = ROUNDS * (SCORED + sum(GENERATED.values()))
    return rows[:: max(1, len(rows) // wanted)][:wanted]


async def _ask(
    client: httpx.AsyncClient, rows: Sequence[LabelledPrompt], at_once: int, scored: bool
) -> None:
    gate = asyncio.Semaphore(at_once)

    async def ask(number: int, row: LabelledPrompt) -> None:
        async with gate:
            body: dict[str, Any]
            if scored:
                route, body = "classify", {"input": row.text, "labels": row.labels}
            else:
                route, sampling = "completions", {"temperature": 0.8, "ignore_eos": True}
                body = {"prompt": row.text, "max_tokens": ANSWER_TOKENS, "seed": number}
                body |= sampling
            answer = await client.post(f"/v1/{route}", json={"model": "demo", **body})
            answer.raise_for_status()

    await asyncio.gather(*(ask(number, row) for number, row in enumerate(rows)))


async def record_set(part: str, rows: Sequence[LabelledPrompt], url: str, worker: str) -> Trace:
    """Run one set's requests, and return the trace of their routing."""
    recording = Recording(part, max_rows=1 << 30)
    reader = asyncio.create_task(record(recording, {"attention-0": worker}, MAX_S))
    begun = asyncio.create_task(recording.begun.wait())
    await asyncio.wait({reader, begun}, return_when=asyncio.FIRST_COMPLETED)
    async with httpx.AsyncClient(base_url=url, timeout=MAX_S) as client:
        left = iter(rows)
        for _ in range(ROUNDS):
            scored = [row for row in islice(left, SCORED) if row.labels]
            await _ask(client, scored, 8, scored=True)
            for at_once, count in GENERATED.items():
                await _ask(client, list(islice(left, count)), at_once, scored=False)
    # The last steps are on their way.
    await asyncio.sleep(0.5)
    recording.enough.set()
    await reader
    trace = recording.trace()
    print(f"{part}: {len(trace.steps)} steps, {trace.num_rows} rows, dropped {recording.dropped}")
    return trace


def main() -> None:
    """Record every set, and write one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--more", type=Path, help="a directory with further sets")
    arguments = parser.parse_args()
    paths = {part: DATA / path for part, path in SETS.items()}
    if arguments.more:
        paths |= {part: arguments.more / path for part, path in MORE_SETS.items()}
    parts = {part: list(rows_of(path)) for part, path in paths.items()}
    parts |= {source: list(drawn_rows(source)) for source in CURRICULUM}
    whole: Trace | None = None
    file = arguments.file.resolve()
    # The commands' clients find the secret of the suite that runs in their directory.
    with running_suite() as suite, chdir(suite.directory):
        for part, rows in parts.items():
            url = f"http://127.0.0.1:{suite.port}"
            trace = asyncio.run(record_set(part, rows, url, suite.attention_address))
            whole = whole.joined(trace) if whole else trace
    assert whole is not None
    data = whole.encode()
    file.write_bytes(data)
    print(f"{file}: {len(data)} bytes, {whole.num_rows} rows")


if __name__ == "__main__":
    main()
