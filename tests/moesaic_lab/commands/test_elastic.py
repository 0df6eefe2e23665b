"""``moesaic simulate elastic``: what it takes, and what it says."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from moesaic.cli.main import app
from moesaic.cli.terminal.outcome import CommandError
from moesaic.errors import InvalidInput
from moesaic.placement.traffic.trace import Trace, TracedStep
from moesaic_lab.commands.study_inputs import model_of, performance_of, routing_of
from moesaic_lab.simulation.elastic.hardware import device_profile
from moesaic_lab.simulation.elastic.model_shapes import model_shape
from moesaic_lab.simulation.elastic.roofline import roofline

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "models/demo"
H100_COSTS = ROOT / "benchmarks/results/gpu/2026-11-26-nvidia-h100-80gb-hbm3-costs.json"
PUBLISHED = roofline(device_profile("h100"), model_shape("mixtral-8x7b"))


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["simulate", "elastic", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    rows = [f"{second},200,100" for second in range(1200) for _ in range(1 + second // 300)]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["timestamp_s,input_tokens,output_tokens", *rows]))
    return str(path)


def test_it_says_what_each_way_to_serve_would_need(trace: str, tmp_path: Path) -> None:
    picture = tmp_path / "study.png"
    done = simulate("--model", "mixtral-8x7b", "--trace", trace, "--json", "--out", str(picture))

    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    ours = facts["fleets"]["ours"]
    assert ours["mean_attention"] >= 1
    assert ours["attainment"] >= 0.99
    assert set(facts["fleets"]) >= {"without AEBS", "without replicas", "any number together"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_it_prints_a_table_for_people(trace: str) -> None:
    done = simulate("--model", "mixtral-8x7b", "--trace", trace, "--price", "2")

    assert done.exit_code == 0, done.output
    assert "device-hours" in done.stdout
    assert "brownout, threshold 0.6" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "none"], "model"),
        (["--device", "none"], "device"),
        (["--trace", "none"], "trace"),
        (["--decide-every", "often"], "--decide-every"),
        (["--decide-every", "1h"], "trace"),
        (["--model", "deepseek-v2", "--device", "cpu"], "device"),
    ],
)
def test_wrong_arguments_are_named(trace: str, arguments: list[str], named: str) -> None:
    done = simulate("--trace", trace, *arguments)

    assert isinstance(done.exception, CommandError)
    assert named in str(done.exception)
    assert done.exception.status == 2


def test_a_model_directory_is_as_large_as_its_weights() -> None:
    shape = model_of(str(DEMO))

    parameters = (shape.num_experts * shape.slot_bytes + shape.attention_bytes) / 2

    assert (shape.num_experts, shape.top_k, shape.num_layers) == (32, 4, 8)
    assert parameters == pytest.approx(15.3e6, rel=0.2)


def test_measured_costs_stand_in_for_published_ones(trace: str, tmp_path: Path) -> None:
    device, model = device_profile("a100"), model_shape("mixtral-8x7b")
    path = tmp_path / "costs.json"
    path.write_bytes(msgspec.json.encode(roofline(device, model)))

    done = simulate("--model", "mixtral-8x7b", "--trace", trace, "--costs", str(path), "--json")

    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["config"]["device"] == device.title


def test_a_report_of_measured_costs_lends_its_model_and_no_links(tmp_path: Path) -> None:
    device, model = device_profile("h100"), model_shape("qwen3-235b")
    published = roofline(device, model)
    figures = json.loads(H100_COSTS.read_text())["figures"]

    found = performance_of(H100_COSTS, "qwen3-235b", published)

    told = figures["qwen3-235b-a22b"]["model"]["parts"]["experts"]["unit_s"]
    assert found.parts["experts"].unit_s == tuple(told) != published.parts["experts"].unit_s
    assert found.parts["link.inter"] == published.parts["link.inter"]
    assert "links: " + published.source in found.source
    for name in ("mixtral-8x7b", "qwen3"):  # none, and two
        with pytest.raises(InvalidInput, match=f"{name}, and has qwen3-30b-a3b, "):
            performance_of(H100_COSTS, name, published)


@pytest.mark.parametrize(
    "text", ["{}", "[1]", "no json", '{"figures": {}}', '{"figures": {"x": 1}}']
)
def test_costs_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)

    with pytest.raises(InvalidInput, match="must"):
        performance_of(path, "mixtral-8x7b", PUBLISHED)


def test_costs_without_a_part_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"type": "performance-model.v1", "parts": {}}')

    with pytest.raises(InvalidInput, match="attention"):
        performance_of(path, "mixtral-8x7b", PUBLISHED)


def test_recorded_routing_must_be_of_the_model_s_experts(tmp_path: Path) -> None:
    path = tmp_path / "routing.moetrace"
    step = TracedStep(0, 3, np.array([[[0, 1], [1, 2], [7, 0]]], np.uint8))
    path.write_bytes(Trace("digest", 8, 2, (0,), ("part",), (step,)).encode())

    assert routing_of(path, model_shape("mixtral-8x7b"))[0].tolist() == [[0, 1], [1, 2], [7, 0]]
    with pytest.raises(InvalidInput, match="128 experts"):
        routing_of(path, model_shape("qwen3-30b"))
