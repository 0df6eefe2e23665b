"""What a fleet without expert workers waits for."""

from types import SimpleNamespace

import pytest

from moesaic.messages.registry import WorkerRecord
from moesaic.services.scheduler.fleet import FleetProposer


@pytest.mark.parametrize(
    ("ways", "waits"),
    [
        ([], True),
        (["routed"], True),
        (["local", "routed"], True),
        (["local"], False),
        (["gathered", "all-to-all"], False),
    ],
)
def test_expert_workers_are_waited_for_only_if_somebody_asks_for_them(
    ways: list[str], waits: bool
) -> None:
    workers = {
        f"attention-{n}": WorkerRecord(
            worker_id=f"attention-{n}",
            generation=1,
            role="attention",
            state="ready",
            admin_address="",
            dispatch=way,
        )
        for n, way in enumerate(ways)
    }
    proposer = FleetProposer(SimpleNamespace(workers=workers, version=1))  # type: ignore[arg-type]

    waiting_for = proposer.propose(None).waiting_for

    assert waiting_for == (["expert workers: none registered"] if waits else [])
