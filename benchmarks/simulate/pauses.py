"""The time between steps, found in the times of requests as their client sees them.

A request that has its first token gets one more in each step, so the seconds until its last token are those of so many
steps: of all rows of prompts, all rows of answers and all keys that these steps had. Times of the other requests
tell these.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate.load import TimedAnswer
from moesaic.costs import RandomChoice
from moesaic.messages.performance import PartCost

Amounts = NDArray[np.float64]  # [n, 6], by the terms of a step
LEAST_STEPS = 8  # of a request that tells something


def with_pauses(
    cost: PartCost, loads: Sequence[Sequence[TimedAnswer]], choice: RandomChoice
) -> PartCost:
    """Add the time between steps, in which a worker plans and tells: what clients saw beyond the steps' own."""
    found = [amounts_of(load, choice) for load in loads]
    amounts, seconds = (np.concatenate(part) for part in zip(*found, strict=True))
    pause_s = float((seconds - amounts @ np.array(cost.unit_s)).sum() / amounts[:, 0].sum())
    step_s, *others = cost.unit_s
    return msgspec.structs.replace(cost, unit_s=(max(0.0, step_s + pause_s), *others))


def amounts_of(
    answers: Sequence[TimedAnswer], choice: RandomChoice
) -> tuple[Amounts, NDArray[np.float64]]:
    """Count the work between the first and the last token of each answer that is long enough.

    Experts are those of the rows between one token and the next; the rows of a prompt count where its first
    token comes.

    Returns:
        Amounts, and seconds ``[n]``.
    """
    begun = np.array([each.begun_s for each in answers])
    prompts = np.array([each.prompt_tokens for each in answers], np.float64)
    token_s = np.concatenate([each.token_s[1:] for each in answers])
    # The n-th token of an answer is picked from a row that sees the prompt and the tokens before.
    keys = np.concatenate(
        [each.prompt_tokens + np.arange(1, len(each.token_s)) for each in answers]
    )
    # Of all answers: the rows that are behind the tokens up to each time.
    times = np.concatenate([begun, token_s])
    order = times.argsort()
    rows_until = np.cumsum(
        np.concatenate([[0], np.concatenate([prompts, np.ones(len(token_s))])[order]])
    )
    amounts, seconds = list[list[float]](), list[float]()
    for each in answers:
        if len(each.token_s) <= LEAST_STEPS:
            continue
        rows = (token_s > each.begun_s) & (token_s <= each.ended_s)
        read = prompts[(begun > each.begun_s) & (begun <= each.ended_s)]
        prompt_keys = float((read * (read + 1) / 2).sum())
        until = rows_until[times[order].searchsorted(each.token_s, side="right")]
        experts = float(sum(map(choice.experts, np.diff(until).tolist())))
        own = len(each.token_s) - 1, experts, float(read.sum()), int(rows.sum())
        amounts.append([*own, float(keys[rows].sum()), prompt_keys])
        seconds.append(each.ended_s - each.begun_s)
    return np.array(amounts), np.array(seconds)
