"""Degraded choices over expert workers: the sums and the counts of one process, to the promise of every row."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.brownout.split import Level
from moesaic.dispatch.routed import routes
from moesaic.dispatch.routed.notes import DIVERGENCES
from moesaic.errors import ExpertUnavailable, InvalidInput
from moesaic.experts.basis import AssignmentBasis
from moesaic.experts.brownout.promises import decode_promises, encode_promises
from moesaic.experts.frames import PROMISED
from moesaic.kernels.promised import PromisedRows
from moesaic.messages.substitution import Substitution
from moesaic.messages.wire import WireDtype
from moesaic.native.library import library
from moesaic.transport.frame import Frame, FrameKind
from tests.dispatch.conftest import value_of
from tests.dispatch.routed.test_wire import dispatched, hidden, over_rings
from tests.waiting import until

CPU = torch.device("cpu")
NUM_LAYERS = 3
PAIRS = Substitution(way=2, instead="united")
# Eight experts, and behind them the united ones of every two.
EVERYTHING = [[*range(12)]]
HALVES = [[0, 1, 2, 3, 10, 11], [4, 5, 6, 7, 8, 9]]
REPLICAS = [[*range(12)], [0, 3, 5, 9, 11, 8], [1, 2, 4, 6, 7, 10]]
LEVELS = (Level(0.2), Level(0.1, 1), Level(1.0))


def promises(num_rows: int, levels: Sequence[Level] = LEVELS) -> PromisedRows:
    """The first row gets the last level, the others take turns with the others."""
    last = len(levels) - 1
    return PromisedRows(levels, [last, *(row % max(1, last) for row in range(1, num_rows))])


async def in_one_process(c: Any, rows: Tensor, layer: int, promised: PromisedRows) -> Tensor:
    summed: Tensor = await c.local.dispatch(c.local.begin_step(), layer, rows, promised)
    return summed


@pytest.mark.parametrize("slots", [EVERYTHING, HALVES, REPLICAS])
async def test_sums_and_counts_are_those_of_one_process(
    cluster: Any, tiny_model: Any, slots: list[list[int]]
) -> None:
    async with cluster(tiny_model, len(slots), slots=12, substitution=PAIRS) as c:
        c.put_in_force(c.placement(1, *slots))
        for num_rows in (1, 2, 12, 60):
            for layer in range(NUM_LAYERS):
                rows = hidden(num_rows, layer)
                there, here = promises(num_rows), promises(num_rows)

                got = await dispatched(c, rows, layer, there)

                expected = await in_one_process(c, rows, layer, here)
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
                assert torch.equal(there.settle(), here.settle())
        assert 0 < int(here.settle().sum()) < 60 * 2


@pytest.mark.parametrize("instead", ["fewer", "nothing"])
async def test_without_united_experts_choices_are_left_out_alike(
    cluster: Any, tiny_model: Any, instead: Any
) -> None:
    async with cluster(tiny_model, 2, substitution=Substitution(instead=instead)) as c:
        c.put_in_force(c.placement(1, [0, 1, 2, 3], [4, 5, 6, 7]))
        rows, there, here = hidden(40), promises(40), promises(40)

        got = await dispatched(c, rows, 1, there)

        expected = await in_one_process(c, rows, 1, here)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(there.settle(), here.settle())
        assert int(here.settle().sum())


async def test_rows_that_were_promised_everything_are_exact_beside_others(
    cluster: Any, tiny_model: Any
) -> None:
    async with cluster(tiny_model, 2, slots=12, substitution=PAIRS) as c:
        c.put_in_force(c.placement(1, *HALVES))
        levels = Level(0.0), Level(0.0, 1), Level(1.0)
        rows, promised = hidden(30), promises(30, levels)
        exact = promised.level_of_row == 2

        got = await dispatched(c, rows, 1, promised)

        alone = await dispatched(c, rows, 1)
        assert torch.equal(got[exact], alone[exact])
        assert not torch.equal(got[~exact], alone[~exact])
        assert not promised.settle()[0][exact].any()


async def test_one_by_one_the_bits_are_those_of_one_process(cluster: Any, tiny_model: Any) -> None:
    async with cluster(tiny_model, 3, slots=12, deterministic=True, substitution=PAIRS) as c:
        c.put_in_force(c.placement(1, *REPLICAS))
        rows, there, here = hidden(50), promises(50), promises(50)

        got = await dispatched(c, rows, 1, there)

        assert torch.equal(got, await in_one_process(c, rows, 1, here))
        assert torch.equal(there.settle(), here.settle())


async def test_workers_that_choose_other_experts_are_overruled_once_and_counted_once(
    cluster: Any, tiny_model: Any
) -> None:
    async with cluster(tiny_model, 2, slots=12, substitution=PAIRS, crooked=[1]) as c:
        c.put_in_force(c.placement(1, *HALVES))
        before = value_of(DIVERGENCES)
        rows, there, here = hidden(40), promises(40), promises(40)

        got = await dispatched(c, rows, 1, there)

        assert value_of(DIVERGENCES) == before + 1
        expected = await in_one_process(c, rows, 1, here)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(there.settle(), here.settle())


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("wire", ["own", "int8"])
@pytest.mark.parametrize("slots", [EVERYTHING, HALVES, REPLICAS])
async def test_native_exchanges_have_the_bits_and_counts_of_python(
    cluster: Any, unlinked_cluster: Any, tiny_model: Any, slots: list[list[int]], wire: WireDtype
) -> None:
    batches = [(hidden(rows, rows), layer) for rows in (1, 7, 64) for layer in range(NUM_LAYERS)]
    several, one = LEVELS, (Level(0.3),)
    async with cluster(tiny_model, len(slots), slots=12, wire=wire, substitution=PAIRS) as c:
        c.put_in_force(c.placement(1, *slots))
        python = []
        for levels in (several, one):
            for rows, layer in batches:
                promised = promises(len(rows), levels)
                summed = await dispatched(c, rows, layer, promised)
                python.append((summed, promised.settle()))

    unlinked = unlinked_cluster(tiny_model, len(slots), slots=12, substitution=PAIRS)
    async with over_rings(unlinked, slots, wire) as rings:

        async def ask() -> list[tuple[Tensor, Tensor]]:
            answers = []
            for levels in (several, one):
                for rows, layer in batches:
                    promised = promises(len(rows), levels)
                    summed = await rings.dispatched(rows, layer, promised)
                    answers.append((summed, promised.settle()))
            return answers

        native = await rings.answered_natively(ask, 2 * len(batches) * len(slots))
    for (got, counts), (expected, known) in zip(native, python, strict=True):
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(counts, known)


def test_promises_survive_their_way() -> None:
    for levels in (LEVELS, (Level(0.1234, 1),)):
        promised = promises(9, levels)

        found = decode_promises(encode_promises(promised), 9, CPU)

        assert found.levels == promised.levels
        assert torch.equal(found.level_of_row, promised.level_of_row)


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body[:-1],
        lambda body: body + b"x",
        lambda body: body[:3],
        lambda body: b"",
        lambda body: b"\xff\xff\xff\x7f" + body[4:],
        lambda body: bytes(4) + body[4:],
        lambda body: body[:4] + b"\xff\xff\xff\xff" + body[8:],
        lambda body: body[:4] + (10_001).to_bytes(4, "little") + body[8:],
        lambda body: body[:-1] + b"\x03",
    ],
)
async def test_promises_of_another_form_are_refused(
    cluster: Any, unlinked_cluster: Any, tiny_model: Any, damage: Any
) -> None:
    body = damage(encode_promises(promises(9)))
    request = Frame(
        kind=FrameKind.REQUEST,
        epoch=1,
        layer=1,
        flags=PROMISED,
        body=body,
        tensors=[hidden(9), AssignmentBasis("static", (0,)).encode()],
    )
    async with cluster(tiny_model, 1, slots=12, substitution=PAIRS) as c:
        c.put_in_force(c.placement(1, *EVERYTHING))

        with pytest.raises(InvalidInput, match=r"frame\.body"):
            c.hosts[0].answers.answer(request)


async def test_experts_of_a_lost_worker_are_served_by_united_ones(
    cluster: Any, tiny_model: Any
) -> None:
    """The survivor has the united experts of all that it has not."""
    slots = [[0, 1, 2, 3, 10, 11], [4, 5, 6, 7, 8, 9]]
    async with cluster(tiny_model, 2, slots=12, substitution=PAIRS) as c:
        c.put_in_force(c.placement(1, *slots))
        rows = hidden(30)
        whole = await dispatched(c, rows, 1)
        await c.networks[1].close()
        with pytest.raises(ExpertUnavailable):
            await dispatched(c, rows, 1)
        await c.routed.reachable()
        step = c.routed.begin_step()

        promised = PromisedRows((Level(1.0),), [0] * 30)
        got = await c.routed.dispatch(step, 1, rows, promised)

        assert step.has_lost
        # United experts are missing as well, those of groups that are there.
        assert step.substitution is None
        gone = (c.gates[1](rows)[1] >= 4).sum(dim=1)
        assert torch.equal(promised.settle()[0], gone.int())
        assert torch.equal(got[gone == 0], whole[gone == 0])
        c.routed.end_step(step)


async def test_a_placement_that_has_every_expert_is_better_than_united_ones(
    cluster: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest placement lacks a worker, the one before does not need it."""
    monkeypatch.setattr(routes, "STAND_IN_AFTER_S", 0.0)
    monkeypatch.setattr(routes, "PLAN_EVERY_S", 0.0)
    async with cluster(tiny_model, 2, slots=16, substitution=PAIRS) as c:
        c.put_in_force(c.placement(1, [*range(12)], [0, 1]))
        rows = hidden(30)
        whole = await dispatched(c, rows, 1)
        await c.networks[1].close()
        await until(lambda: c.routed.route_of(1).live == (0,))
        c.put_in_force(c.placement(2, *HALVES))

        for _ in range(3):
            await c.routed.reachable()
            step = c.routed.begin_step()
            assert (step.epoch, step.has_lost) == (1, False)
            c.routed.end_step(step)
        assert torch.equal(await dispatched(c, rows, 1), whole)
