"""Rows and sums in their own dtype and as int8: bytes, time, error, and one slow link.

Packing is timed for rows of three widths. Errors are of whole models computed by this project's own parts
in one process: two expert hosts behind frames, against the same model without frames, and against float32. Accuracy is
that of the demo model's suite on labelled sets. On the slow link, an attention worker and two expert workers
are processes in network namespaces, and the forms take turns.
"""

import os
import statistics
import time
from typing import Any

import httpx
import torch

from benchmarks.accuracy import QUICK_ROWS, SETS, TIMEOUT_S, ask, form_of, read_set
from benchmarks.common.suite import DEMO, running_suite
from benchmarks.wire.errors import measured_errors
from benchmarks.wire.link import measured_links
from moesaic.cli.terminal.console import say
from moesaic.experts.wire_rows import pack_rows, row_bytes, unpack_rows
from moesaic.services.gateway.language import Language

WIDTHS, ROWS = (256, 2048, 4096), (1, 64, 512)
REPEATS = 30
CLASSIFIED = ("clinc_domain", "boolq", "pubmedqa")
MOST_ROWS = 500


def run(quick: bool) -> dict[str, Any]:
    """Measure; ``quick`` takes fewer rows and one rate."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"packing": _packing()}
    say("wire: packing is timed")
    torch.set_num_threads(threads)
    figures["errors"] = measured_errors(quick)
    say("wire: errors are measured")
    figures["accuracy"] = _accuracy(QUICK_ROWS if quick else MOST_ROWS)
    say("wire: accuracy is measured")
    figures["link"] = measured_links(quick)
    return {
        "config": {
            "model": "demo",
            "widths": list(WIDTHS),
            "rows": list(ROWS),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "figures": figures,
        "notes": [
            "packing: one thread, us a row, median; break_even_mbit: below this rate a lone link saves more time than "
            "packing and unpacking take at both ends; what rows wait for anyway is not counted",
            "errors: norm of the difference over the norm, of all logits, or of a layer's sums; top1: rows whose most "
            "likely token is the same",
            *(["quick: fewer rows, the same code path"] if quick else []),
        ],
    }


def _packing() -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for width in WIDTHS:
        own = row_bytes(width, torch.float32, "own")
        packed = row_bytes(width, torch.float32, "int8")
        found: dict[str, Any] = {
            "bytes": {"float32": own, "bfloat16": own // 2, "int8": packed},
        }
        for count in ROWS:
            rows = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
            to_s, from_s = _median_s(pack_rows, rows), _median_s(unpack_rows, pack_rows(rows))
            found[f"{count}_rows"] = {
                "pack_us": round(1e6 * to_s / count, 3),
                "unpack_us": round(1e6 * from_s / count, 3),
                "break_even_mbit": round(8e-6 * (own - packed) * count / (to_s + from_s)),
            }
        figures[f"{width}_wide"] = found
    return figures


def _median_s(function: Any, rows: torch.Tensor) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        function(rows)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _accuracy(most_rows: int) -> dict[str, Any]:
    language = Language(DEMO)
    figures: dict[str, Any] = {}
    for wire in ("own", "int8"):
        with (
            running_suite("--wire-dtype", wire) as suite,
            httpx.Client(base_url=f"http://127.0.0.1:{suite.port}", timeout=TIMEOUT_S) as client,
        ):
            for labelled in SETS:
                if labelled.name in CLASSIFIED:
                    labels, rows = read_set(labelled, most_rows)
                    outcome = ask(client, form_of(language, labelled, labels), rows)
                    found = figures.setdefault(labelled.name, {"rows": outcome.rows})
                    found[wire] = round(outcome.right / outcome.rows, 4)
    return figures
