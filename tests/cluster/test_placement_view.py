import pytest

from moesaic.cluster.placement_view import PlacementView, watch_placement
from moesaic.errors import PeerLost
from moesaic.messages.placement import Placement, PlacementHint


def placement(epoch: int) -> Placement:
    return Placement(
        epoch=epoch, model_digest="d", num_experts=2, workers=[], layers=[0], slots=[[]]
    )


async def publish(bus, epoch: int) -> None:
    pointer = await bus.get_bytes("placement:current")
    document = bus.sealed(f"placement:{epoch}", placement(epoch))
    assert await bus.compare_and_set(
        {"placement:current": pointer},
        {"placement:current": b"%d" % epoch, f"placement:{epoch}": document},
    )
    await bus.append("ctl:placement", PlacementHint(epoch=epoch))


async def until_epoch(view: PlacementView, epoch: int) -> None:
    while view.epoch < epoch:
        await view.changed()


async def test_a_placement_is_seen_at_once_and_so_are_later_ones(bus):
    await publish(bus, 1)
    async with watch_placement(bus) as view:
        assert view.current == placement(1)

        await publish(bus, 4)
        await until_epoch(view, 4)
        assert view.current == placement(4)


async def test_the_epoch_never_goes_back_and_an_outage_changes_nothing(bus, redis_server):
    await publish(bus, 5)
    async with watch_placement(bus) as view:
        redis_server.kill(lose_data=True)
        with pytest.raises(PeerLost):
            await view.refresh(bus)
        assert view.epoch == 5
        redis_server.start()
        await publish(bus, 3)
        await view.refresh(bus)
        assert view.epoch == 5

        await publish(bus, 6)
        await until_epoch(view, 6)


async def test_a_document_that_is_missing_or_damaged_leaves_the_last_one(bus):
    await publish(bus, 1)
    async with watch_placement(bus) as view:
        for epoch, document in ((2, None), (3, b"\xc1")):
            await bus.compare_and_set(
                {f"placement:{epoch}": None},
                {f"placement:{epoch}": document, "placement:current": b"%d" % epoch},
            )
            await view.refresh(bus)

        assert view.current == placement(1)
