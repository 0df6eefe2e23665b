"""Accuracy lost to brownout, by substitution and threshold, on held-out rows of kinds that the demo model is good at.

The rows are those of the model's card, asked and judged as there. One engine in this process answers them, one set
after the other, first exactly and then under each substitution at each threshold. The same thresholds hold for
prompts and answers. The split of choices is per batch, so the batches of all substitutions are made in the same way.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.brownout_accuracy.arms import (
    Point,
    Questions,
    distilled,
    in_mixed_batches,
    is_exact_at_one,
    measure,
    name_of,
    rule_of,
    training_free,
)
from benchmarks.brownout_accuracy.figures import by_rule_of, drawn_of, figures_of, results_of
from benchmarks.brownout_accuracy.instances import NUM_WORKERS, DemoFleet, drawn
from benchmarks.brownout_accuracy.paper import MODEL, POINTS, TARGET, WAYS, loss_at
from benchmarks.brownout_accuracy.serving import LIMITS, OneEngine
from benchmarks.brownout_accuracy.tasks import HELD_OUT, WINDOW, task_sets, windows
from benchmarks.common.suite import DEMO

THRESHOLDS, QUICK_THRESHOLDS = (0.8, 0.6, 0.4, 0.2, 0.0), (0.4, 0.0)
ROWS, QUICK_ROWS = 150, 4
WINDOWS, QUICK_WINDOWS = 16, 1  # of each text

NOTES = (
    "relative loss: (exact accuracy - accuracy) / exact accuracy; the average is of the sets, unweighted; less than 0 "
    "where brownout happens to answer better; lists go by config.thresholds",
    "standard_error: of the average, from paired differences of rows; rows about one story resemble each other, so the "
    "true one is wider",
    "degraded_share: mean share of (row, layer, expert) choices that their own experts did not serve",
    "united-W: distilled united experts of way W; mean-W: the mean of each group's weights; fewer: the row's other "
    "experts, with weights of the same sum; nothing: full brownout; -error: experts stay by rows times measured error; "
    f"-instances: worker by worker, of {NUM_WORKERS} workers",
    "by_rule: busiest is the number of experts, united ones too, that the worker with most of them computes, a mean "
    "over layers and recorded batches of the demo model after the split",
    "busiest_drawn: the same of drawn batches of 32 rows of a layer of Qwen3-235B's shape (128 experts, top-8)",
    "loss_at_share, by_rule: values on straight lines between measured points, at equal shares of degraded choices; "
    "fewer and nothing read no united experts, so at an equal share they read less",
    "of_choices_alone: sets whose answers are chosen among labels, as all of the paper's are; in those that are "
    "generated, one wrong token spoils the answer",
    "in_mixed_batches: all sets at once in a drawn order, so that a batch holds rows of many",
    "a set of two answers is at half its accuracy by chance, so full brownout cannot lose all of it here",
)


def run(quick: bool) -> dict[str, Any]:
    """Measure all substitutions; ``quick``: a few rows, two thresholds."""
    return asyncio.run(_run(quick))


async def _run(quick: bool) -> dict[str, Any]:
    thresholds = QUICK_THRESHOLDS if quick else THRESHOLDS
    rows, num_windows = (QUICK_ROWS, QUICK_WINDOWS) if quick else (ROWS, WINDOWS)
    questions = Questions(task_sets(rows), windows(num_windows))
    engine, points, inexact = OneEngine(DEMO), dict[str, dict[float, Point]](), list[str]()
    demo = DemoFleet()
    by_rule = distilled(engine, DEMO, demo.fleet.homes)
    substitutions = by_rule | training_free(DEMO)
    async with engine.running():
        exact = await measure(engine, questions, None, 1.0)
        reference = await engine.answer(questions.checked)
        for name, loaded in substitutions.items():
            if not await is_exact_at_one(engine, questions.checked, reference, loaded):
                inexact.append(name)
            points[name] = own = {}
            for threshold in thresholds:
                base, rule = rule_of(name)
                # No expert stays by any rule.
                if rule != "tokens" and not threshold:
                    own[threshold] = points[base][threshold]
                else:
                    own[threshold] = await measure(engine, questions, loaded, threshold)
        mixed = {
            (way, t): await in_mixed_batches(engine, questions.sets, substitutions[name_of(way)], t)
            for way, t in POINTS
            if name_of(way) in substitutions and t in thresholds
        }
    busiest = demo.most_activated(by_rule, thresholds)
    measured: dict[str, Any] = {
        "config": _config(questions, exact, thresholds),
        "figures": figures_of(exact, results_of(exact, points), mixed)
        | {
            "by_rule": by_rule_of(results_of(exact, points), busiest),
            "busiest_drawn": drawn_of(drawn(thresholds)),
        },
        "paper": {
            "model": MODEL,
            "average_loss": {f"{way}, {t}": loss_at(way, t) for way, t in POINTS},
            "target": TARGET,
        },
        "notes": list(NOTES),
    }
    if missing := [f"way {way}" for way in WAYS if name_of(way) not in substitutions]:
        measured["notes"].append(f"not distilled, so not measured: {', '.join(missing)}")
    if quick:
        measured["notes"].append("quick: a few rows, two thresholds, the same code path")
    if inexact:
        measured["failed"] = f"threshold 1 changes answers: {', '.join(inexact)}"
    return measured


def _config(questions: Questions, exact: Point, thresholds: Sequence[float]) -> dict[str, Any]:
    return {
        "model": DEMO.name,
        "thresholds": thresholds,
        "rows": {name: len(rows) for name, rows in exact.rows.items()},
        "prompts": sum(len(one.asks) for one in questions.sets),
        "held_out_text": {
            "documents": HELD_OUT,
            "windows": len(questions.windows),
            "tokens_of_each": WINDOW,
        },
        "batch": {
            "requests": LIMITS.max_num_seqs,
            "rows_of_a_step": LIMITS.max_num_batched_tokens,
        },
    }
