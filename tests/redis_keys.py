"""Every key of Redis that services read, with a message that makes sense there; and values that make none."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from moesaic.cluster.redis.seals import Seals
from moesaic.messages.activation import (
    ActivationReport,
    ActivationWindow,
    LayerActivations,
    ServedBatches,
)
from moesaic.messages.brownout import BrownoutDecision, BrownoutHint, BrownoutPolicy
from moesaic.messages.decisions import DecisionOutcome, Pin, PlacementDecision, PlacementPolicy
from moesaic.messages.performance import Arrival, FitSums, LoadReport, RequestLatency
from moesaic.messages.placement import PlacedWorker, Placement, PlacementHint
from moesaic.messages.registry import Generation, RegistryHint, Weights, WorkerRecord
from moesaic.messages.scaling import (
    FleetShape,
    ScalingAction,
    ScalingDecision,
    ScalingForecast,
    ScalingPolicy,
)
from moesaic.messages.site_profile import PeerLink, SiteProfile
from moesaic.messages.substitution import Substitution

DEAD_LETTERS = "dlq:"  # written only
KIND = Literal["document", "number", "lease", "set", "stream"]
SHAPE = FleetShape(1, 2)
FORECAST = ScalingForecast(shape=SHAPE, attainment=0.9, ttft_p90_s=0.2, tpot_p90_s=0.1)


def worker(worker_id: str = "x", **fields: Any) -> WorkerRecord:
    made: dict[str, Any] = {
        "generation": 1,
        "role": "expert",
        "state": "ready",
        "admin_address": "127.0.0.1:1",
        "data_address": "127.0.0.1:2",
        "model_digest": "model-a",
        "slots_per_layer": 8,
        "num_experts": 8,
        "layers": [1, 2],
        "share": "0/2",
        "united": {2: "digest"},
    }
    return WorkerRecord(worker_id=worker_id, **(made | fields))


def placement(epoch: int = 3) -> Placement:
    placed = PlacedWorker(worker_id="x", generation=1, admin_address="h:1", data_address="h:2")
    return Placement(
        epoch=epoch,
        model_digest="model-a",
        num_experts=12,
        num_united=4,
        substitution=Substitution(way=2, instead="united"),
        workers=[placed],
        layers=[1, 2],
        slots=[[list(range(12))]] * 2,
    )


@dataclass(frozen=True)
class Key:
    """A key, or all that begin alike.

    Attributes:
        name: in full, or with ``*`` for the rest.
        kind: of what it holds.
        messages: of the kinds that it may hold; none: it has no seal.
        written: the name of one such key.
    """

    name: str
    kind: KIND
    messages: tuple[msgspec.Struct, ...] = ()

    @property
    def written(self) -> str:
        """Name one such key."""
        return self.name.replace("*", "3" if self.name == "placement:*" else "x")

    def holds(self, name: str) -> bool:
        """True if this entry of the table is for a key of this name."""
        return name == self.name or ("*" in self.name and name.startswith(self.name[:-1]))


KEYS = (
    Key("workers", "set"),
    Key("worker:*", "document", (worker(),)),
    Key("generation:*", "document", (Generation(generation=7),)),
    Key("weights", "document", (Weights(digest="d", dtype="float32"),)),
    Key("leader:scheduler", "lease"),
    Key("placement:current", "number"),
    Key("placement:epoch", "number"),
    Key(
        "placement:policy",
        "document",
        (PlacementPolicy(policy="eplb", pins=[Pin(layer=1, expert=2, worker_id="x")]),),
    ),
    Key("placement:*", "document", (placement(),)),
    Key("scaling:policy", "document", (ScalingPolicy(mode="advise"),)),
    Key("scaling:action", "document", (ScalingAction(number=1, shape=SHAPE, at=1.0),)),
    Key("brownout:policy", "document", (BrownoutPolicy(mode="manual", prefill_threshold=0.5),)),
    Key("ctl:registry", "stream", (RegistryHint(worker_id="x", generation=1, event="joined"),)),
    Key("ctl:placement", "stream", (PlacementHint(epoch=3),)),
    Key("ctl:brownout", "stream", (BrownoutHint(mode="auto"),)),
    Key("ctl:latency", "stream", (BrownoutDecision(number=1, worker_id="x", at=1.0),)),
    Key(
        "ctl:load",
        "stream",
        (
            LoadReport(
                worker_id="x",
                generation=1,
                role="attention",
                at=1.0,
                window_s=1.0,
                latencies=[RequestLatency(0.1, 0.1)],
                ended=1,
                arrivals=[Arrival(1.0, 5, 5)],
                arrived=1,
                costs={"step": FitSums(products=((1.0,),), responses=(1.0,), weight=1.0)},
            ),
        ),
    ),
    Key(
        "ctl:activations",
        "stream",
        (
            ActivationReport(
                window=ActivationWindow(
                    worker_id="x",
                    generation=1,
                    model_digest="model-a",
                    num_experts=8,
                    epoch=3,
                    window_s=1.0,
                    layers=[
                        LayerActivations(
                            layer=1,
                            rows=8,
                            batches=1,
                            tokens=[1] * 8,
                            active_batches=[1] * 8,
                            pair_first=[0],
                            pair_second=[1],
                            pair_count=[1],
                            pair_total=1,
                            sampled=[bytes(16)],
                        )
                    ],
                ),
                served=[ServedBatches(epoch=3, batches=1, busiest=4)],
            ),
        ),
    ),
    Key(
        "ctl:profiles",
        "stream",
        (
            SiteProfile(
                worker_id="x",
                generation=1,
                site="s",
                window_s=1.0,
                local=1,
                remote=1,
                away_s=0.1,
                layers_s=0.2,
                links=[PeerLink(peer="y", rtt_s=0.1, bytes_per_s=1e6)],
            ),
        ),
    ),
    Key(
        "ctl:decisions",
        "stream",
        (
            PlacementDecision(
                decision_id="p", at=1.0, cause="traffic", adopted=True, reason="because"
            ),
            DecisionOutcome(decision_id="p", tried=3, seconds=1.0),
            BrownoutDecision(number=1, worker_id="x", at=1.0),
            ScalingDecision(
                decision_id="s", at=1.0, before=SHAPE, wanted=SHAPE, adopted=True, forecast=FORECAST
            ),
        ),
    ),
)


def key_of(name: str) -> Key | None:
    """Find the entry of the table for a key."""
    return next((key for key in KEYS if key.holds(name)), None)


# In place of any field of a message.
ATOMS: tuple[Any, ...] = (
    math.nan,
    math.inf,
    -math.inf,
    -1,
    0,
    (1 << 53) + 1,
    (1 << 64) - 1,
    -(1 << 63),
    1e308,
    None,
    True,
    "",
    "9" * 5000,
    "²/²",
    "x" * (1 << 20),
    "\n\x00",
    b"\xff\xfe",
    [],
    {},
    [[]] * 3,
    {"": []},
    [-1, -1, 1 << 40],
    list(range(10_000)),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Name every part of a message, the message itself too."""
    yield path
    parts = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value[:2]) if isinstance(value, list) else parts
    for name, part in parts:
        yield from paths(part, (*path, name))


def changed(value: Any, path: tuple[Any, ...], part: Any) -> Any:
    """Copy a message with another part."""
    if not path:
        return part
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], part)
    return copy


def parts_of(message: msgspec.Struct) -> Any:
    """Take a message apart, as Redis holds it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))


def contents(message: msgspec.Struct) -> list[bytes]:
    """Contents below a good seal, of which most are no messages of this kind."""
    packed = msgspec.msgpack.encode(message)
    other = Generation(generation=1) if not isinstance(message, Generation) else worker()
    text = b"\xa2\xff\xfe"  # two bytes of text that are not UTF-8
    tag = parts_of(message)["type"].encode()
    deep = b"\x82\xa4type" + bytes([0xA0 + len(tag)]) + tag + b"\xa1z" + b"\x91" * 100_000 + b"\xc0"
    made = [
        b"",
        b"\xc1",
        packed[: len(packed) // 2],
        packed + b"\x00",
        packed.replace(b"\xa1x", text).replace(b"\xa1p", text),
        msgspec.msgpack.encode(other),
        msgspec.msgpack.encode([1, 2]),
        b"\xdd\xff\xff\xff\xff\x01",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\x91" * 100_000 + b"\xc0",
        deep,
        packed[:1] + b"\xff" * 64,
    ]
    return [content for content in made if content != packed]


def plain_values(name: str, seals: Seals, elsewhere: Seals) -> list[bytes]:
    """Values for a key that nobody of the cluster sealed for it."""
    return [
        b"",
        b"\x01",
        b"9" * 5000,
        b"-1",
        b"007",
        b"9223372036854775808",
        b"9007199254740993",
        b"1000000000000000",
        b"1e9",
        b"\xc2\xb2",
        "٣".encode(),
        b"nan",
        b"\xff" * 100,
        b"mallory/" + b"9" * 5000,
        "mallory/²".encode(),
        b"/1",
        b"mallory/1",
        b"x" * (2 << 20),
        b"x" * ((16 << 20) + 1),
        seals.seal("another name", b"\x80"),
        elsewhere.seal(name, b"\x80"),
        seals.seal(name, b"")[:20],
    ]


def sealed_values(key: Key, seals: Seals) -> list[bytes]:
    """Values for a key with a good seal."""
    return [seals.seal(key.written, content) for each in key.messages for content in contents(each)]


OTHER_KINDS: tuple[tuple[Any, ...], ...] = (
    ("RPUSH", "a", "b"),
    ("SADD", "\xff", "a"),
    ("HSET", "p", "b"),
    ("ZADD", "1", "p"),
    ("XADD", "*", "p", "b"),
)
"""Commands that make a key another type; the key follows the first word."""
