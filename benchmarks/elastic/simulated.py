"""Studies of fleets of H100: throughput by batch, and GPU-hours of two days of arrivals by the size of their peak.

The cost model is ``moesaic_lab.simulation.elastic``: published rates, routing drawn by a seed. The
paper's model is looked at with the costs too that ``moesaic bench costs`` measured on an H100;
links stay published ones. Seconds of both are shorter than the paper's. So everything is repeated
at the *paper's pace*: every part is slowed down until the monolith behaves as in the paper's figure
7. There 16 GPUs meet 200 ms up to 256 requests, and 512 requests need 32.
"""

from pathlib import Path
from typing import Any

from benchmarks.elastic.beside import PAPER, agreement_with_scaler
from moesaic.cli.terminal.stages import Stages
from moesaic.messages.scaling import FleetShape
from moesaic.scaling.contract import Objectives
from moesaic_lab.commands.study_inputs import performance_of
from moesaic_lab.simulation.elastic.days import DecisionRule, FleetDays, with_least_headroom
from moesaic_lab.simulation.elastic.demand import DemandSeries
from moesaic_lab.simulation.elastic.fleet_times import Hardware
from moesaic_lab.simulation.elastic.fleets import FleetFamily, slowed
from moesaic_lab.simulation.elastic.hardware import device_profile
from moesaic_lab.simulation.elastic.model_shapes import model_shape
from moesaic_lab.simulation.elastic.roofline import roofline
from moesaic_lab.simulation.elastic.steady import StudiedFleet
from moesaic_lab.simulation.elastic.throughput import BatchFigure, at_shape, batch_figure
from moesaic_lab.simulation.trace_files import read_rates

RATES, RATES_OF = Path(__file__).parents[1] / "data/servegen_rates.csv.gz", "m-small"
DEVICE, MODELS = "h100", ("deepseek-v2", "qwen3-235b")
MEASURED = Path(__file__).parents[1] / "results/gpu/2026-11-26-nvidia-h100-80gb-hbm3-costs.json"
PACES = {"published": 1.0, "measured": 1.0, "paper": 5.4}
PROMPT_TOKENS, ANSWER_TOKENS = 16, 256  # ShareGPT in JANUS section 5.1
CONTEXT_TOKENS = PROMPT_TOKENS + ANSWER_TOKENS / 2
OBJECTIVES = Objectives(ttft_s=2.0, tpot_s=0.2, attainment=0.99)
BATCHES, MOST_DEVICES = (4, 16, 64, 256, 512), 40
FIRST_DAY, BIN_S = 5, 2.0
DAY_S = 86400.0
# Requests a second of the busiest ten minutes.
PUBLISHED_PEAKS = (20.0, 60.0, 100.0, 150.0, 300.0, 600.0)
PEAKS = {"published": PUBLISHED_PEAKS, "measured": PUBLISHED_PEAKS, "paper": (1.0, 2.0, 4.0)}
DECISIONS = {"30 min": 1800.0, "5 min": 300.0}


def measure(quick: bool) -> dict[str, Any]:
    """Run both studies; ``quick``: of one model, fewer batches and peaks."""
    models, batches = (MODELS[:1], (4, 64, 512)) if quick else (MODELS, BATCHES)
    most = 24 if quick else MOST_DEVICES
    figures: dict[str, Any] = {"throughput": {}, "two_days": {}}
    with Stages() as stages:
        for model in models:
            for pace in PACES:
                if pace != "published" if quick else pace == "measured" and model != MODELS[0]:
                    continue
                family = family_at(model, pace)
                key = f"{model}, {pace} pace"
                figures["throughput"][key] = {
                    str(batch): _throughput(family, batch, most) for batch in batches
                }
                peaks = PEAKS[pace][:2] if quick else PEAKS[pace]
                figures["two_days"][key] = {}
                for number, peak in enumerate(peaks, 1):
                    figures["two_days"][key][f"peak {peak:g}/s"] = _two_days(family, peak)
                    stages.show(key, number, len(peaks))
        family = family_at(MODELS[0], "published")
        figures["scaler_agreement"] = agreement_with_scaler(
            family, _demand(60.0), OBJECTIVES, 2 if quick else 8
        )
    figures |= _headline(figures["two_days"])
    return {
        "config": _config(quick, most),
        "figures": figures,
        "paper": PAPER,
        "notes": _notes(quick),
    }


def family_at(model: str, pace: str) -> FleetFamily:
    """Make the fleets of a model, at one of ``PACES``."""
    device, shape = device_profile(DEVICE), model_shape(model)
    costs = roofline(device, shape)
    if pace == "measured":
        costs = performance_of(MEASURED, model, costs)
    return FleetFamily.drawn(Hardware(device, shape, slowed(costs, PACES[pace])))


def _throughput(family: FleetFamily, batch: int, most: int) -> dict[str, Any]:
    def chosen(fleet: StudiedFleet) -> BatchFigure:
        return batch_figure(fleet, batch, CONTEXT_TOKENS, OBJECTIVES.tpot_s, most=most)

    ours = chosen(family.ours)
    others = {
        "16_32_64": chosen(family.fixed_sizes),
        "any_size": chosen(family.any_size),
        "coarse": chosen(family.coarse),
        "without_aebs": chosen(family.unbalanced),
    }
    direct = at_shape(family.direct, ours.shape, batch, CONTEXT_TOKENS, OBJECTIVES.tpot_s)
    unbalanced = at_shape(family.unbalanced, ours.shape, batch, CONTEXT_TOKENS, OBJECTIVES.tpot_s)
    found: dict[str, Any] = {
        "shape": str(ours.shape),
        "paper_shape": PAPER["shapes"].get(str(batch), ""),
        "tpot_ms": round(1e3 * ours.tpot_s, 1),
        "met": ours.met,
        "tokens_per_s_and_gpu": round(ours.per_device, 1),
        "tpot_over_direct": round(ours.tpot_s / direct.tpot_s, 3),
        "tpot_over_random_replicas": round(ours.tpot_s / unbalanced.tpot_s, 3),
    }
    if stated := PAPER["shapes"].get(str(batch)):
        attention, experts = map(int, stated[:-1].split("A"))
        shape = FleetShape(attention, experts)
        if family.ours.times.holds(shape):
            own = at_shape(family.ours, shape, batch, CONTEXT_TOKENS, OBJECTIVES.tpot_s)
            found["tpot_ms_of_paper_shape"] = round(1e3 * own.tpot_s, 1)
    for name, other in others.items():
        found[f"ratio_{name}"] = round(ours.per_device / other.per_device, 3)
        found[f"of_{name}"] = (
            f"{_named(other.shape)}, {1e3 * other.tpot_s:.0f} ms{'' if other.met else ', missed'}"
        )
    return found


def _demand(peak: float, day: int = FIRST_DAY) -> DemandSeries:
    curve = read_rates(RATES, RATES_OF).window((day - 1) * DAY_S, (day + 2) * DAY_S)
    scaled = curve.scaled(curve.requests_per_s * peak / float(curve.per_s[144:].max()))
    return DemandSeries.drawn(scaled, BIN_S, PROMPT_TOKENS, ANSWER_TOKENS, seed=0)


def _two_days(family: FleetFamily, peak: float) -> dict[str, Any]:
    """Serve two days, decided by what was before; the day before them is only looked at."""
    whole = _demand(peak)
    demand = whole.part(DAY_S, 3 * DAY_S)
    found: dict[str, Any] = {}
    for name, every_s in DECISIONS.items():
        before, rule = whole.rate(DAY_S - every_s, DAY_S), DecisionRule(every_s)
        ours = _served(family.ours, demand, rule, before)
        found[name] = {"ours": ours}
        for key, fleet in (
            ("16_32_64", family.fixed_sizes),
            ("any_size", family.any_size),
            ("without_aebs", family.unbalanced),
        ):
            other = _served(fleet, demand, rule, before)
            found[name][key] = other
            found[name][f"gpu_hours_ratio_{key}"] = _ratio(ours, other)
    return found


def _ratio(ours: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Compare GPU-hours; None unless both fleets attain the targets."""
    if min(ours["slo_attainment"], other["slo_attainment"]) < OBJECTIVES.attainment:
        return None
    return round(float(ours["gpu_hours"]) / float(other["gpu_hours"]), 3)


def _served(
    fleet: StudiedFleet, demand: DemandSeries, rule: DecisionRule, before: float
) -> dict[str, Any]:
    headroom, days = with_least_headroom(fleet, demand, OBJECTIVES, rule, before)
    return {
        "gpu_hours": round(days.device_hours(BIN_S), 1),
        "mean_gpus": round(sum(days.devices) / len(days.devices), 2),
        "shapes": _range(days),
        "slo_attainment": round(days.attainment, 4),
        "headroom": headroom,
        "changes": days.changes,
        "unmet_decisions": days.unmet,
    }


def _range(days: FleetDays) -> str:
    fewest, most = (f(days.shapes, key=lambda s: s.total) for f in (min, max))
    return f"{_named(fewest)} to {_named(most)}"


def _named(shape: FleetShape) -> str:
    return str(shape) if shape.experts else f"{shape.attention} together"


def _headline(two_days: dict[str, Any]) -> dict[str, Any]:
    """Name the figures of the paper's model as it is, by decisions and peak."""
    by_peak = two_days[f"{MODELS[0]}, published pace"]

    def of(key: str) -> dict[str, Any]:
        return {
            every: {peak: days[every][key] for peak, days in by_peak.items()} for every in DECISIONS
        }

    attainments = {
        every: {peak: days[every]["ours"]["slo_attainment"] for peak, days in by_peak.items()}
        for every in DECISIONS
    }
    return {
        "gpu_hours_ratio": of("gpu_hours_ratio_16_32_64"),
        "gpu_hours_ratio_any_size": of("gpu_hours_ratio_any_size"),
        "slo_attainment": attainments,
    }


def _config(quick: bool, most: int) -> dict[str, Any]:
    return {
        "device": DEVICE,
        "models": MODELS[:1] if quick else MODELS,
        "tokens": [PROMPT_TOKENS, ANSWER_TOKENS],
        "targets": {"ttft_s": OBJECTIVES.ttft_s, "tpot_s": OBJECTIVES.tpot_s},
        "attainment": OBJECTIVES.attainment,
        "paces": PACES,
        "rates": f"servegen_rates, {RATES_OF}, days {FIRST_DAY + 1} and {FIRST_DAY + 2}",
        "bin_s": BIN_S,
        "activation_delay_s": DecisionRule(1.0).delay_s,
        "most_devices_by_batch": most,
    }


def _notes(quick: bool) -> list[str]:
    return [
        "simulated: seconds follow published rates and kernels measured on an H200; nobody ran these fleets",
        "gpu_hours_ratio: ours over 16, 32 or 64 GPUs together, for deepseek-v2 by the peak of the arrivals; 20/s is "
        "about 450 requests in flight, and the paper's largest batch is 512",
        "every fleet has the least headroom of a list with which it attains the targets over the same two days; "
        "decisions see the window before them alone. No ratio stands where a fleet does not attain them with any",
        "attainment: the rate of each minute is replayed by moesaic.scaling.replay, a sample of Poisson arrivals for "
        "each shape and rate; nothing that waits is carried into the next minute",
        "decisions take the cheapest shape in a steady state; scaler_agreement sets moesaic.scaling beside it on "
        "windows of the same days",
        "measured pace: attention, experts and head as 'moesaic bench costs' measured them on an H100; links published",
        "paper pace: every part takes 5.4 times as long; with factors from 5.2 to 5.6, 16 GPUs together meet 200 ms at "
        "256 requests and not at 512",
        "the monolith exchanges rows as DeepEP does and overlaps two micro-batches, which favours it over SGLang's of "
        "the paper",
        *(
            ["quick: one model and pace, fewer batches, peaks and windows, the same code path"]
            if quick
            else []
        ),
    ]
