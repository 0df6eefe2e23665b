"""Files that studies of fleets read: arrivals, measured costs, recorded routing, configurations of models."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.cli.terminal.outcome import using
from moesaic.errors import InvalidInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from moesaic.messages.performance import PerformanceModel
    from moesaic.placement.traffic.trace import Trace
    from moesaic_lab.simulation.elastic.demand import DemandSeries
    from moesaic_lab.simulation.elastic.model_shapes import ModelShape

MOST_RATES_S = 2 * 86400.0  # of a file of rates
RATES_BIN_S = 2.0
USUAL_RATES = "m-small"
LINKS = "link.intra", "link.inter"


def model_of(name: str) -> "ModelShape":
    """Find a known model, or read the configuration of a model directory.

    Raises:
        InvalidInput: there is none.
        CheckpointError: the directory's configuration cannot be read.
    """
    from moesaic_lab.simulation.elastic.model_shapes import AttentionShape, ModelShape, model_shape

    if not Path(name).is_dir():
        return model_shape(name)
    from moesaic.models.configuration.architecture import LatentAttention
    from moesaic.models.configuration.config import load_config

    config = load_config(Path(name))
    attention, hidden = config.attention, config.hidden_size
    if isinstance(attention, LatentAttention):
        head = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        rank, heads = attention.q_lora_rank, attention.num_heads
        queries = hidden * heads * head if rank is None else rank * (hidden + heads * head)
        latent, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        keys = hidden * (latent + rope)
        keys += latent * heads * (attention.qk_nope_head_dim + attention.v_head_dim)
        parameters = queries + keys + heads * attention.v_head_dim * hidden
        shape = AttentionShape(heads, config.kv_width, latent + rope, latent, parameters)
    else:
        dim = attention.head_dim
        parameters = 2 * hidden * dim * (attention.num_heads + attention.num_kv_heads)
        shape = AttentionShape(attention.num_heads, config.kv_width, dim, dim, parameters)
    return ModelShape(
        title=Path(name).resolve().name,
        source="config.json",
        num_layers=config.num_layers,
        num_moe_layers=len(config.moe_layers),
        hidden=hidden,
        vocabulary=config.vocab_size,
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        expert_size=config.moe.expert_size,
        shared_size=config.moe.shared_expert_size,
        dense_size=config.dense_size,
        attention=shape,
    )


def performance_of(path: Path, model: str, published: "PerformanceModel") -> "PerformanceModel":
    """Read a measured performance model, alone or in a report of ``moesaic bench costs``.

    Args:
        path: of the file, JSON.
        model: its name; of the models in a report, the one whose name begins with it is taken.
        published: gives the links, unless the file has any: one device cannot measure them.

    Raises:
        InvalidInput: it cannot be read, or lacks the model, or a part that steps need.
    """
    import msgspec

    from moesaic.messages.performance import PART_TERMS, PerformanceModel

    try:
        read = msgspec.json.decode(path.read_bytes())
        if isinstance(read, dict) and "figures" in read:
            read = _of_report(read["figures"], Path(model).resolve().name)
        found = msgspec.convert(read, PerformanceModel)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInput("costs", f"must be a performance model, {path}: {error}") from error
    if missing := [part for part in ("attention", "experts") if part not in found.parts]:
        raise InvalidInput("costs", f"must have the parts {', '.join(missing)}")
    for part, terms in PART_TERMS.items():
        if part in found.parts and found.parts[part].terms != terms:
            raise InvalidInput("costs", f"must have the terms {', '.join(terms)} for {part}")
    links = {part: published.parts[part] for part in LINKS if part not in found.parts}
    source = f"{found.source}; links: {published.source}" if links else found.source
    return msgspec.structs.replace(found, source=source, parts=links | found.parts)


def _of_report(figures: Any, model: str) -> Any:
    each_of = figures if isinstance(figures, dict) else {}
    named = {
        name: each["model"]
        for name, each in each_of.items()
        if isinstance(each, dict) and "model" in each
    }
    found = [name for name in named if name == model] or [n for n in named if n.startswith(model)]
    if len(found) != 1:
        raise InvalidInput("costs", f"must have the model {model}, and has {', '.join(named)}")
    return named[found[0]]


def read_trace(file: Path, what: str) -> "Trace":
    """Read a trace of ``moesaic trace record``.

    Args:
        file: to read.
        what: the flag with the file's name, or the name alone.

    Raises:
        CommandError: it cannot be read.
        InvalidInput: it is no trace.
    """
    from moesaic.placement.traffic.trace import Trace

    with using(what):
        return Trace.decode(file.read_bytes())


def routing_of(path: Path, model: "ModelShape") -> "list[NDArray[Any]]":
    """Read recorded routing: the decode steps of each layer, or all steps if there are none.

    Raises:
        InvalidInput: it cannot be read, or is of a model with other experts.
    """
    import numpy as np

    from moesaic.placement.traffic.trace import Trace

    try:
        trace = Trace.decode(path.read_bytes())
    except OSError as error:
        raise InvalidInput("routing", f"must be a trace, {path}: {error.strerror}") from error
    if (trace.num_experts, trace.top_k) != (model.num_experts, model.top_k):
        raise InvalidInput(
            "routing",
            f"must be of {model.num_experts} experts and top-{model.top_k}, {path.name} is of "
            f"{trace.num_experts} and top-{trace.top_k}",
        )
    steps = trace.selected(phases=["decode"]) or list(trace.steps)
    if not steps:
        raise InvalidInput("routing", f"must have steps, {path.name} has none")
    joined = np.concatenate([step.topk_ids for step in steps], axis=1)
    return list(joined.astype(np.int64))


def demand_of(
    trace: str,
    folder: Path,
    requests_per_s: float,
    tokens: tuple[float, float],
    seed: int,
    every_s: float,
    short_s: float,
) -> "tuple[DemandSeries, float]":
    """Read arrivals, or draw them after a curve of rates.

    Args:
        trace: a file, or the name of one that comes with the sources; ``:NAME`` behind rates is their model.
        folder: of those that come with the sources.
        requests_per_s: mean rate to scale to; 0: as recorded.
        tokens: of prompts and answers, where there are rates alone.
        seed: of drawn arrivals.
        every_s: the first window of this length is not served, but decided by.
        short_s: traces up to so long are counted second by second.

    Returns:
        The demand, and the rate in the window before it.

    Raises:
        InvalidInput: there is no such trace, or it is shorter than two windows.
    """
    from moesaic_lab.simulation.elastic.demand import DemandSeries
    from moesaic_lab.simulation.trace_files import read_arrivals, read_rates

    name, _, rates_of = trace.partition(":")
    path = Path(name) if Path(name).is_file() else folder / f"{name}.csv.gz"
    if not path.is_file():
        raise InvalidInput(
            "trace",
            f"must be a file, or azure2023_conv or servegen_rates in the project's directory, got "
            f"{trace!r}",
        )
    if rates_of or "rates" in path.name:
        curve = read_rates(path, rates_of or USUAL_RATES)
        curve = curve.window(0.0, min(curve.span_s, MOST_RATES_S))
        curve = curve.scaled(requests_per_s) if requests_per_s else curve
        found = DemandSeries.drawn(curve, RATES_BIN_S, *tokens, seed)
    else:
        arrivals = read_arrivals(path)
        arrivals = arrivals.at_rate(requests_per_s) if requests_per_s else arrivals
        bin_s = 1.0 if arrivals.span_s <= short_s else RATES_BIN_S
        found = DemandSeries.counted(arrivals, bin_s)
    if found.span_s < 2 * every_s:
        raise InvalidInput(
            "trace",
            f"must last at least twice the time between decisions, {every_s:g} s; "
            f"{path.name} has {found.span_s:g} s",
        )
    return found.part(every_s, found.span_s), found.rate(0.0, every_s)
