"""Decisions and plans of the scheduler, for people and for programs."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from moesaic.cli.terminal.console import print_entries

if TYPE_CHECKING:
    from moesaic.v1 import scheduler_pb2 as pb

COLUMNS = ("when (UTC)", "cause", "epoch", "policy", "moves", "predicted", "measured")
LARGE_NUMBERS = {
    *("base_epoch", "epoch", "epoch_before", "generation", "moved_bytes"),
    *("num_shed", "number", "refused", "version", "waiting_tokens"),
}


def as_dict(message: Any) -> dict[str, Any]:
    """Convert a protobuf message: fields by their names, numbers as numbers."""
    from google.protobuf.json_format import MessageToDict

    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    numbered: dict[str, Any] = _with_numbers(found)
    return numbered


def print_decisions(
    columns: Sequence[str],
    row: Callable[[Any], tuple[object, ...]],
    note: Callable[[Any], str],
    decisions: Iterable[Any],
) -> None:
    """Print a table of decisions, each with a note below it."""
    listed = list(decisions)
    print_entries(columns, list(map(row, listed)), list(map(note, listed)))


def when(decision: Any, form: str = "%m-%d %H:%M:%S") -> str:
    """Write the time of a decision, in UTC."""
    return datetime.fromtimestamp(decision.at, UTC).strftime(form)


def decision_row(decision: "pb.Decision") -> tuple[object, ...]:
    """A decision for a table with ``COLUMNS``, which fits into 80 columns."""
    epoch = f"{decision.epoch_before} kept"
    if decision.adopted:
        epoch = str(decision.epoch or ("failed" if decision.failure else "under way"))
    predicted = ""
    if decision.HasField("predicted_before") and decision.HasField("predicted_after"):
        predicted = f"{decision.predicted_before:.2f} -> {decision.predicted_after:.2f}"
    measured = f"{decision.measured_after:.2f}" if decision.HasField("measured_after") else ""
    if decision.HasField("local_share_before") and decision.HasField("local_share_after"):
        shares = decision.local_share_before, decision.local_share_after
        predicted = f"{shares[0]:.0%} -> {shares[1]:.0%} local"
    if decision.HasField("measured_local_share"):
        measured = f"{decision.measured_local_share:.0%} local"
    at = when(decision, "%m-%d %H:%M")
    return at, decision.cause, epoch, decision.policy, decision.moves, predicted, measured


def decision_note(decision: "pb.Decision") -> str:
    """The reason for a decision, and the failure if there was one."""
    return "; ".join(filter(None, (decision.reason, decision.failure)))


def plan_text(plan: "pb.Plan") -> str:
    """A plan in a few lines."""
    lines = [
        f"policy {plan.policy}, from epoch {plan.base_epoch}: {len(plan.moves)} experts to load, "
        f"{plan.moved_bytes / 1e6:.1f} MB"
        + (f", about {plan.seconds:.1f} s" if plan.HasField("seconds") else "")
    ]
    if plan.HasField("activated_before") and plan.HasField("activated_after"):
        lines.append(
            f"most activated experts on one worker: {plan.activated_before:.2f} now, "
            f"{plan.activated_after:.2f} then (mean of {plan.sampled_batches} batches)"
        )
    if plan.HasField("local_share_before") and plan.HasField("local_share_after"):
        lines.append(
            f"choices of experts at their own site: {plan.local_share_before:.1%} now, "
            f"{plan.local_share_after:.1%} then; mean wait for others: "
            f"{1e3 * plan.row_s_before:.2f} ms now, {1e3 * plan.row_s_after:.2f} ms then"
        )
    verdict = "worth while" if plan.worthwhile else "the scheduler would not do it"
    return "\n".join([*lines, f"{verdict}: {plan.reason}"])


def _with_numbers(value: Any) -> Any:
    """Replace 64-bit numbers, which JSON of protobuf has as text."""
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: int(item) if name in LARGE_NUMBERS else _with_numbers(item)
        for name, item in value.items()
    }
