"""With ``--deterministic`` routed experts have the bits of local ones, for any placement, before and after another."""

import asyncio
import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moesaic.errors import ExpertUnavailable
from moesaic.experts import unsummed
from moesaic.experts.basis import all_schedulings
from moesaic.messages.scheduling import ExpertScheduling
from moesaic.transport.frame import Frame, FrameKind
from tests.dispatch.routed.test_routed import HALVES, NUM_EXPERTS, NUM_LAYERS, placements


@pytest.fixture(scope="module")
def model(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The tiny one with four experts a row: two give the same sum in either order."""
    directory = tmp_path_factory.mktemp("top-4") / "model"
    shutil.copytree(tiny_model.directory, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 4}))
    return SimpleNamespace(directory=directory)


async def layers_of(c: Any, rows: int, *, local: bool = False) -> list[torch.Tensor]:
    """What every layer gives for the same rows."""
    dispatcher = c.local if local else c.routed
    await c.routed.reachable()
    step, results = dispatcher.begin_step(), []
    for layer in range(NUM_LAYERS):
        hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows + layer))
        results.append(await dispatcher.dispatch(step, layer, hidden))
    dispatcher.end_step(step)
    return results


@given(
    slots=placements,
    others=placements,
    scheduling=st.sampled_from(all_schedulings()),
    rows=st.integers(1, 40),
)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_placements_give_the_bits_of_local_experts(
    cluster: Any,
    model: Any,
    slots: list[list[int]],
    others: list[list[int]],
    scheduling: ExpertScheduling,
    rows: int,
) -> None:
    async def run() -> None:
        workers = max(len(slots), len(others))
        async with cluster(model, workers, scheduling=scheduling, deterministic=True) as c:
            for epoch, placement in enumerate((slots, others), start=1):
                c.put_in_force(c.placement(epoch, *placement))
                got = await layers_of(c, rows)
                expected = await layers_of(c, rows, local=True)
                assert c.routed.epoch == epoch
                assert all(map(torch.equal, got, expected))

    asyncio.run(run())


async def test_without_it_another_placement_gives_other_bits(cluster: Any, model: Any) -> None:
    """Or there would be nothing to keep."""
    async with cluster(model, 2) as c:
        c.put_in_force(c.placement(1, *HALVES))
        before = await layers_of(c, 40)
        c.put_in_force(c.placement(2, [0, 2, 4, 6], [1, 3, 5, 7]))
        after = await layers_of(c, 40)

    assert not all(map(torch.equal, before, after))


async def test_more_rows_than_a_reply_can_have_are_asked_in_parts(
    cluster: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(model, 1, deterministic=True) as c:
        c.put_in_force(c.placement(1, list(range(NUM_EXPERTS))))
        whole = await layers_of(c, 50)
        monkeypatch.setattr(unsummed, "MAX_ROWS", 28)
        parts = await layers_of(c, 50)

    assert all(map(torch.equal, whole, parts))


@pytest.mark.parametrize("places", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_results_that_are_missing_or_come_twice_are_refused(places: list[int]) -> None:
    reply = Frame(
        kind=FrameKind.REPLY,
        tensors=[torch.zeros(len(places), 8), torch.tensor(places).unsqueeze(1)],
    )

    with pytest.raises(ExpertUnavailable):
        unsummed.add_up_choices(0, [reply], torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int32))
