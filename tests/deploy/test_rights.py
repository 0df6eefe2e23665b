"""The roles of the ACL file that ``deploy/make_secrets.py`` writes, on servers that are here."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import redis

from moesaic.cluster.brownout_view import DECISIONS, POLICY, watch_brownout
from moesaic.cluster.brownout_view import STREAM as HINTS
from moesaic.cluster.leadership import leadership
from moesaic.cluster.load_view import STREAM as LOAD
from moesaic.cluster.placement_view import POINTER, STREAM, document, watch_placement
from moesaic.cluster.redis.bus import Bus
from moesaic.cluster.redis.child import server_programs
from moesaic.cluster.redis.reading import Unreadable
from moesaic.cluster.registry import next_generation, registered, tidy_index, watch_fleet
from moesaic.cluster.security.credentials import Credentials
from moesaic.errors import PeerLost
from moesaic.messages.brownout import BrownoutHint, BrownoutPolicy
from moesaic.messages.placement import Placement, PlacementHint
from moesaic.messages.registry import WorkerRecord
from tests.deploy.rights import DANGEROUS, FOREIGN, OWN
from tests.suites import ROOT

SECRET = Credentials(b"the cluster secret")
hints: "msgspec.msgpack.Decoder[PlacementHint]" = msgspec.msgpack.Decoder(PlacementHint)


@pytest.fixture(scope="module", params=server_programs(), ids=lambda program: program.name)
def urls(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """A server as compose.yaml runs it, with deploy/redis.conf: where each role reaches it."""
    with tempfile.TemporaryDirectory(prefix="moesaic-") as name:  # a path that a socket can have
        directory = Path(name)
        command = [sys.executable, str(ROOT / "deploy/make_secrets.py"), name]
        subprocess.run(command, check=True, capture_output=True)
        conf, log = directory / "redis.conf", directory / "log"
        told = (ROOT / "deploy/redis.conf").read_text(encoding="utf-8")
        conf.write_text(told.replace("/run/secrets", name).replace("/data", name))
        flags = ("--port", "0", "--unixsocket", str(directory / "s"))
        with log.open("wb") as output:
            server = subprocess.Popen(
                [str(request.param), str(conf), *flags], stdout=output, stderr=output
            )
        try:
            while not answers(f"unix://health:any@{directory}/s"):
                assert server.poll() is None, log.read_text()
            passwords = {
                role: urlsplit((directory / f"redis_url_{role}").read_text().strip()).password
                for role in OWN
            }
            yield {role: f"unix://{role}:{p}@{directory}/s" for role, p in passwords.items()}
        finally:
            server.kill()
            server.wait()


def answers(url: str) -> bool:
    with redis.Redis.from_url(url, protocol=2) as client:
        try:
            return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False


@asynccontextmanager
async def bus_of(
    urls: dict[str, str], role: str, credentials: Credentials = SECRET
) -> AsyncIterator[Bus]:
    async with Bus.connect(urls[role], "default", credentials=credentials) as bus:
        yield bus


@pytest.mark.parametrize("role", OWN)
def test_a_role_may_write_its_own_and_nothing_that_harms_others(
    urls: dict[str, str], role: str
) -> None:
    with redis.Redis.from_url(urls[role], protocol=2) as client:
        assert client.execute_command(*OWN[role])
        allowed = []
        for command in [*FOREIGN[role], *DANGEROUS]:
            try:
                client.execute_command(*command)
                allowed.append(command)
            except redis.exceptions.NoPermissionError:
                pass
    assert allowed == []


@pytest.mark.parametrize("role", OWN)
async def test_a_role_may_begin_dead_letters_anew(urls: dict[str, str], role: str) -> None:
    largest = (1 << 64) - 1
    async with bus_of(urls, role) as bus:
        for box in ("documents", "ctl:placement"):
            key = bus.connection.key(f"dlq:{box}")
            await bus.connection.client.xadd(key, {"t": "x"}, id=f"{largest}-{largest}")
            await bus.dead_letters.message(box, b"x", Unreadable("junk"))
            await bus.connection.client.xadd(key, {"t": "x"})  # it has room again
        await bus.dead_letters.entry("ctl:placement", b"1-1", b"x", Unreadable("junk"), is_new=True)
        ends = await bus.connection.client.xrange(bus.connection.key("dlq:ctl:placement"))
    assert ends[-1][1][b"id"] == b"1-1"


def test_strangers_may_nothing(urls: dict[str, str]) -> None:
    where = urls["expert"].rpartition("@")[2]
    for user in ("", ":wrong@", "expert:wrong@"):
        with (
            redis.Redis.from_url(f"unix://{user}{where}", protocol=2) as client,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            client.ping()
    with redis.Redis.from_url(f"unix://health:any@{where}", protocol=2) as client:
        assert client.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.get("moesaic:{default}:workers")


async def test_every_role_can_do_its_work(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moesaic.cluster.registry._TIDY_S", 0.02)
    placement = Placement(
        epoch=1, model_digest="d", num_experts=1, workers=[], layers=[0], slots=[[]]
    )
    async with (
        bus_of(urls, "scheduler") as scheduler,
        bus_of(urls, "gateway") as gateway,
        bus_of(urls, "attention") as attention,
        bus_of(urls, "expert") as expert,
        watch_fleet(scheduler) as fleet,
        watch_fleet(gateway) as seen,
        watch_placement(attention) as view,
        watch_placement(expert) as view_of_experts,
    ):
        buses = {"gateway": gateway, "attention": attention, "expert": expert}
        for role, bus in buses.items():
            generation = await next_generation(bus, f"{role}-0")
            record = WorkerRecord(
                worker_id=f"{role}-0",
                generation=generation,
                role=role,  # type: ignore[arg-type]
                state="ready",
                admin_address="h:1",
            )
            async with registered(bus, record) as lease:
                await lease.renew()  # whatever Redis refuses is raised here
                await lease.update(state="draining")
                while not all(f"{role}-0" in view.workers for view in (fleet, seen)):
                    await asyncio.wait([asyncio.create_task(seen.changed())], timeout=0.1)
            assert await bus.get_bytes(f"worker:{role}-0") is None  # given up
        await expert.append("ctl:activations", PlacementHint(epoch=7), max_entries=64)
        async with aclosing(scheduler.read_on("ctl:activations", hints)) as reports:
            assert await anext(reports) == PlacementHint(epoch=7)
        await attention.append(DECISIONS, PlacementHint(epoch=8))
        async with aclosing(scheduler.read_on(DECISIONS, hints)) as decisions:
            assert await anext(decisions) == PlacementHint(epoch=8)
        for bus in (attention, expert):
            await bus.append(LOAD, PlacementHint(epoch=9), max_entries=64)
        async with aclosing(scheduler.read_on(LOAD, hints)) as loads:
            assert await anext(loads) == PlacementHint(epoch=9)
        async with leadership(scheduler, "scheduler", "scheduler-0", 1) as leader:
            await leader.contend()
            assert leader.held
            written = {document(1): scheduler.sealed(document(1), placement), POINTER: b"1"}

            async def lead_to_write(new: str, values: dict[str, bytes]) -> None:
                # A renewal of the lease may come in between, as it may for every leader.
                while not await scheduler.compare_and_set({**leader.fence, new: None}, values):
                    await leader.contend()

            await lead_to_write(POINTER, written)
            await scheduler.append(STREAM, PlacementHint(epoch=1))
            policy = BrownoutPolicy(mode="auto")
            sealed = {POLICY: scheduler.sealed(POLICY, policy)}
            await lead_to_write(POLICY, sealed)
            await scheduler.append(HINTS, BrownoutHint(mode="auto"))
            for name in ("scaling:policy", "scaling:action"):
                await lead_to_write(name, {name: scheduler.sealed(name, policy)})
            async with aclosing(watch_brownout(attention)) as found:
                assert await anext(found) == policy
            await scheduler.append("ctl:decisions", PlacementHint(epoch=1), max_entries=9)
            assert len(await scheduler.latest("ctl:decisions", hints, 9)) == 1
            while view.epoch < 1:
                await view.changed()
            while view_of_experts.epoch < 1:
                await view_of_experts.changed()
        tidying = asyncio.create_task(tidy_index(scheduler))
        while await scheduler.members("workers"):
            await asyncio.sleep(0.01)
        tidying.cancel()


async def test_the_password_of_one_expert_worker_forges_nothing_of_another(
    urls: dict[str, str],
) -> None:
    record = WorkerRecord(
        worker_id="expert-0", generation=1, role="expert", state="ready", admin_address="h:1"
    )
    forged = msgspec.structs.replace(record, generation=9, admin_address="attacker:1")
    async with (
        bus_of(urls, "expert") as expert,
        bus_of(urls, "expert", Credentials(b"not the secret")) as attacker,
        bus_of(urls, "gateway") as gateway,
        bus_of(urls, "scheduler") as scheduler,
        watch_fleet(gateway) as fleet,
        registered(expert, record) as lease,
    ):
        while "expert-0" not in fleet.workers:
            await fleet.changed()
        await attacker.put("worker:expert-0", forged, ttl_s=60)
        await attacker.put("generation:expert-0", forged)
        await fleet.refresh(gateway)
        assert "expert-0" not in fleet.workers  # until it renews its lease
        await lease.renew()  # and is not told that another process has its id
        await fleet.refresh(gateway)
        assert fleet.workers["expert-0"].admin_address == "h:1"
        assert await next_generation(expert, "expert-0") < 1 << 40

        await attacker.append("ctl:activations", PlacementHint(epoch=99))
        await expert.append("ctl:activations", PlacementHint(epoch=8))
        async with aclosing(scheduler.read_on("ctl:activations", hints)) as reports:
            epochs = [(await anext(reports)).epoch]  # type: ignore[union-attr]
            while epochs[-1] != 8:
                epochs.append((await anext(reports)).epoch)  # type: ignore[union-attr]
        assert 99 not in epochs
        with pytest.raises(PeerLost):
            await attacker.delete("workers")
