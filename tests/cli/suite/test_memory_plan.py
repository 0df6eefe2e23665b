"""The plan of a suite's memory: KV from what is left, refusal of what does not fit, devices by room."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.memory.checkpoint import SHAPE
from moesaic.cli.suite import devices
from moesaic.cli.suite.devices import MACHINE, devices_named, place_of, shared_out
from moesaic.cli.suite.fitting import (
    CHOSEN,
    VARIABLE,
    check_fits,
    experts_environment,
    kv_environment,
    table,
    what_fits,
)
from moesaic.cli.suite.memory_plan import MIB, MOVING, SuiteMemory, plan_suite
from moesaic.cli.suite.options import SuiteOptions
from moesaic.cli.suite.prepare import planned
from moesaic.cli.suite.processes import services_of
from moesaic.cli.suite.service_settings import check_settings, given_settings
from moesaic.cli.terminal.outcome import CommandError
from moesaic.models.configuration.config import ModelConfig, load_config
from moesaic.models.configuration.sizes import LEAST_KV_TOKENS
from moesaic.prefix.blocks import BLOCK_SIZE

GIB = 1 << 30
ROOMY = {MACHINE: 64 * GIB}
Plan = Callable[..., SuiteMemory]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (*CHOSEN, "dtype", "device", "quantization"):
        monkeypatch.delenv(f"MOESAIC_{name.upper()}", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def options_of(model: Path, *flags: str, **changes: Any) -> SuiteOptions:
    options = SuiteOptions(**{"topology": "local", "model": str(model), **changes})
    words = [flag.removeprefix("--").partition("=") for flag in flags]
    values = {name.replace("-", "_"): value for name, _, value in words}
    return replace(options, settings=given_settings(values, options.topology))


def parts_of(options: SuiteOptions) -> tuple[SuiteOptions, ModelConfig, Mapping[str, Any]]:
    config = load_config(Path(options.model))
    return options, config, check_settings(services_of(options, config.moe.num_experts, 8))


def plan(options: SuiteOptions, available: Mapping[str, int] = ROOMY) -> SuiteMemory:
    return plan_suite(*parts_of(options), available)


def of_role(found: SuiteMemory, role: str) -> Mapping[str, int]:
    return next(process.parts for process in found.processes if process.role == role)


def test_experts_are_divided_among_workers_and_the_rest_is_in_the_attention_worker(
    model: Path,
) -> None:
    local = plan(options_of(model))
    apart = plan(options_of(model, topology="disaggregated", experts=4))

    assert of_role(local, "attention")["experts"] == 4 * of_role(apart, "expert")["experts"]
    assert of_role(apart, "attention")["experts"] == 0
    assert of_role(local, "attention")["head"] == of_role(apart, "attention")["head"] > 0
    assert [process.role for process in apart.processes].count("expert") == 4
    assert apart.slots == 32


def test_more_slots_are_more_memory(model: Path) -> None:
    apart = options_of(model, topology="disaggregated")
    more = of_role(plan(replace(apart, slots_per_layer=128)), "expert")["experts"]
    assert more == 2 * of_role(plan(apart), "expert")["experts"]


@pytest.mark.parametrize(
    ("flag", "share"), [("--dtype=bfloat16", 0.5), ("--quantization=int8", 0.26)]
)
def test_smaller_weights_are_smaller(model: Path, flag: str, share: float) -> None:
    whole, small = (
        of_role(plan(options_of(model, "--dtype=float32")), "attention"),
        of_role(plan(options_of(model, flag)), "attention"),
    )
    assert small["experts"] == pytest.approx(share * whole["experts"], rel=0.02)


def test_eight_contexts_are_enough_and_what_is_left_bounds_them(model: Path) -> None:
    options = options_of(model)
    roomy = plan(options)
    assert roomy.kv_tokens == 8 * 4096
    without_kv = sum(roomy.needed.values()) - of_role(roomy, "attention")["kv"]

    tight = plan(options, {MACHINE: (without_kv + 20 * MIB) * 10 // 9 + 1})
    assert of_role(tight, "attention")["kv"] == pytest.approx(20 * MIB, rel=0.01)
    assert tight.fits

    two = plan(replace(options, attention=2), {MACHINE: 2 * without_kv * 10 // 9})
    assert two.kv_tokens < tight.kv_tokens + 8 * 4096


def test_a_shorter_context_needs_less_kv(model: Path) -> None:
    options, config, settings = parts_of(options_of(model))
    short = plan_suite(options, replace(config, max_positions=512), settings, ROOMY)
    assert short.kv_tokens == 16_384


@pytest.mark.parametrize("name", sorted(CHOSEN))
def test_the_kv_that_a_user_has_chosen_stands(name: str, model: Path) -> None:
    flag, value = "--" + name.replace("_", "-"), "1" if name.endswith("fraction") else "64"
    options, config, settings = parts_of(options_of(model, f"{flag}={value}"))
    found = plan_suite(options, config, settings, ROOMY)
    assert kv_environment(found, settings["attention-0"]) == {}
    if name == "kv_blocks":
        assert found.kv_tokens == 1024


def test_workers_are_told_the_kv_of_the_plan(model: Path) -> None:
    options, config, settings = parts_of(options_of(model))
    found = plan_suite(options, config, settings, ROOMY)
    told = kv_environment(found, settings["attention-0"])
    assert told == {VARIABLE: str(found.kv_tokens // BLOCK_SIZE)}


def test_what_does_not_fit_is_refused_with_the_table_and_what_would(model: Path) -> None:
    options, config, settings = parts_of(options_of(model, "--dtype=float32"))
    available = {MACHINE: 1100 * MIB}
    found = plan_suite(options, config, settings, available)
    assert not found.fits
    with pytest.raises(CommandError) as refused:
        check_fits(options, config, settings, found)
    text = str(refused.value)
    assert table(found) in text
    assert "--quantization int8: " in text
    assert refused.value.status == 2


def test_each_way_out_that_is_named_fits(model: Path) -> None:
    options, config, settings = parts_of(options_of(model))
    named = 0
    for mib in range(600, 1500, 50):
        available = {MACHINE: mib * MIB}
        for line in what_fits(options, config, settings, available):
            words = line.partition(":")[0].split(" ")
            flags = [
                f"{flag}={value}" for flag, value in zip(words[::2], words[1::2], strict=False)
            ]
            if words[0] == "--offload":
                continue
            again = parts_of(options_of(model, *flags))
            assert plan_suite(*again, available).fits, (mib, flags)
            named += 1
    assert named > 5


def test_a_limit_of_an_agent_is_its_memory(model: Path) -> None:
    options = options_of(model, topology="edge", memory="1GiB,1GiB,2GiB")
    limits = [p.parts["limit"] for p in plan(options).processes if p.role == "edge-agent"]
    assert limits == [GIB, GIB, 2 * GIB]


def test_gathered_experts_are_a_share_and_a_ring(model: Path) -> None:
    local, gathered = options_of(model), options_of(model, topology="gathered", attention=2)
    assert (
        of_role(plan(gathered), "attention")["experts"]
        > of_role(plan(local), "attention")["experts"] / 2
    )
    offloaded = plan(options_of(model, topology="local", offload=True))
    assert of_role(offloaded, "attention")["experts"] > 0


@pytest.mark.parametrize(
    ("flags", "in_host_memory"),
    [({"topology": "gathered"}, True), ({"topology": "local", "offload": True}, False)],
    ids=["share", "file"],
)
def test_a_gpu_holds_three_layers_of_experts_that_come_and_the_machine_the_rest(
    model: Path, flags: dict[str, Any], in_host_memory: bool
) -> None:
    options = replace(options_of(model, **flags), places={"attention-0": "cuda:0"})
    kept = replace(options_of(model), places={"attention-0": "cuda:0"})
    room, layers = {MACHINE: 64 * GIB, "cuda:0": 24 * GIB}, SHAPE["num_hidden_layers"]
    found, whole = plan(options, room), plan(kept, room)
    [attention] = [p for p in found.processes if p.role == "attention"]
    [resident] = [p for p in whole.processes if p.role == "attention"]

    layer = resident.parts["experts"] // layers
    assert attention.parts["experts"] == 3 * layer
    # All other layers, or two on their way from the file.
    more = (layers - 1 if in_host_memory else 2) * layer
    assert attention.on_host - resident.on_host == pytest.approx(more, abs=8 * MIB)


def test_a_gpu_holds_weights_and_the_machine_the_process(model: Path) -> None:
    options = replace(options_of(model), places={"attention-0": "cuda:1"})
    found = plan(options, {MACHINE: 8 * GIB, "cuda:1": 24 * GIB})
    [attention] = [p for p in found.processes if p.role == "attention"]
    assert attention.place == "cuda:1"
    assert found.needed["cuda:1"] == attention.total
    assert found.needed[MACHINE] > attention.on_host > 0
    _, _, settings = parts_of(options)
    assert [place_of(settings[n]) for n in ("attention-0", "gateway")] == ["cuda:1", MACHINE]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=12),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
)
def test_processes_are_shared_out_to_where_most_is_left(sizes: list[int], room: list[int]) -> None:
    names = {f"w{i}": [size] for i, size in enumerate(sizes)}
    devices = {f"cuda:{i}": free for i, free in enumerate(room)}
    found = shared_out(names, devices)

    assert list(found) == list(names)
    left = {
        d: free - sum(names[n][0] for n in names if found[n] == d) for d, free in devices.items()
    }
    used = [d for d in devices if d in found.values()]
    # To move its smallest process elsewhere would leave no device fuller than the fullest is now.
    for device in used:
        smallest = min(names[n][0] for n in names if found[n] == device)
        assert all(left[other] <= left[device] + smallest for other in devices)


def test_devices_that_are_not_there_are_named() -> None:
    assert devices_named("cpu") == ()
    with pytest.raises(
        CommandError, match=r"--devices cuda:99: cuda:99 is not a device of this machine"
    ):
        devices_named("cuda:99")


def test_the_command_shows_a_plan_without_weights(ask: Any, house: Path, model: Path) -> None:
    shown = ask("plan", "--model", str(house), "--memory", "64G", "--max-model-len", "1K", "--json")
    facts = json.loads(shown.stdout)
    assert (facts["fits"], facts["max_model_len"]) == (True, 1024)
    assert facts["places"][0]["available_bytes"] == 64 * 10**9

    whole = ("--dtype", "float32", "--topology", "local")
    small = ask("plan", "--model", str(house), "--memory", "1150M", *whole)
    assert small.returncode == 1
    assert "--quantization int8" in small.stdout
    assert "1.07 GiB there are" in small.stdout


def test_up_refuses_what_does_not_fit_before_anything_starts(
    ask: Any, house: Path, model: Path
) -> None:
    (house / "model" / "config.json").write_text(json.dumps({**SHAPE, "hidden_size": 1 << 20}))
    refused = ask("up", "--model", "model", "--port", "0")
    assert refused.returncode == 2
    assert "this suite does not fit into memory" in refused.stderr
    assert not (house / "run").exists()


def test_up_refuses_a_context_that_the_model_does_not_have(ask: Any, house: Path) -> None:
    refused = ask("up", "--model", "model", "--max-model-len", "129")
    assert refused.returncode == 2
    assert "--max-model-len: 129 tokens are more than the model's 128 positions" in refused.stderr


def test_up_refuses_a_limit_below_what_the_slots_hold(ask: Any, house: Path) -> None:
    refused = ask("up", "--model", "model", "--max-expert-bytes", "1000")

    assert refused.returncode == 2
    assert "--max-expert-bytes 1000: the slots of expert-0 hold" in refused.stderr
    assert not (house / "run").exists()


@pytest.mark.parametrize("available", [2 * GIB, 64 * GIB])
def test_experts_that_move_stay_within_what_may_be_taken(model: Path, available: int) -> None:
    options = options_of(model, topology="disaggregated")
    _, _, settings = parts_of(options)
    found = plan(options, {MACHINE: available})
    [limit] = map(int, experts_environment(found, settings).values())
    held = of_role(found, "expert")

    assert limit >= held["experts"] + held["experts"] // MOVING
    over = 2 * (limit - held["experts"] - held["moves"])
    assert found.needed[MACHINE] + over <= found.room(MACHINE)
    assert over > found.room(MACHINE) - found.needed[MACHINE] - 2


def test_a_limit_of_the_user_stays(model: Path) -> None:
    options = options_of(model, "--max-expert-bytes=1000000000", topology="disaggregated")
    _, _, settings = parts_of(options)
    assert experts_environment(plan(options), settings) == {}
    alone = options_of(model)
    assert experts_environment(plan(alone), parts_of(alone)[2]) == {}


def test_ranks_take_gpus_side_by_side_each_with_its_part(model: Path) -> None:
    flags = ("--tensor-parallel=2", "--device=cuda:1")
    room = {MACHINE: 8 * GIB, **dict.fromkeys(("cuda:0", "cuda:1", "cuda:2"), 24 * GIB)}
    alone = plan(options_of(model, "--device=cuda:1"), room)
    found = plan(options_of(model, *flags), room)
    [whole] = [p for p in alone.processes if p.role == "attention"]
    first, second = (p for p in found.processes if p.role == "attention")

    assert (first.name, first.place) == ("attention-0", "cuda:1")
    assert (second.name, second.place) == ("attention-0.1", "cuda:2")
    assert found.needed["cuda:0"] == 0
    for part in ("attention", "head", "kv"):
        assert first.parts[part] == second.parts[part] == whole.parts[part] // 2 > 0
    assert first.parts["experts"] == whole.parts["experts"] > second.parts["experts"] == 0
    assert found.kv_tokens == alone.kv_tokens


def test_the_fullest_of_the_gpus_of_ranks_bounds_kv(model: Path) -> None:
    flags = ("--tensor-parallel=2", "--device=cuda:0")
    roomy = {MACHINE: 8 * GIB, "cuda:0": 24 * GIB, "cuda:1": 24 * GIB}
    found = plan(options_of(model, *flags), roomy)
    [second] = [p for p in found.processes if p.place == "cuda:1"]

    with_half = second.total - second.parts["kv"] // 2
    tight = plan(options_of(model, *flags), {**roomy, "cuda:1": with_half * 10 // 9})
    assert LEAST_KV_TOKENS < tight.kv_tokens < 8 * 4096
    assert tight.fits


@pytest.mark.parametrize(
    ("ranks", "first"), [({"a": 2, "b": 2}, {"cuda:0", "cuda:2"}), ({"a": 4}, {"cuda:0"})]
)
def test_ranks_of_one_worker_do_not_take_the_gpus_of_another(
    ranks: dict[str, int], first: set[str]
) -> None:
    room = {f"cuda:{index}": 100 for index in range(4)}
    found = shared_out({name: [50] * count for name, count in ranks.items()}, room)
    assert set(found.values()) == first


def test_more_ranks_than_gpus_side_by_side_are_refused() -> None:
    with pytest.raises(CommandError, match=r"--tensor-parallel 2: a needs 2 GPUs side by side"):
        shared_out({"a": [5, 5]}, {"cuda:0": 9, "cuda:2": 9})


def test_a_model_that_ranks_cannot_divide_is_refused_by_the_plan(model: Path) -> None:
    options = options_of(model, "--tensor-parallel=7", "--device=cuda:0")
    room = {f"cuda:{index}": GIB for index in range(7)}
    with pytest.raises(CommandError, match=r"--tensor-parallel 7: .*attention heads"):
        plan(options, {MACHINE: GIB, **room})


def test_a_machine_with_gpus_gives_each_worker_its_own(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda: 4)
    memory = [64 * GIB, 24 * GIB]
    apart = {"topology": "disaggregated", "attention": 1}

    alone = planned(options_of(model, **apart, experts=3), memory)
    ranks = planned(options_of(model, "--tensor-parallel=2", **apart, experts=2), memory)

    everything = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    for found in (alone, ranks):
        on_gpus = [p.place for p in found.memory.processes if p.place != MACHINE]
        assert sorted(on_gpus) == everything
        assert found.memory.fits
    flags = {s.name: s.flags for s in services_of(ranks.options, 128, 8)}
    first = ranks.options.places["attention-0"]
    assert flags["attention-0"][flags["attention-0"].index("--device") + 1] == first


def test_captured_steps_count_on_a_gpu_alone_and_unless_turned_off(model: Path) -> None:
    room = {MACHINE: 64 * GIB, "cuda:0": 64 * GIB, "cuda:1": 64 * GIB}

    def graphs(options: SuiteOptions) -> int:
        return of_role(plan(options, room), "attention")["graphs"]

    gpu = options_of(model, "--device=cuda:0")
    few, many = (
        graphs(options_of(model, "--device=cuda:0", f"--max-num-seqs={rows}")) for rows in (8, 64)
    )
    assert 0 < few < many == graphs(gpu)
    assert graphs(options_of(model)) == 0
    ranks = plan(options_of(model, "--device=cuda:0", "--tensor-parallel=2"), room).processes
    each = [rank.parts["graphs"] for rank in ranks if rank.role == "attention"]
    assert len(each) == 2
    assert all(0 < rank < many for rank in each)  # of fewer heads each
    off = given_settings({"decode_graphs": False}, "local")
    assert graphs(replace(gpu, settings=(*gpu.settings, *off))) == 0
