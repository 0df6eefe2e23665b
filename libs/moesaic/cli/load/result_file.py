"""The JSON file of a load, with the keys of ``vllm bench serve``."""

import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from moesaic.cli.load.arrivals import whole
from moesaic.cli.load.options.load import LoadOptions
from moesaic.cli.terminal.outcome import using

# Of each request; without --save-detailed vLLM leaves these out, but keeps latencies and queue_times.
DETAILS = (
    *("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"),
)


def described(options: LoadOptions, model: str, tokenizer: str | None, at: str) -> dict[str, Any]:
    """Say what was asked for; notes of the user stand where vLLM has them.

    Args:
        options: of the load.
        model: that was asked.
        tokenizer: that counted tokens, if not the server.
        at: time, as ``stamp`` writes it.
    """
    found: dict[str, Any] = {
        "date": at,
        "endpoint_type": options.backend,
        "backend": options.backend,
        "label": options.label or None,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": options.num_prompts,
        **options.notes,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    if ramp_up := options.ramp_up:
        found["ramp_up_strategy"] = ramp_up.strategy
        found["ramp_up_start_rps"] = whole(ramp_up.start_rps)
        found["ramp_up_end_rps"] = whole(ramp_up.end_rps)
    return found


def stamp(now: datetime) -> str:
    """Write a time as in names of files."""
    return now.strftime("%Y%m%d-%H%M%S")


def file_name(options: LoadOptions, model: str, at: str) -> str:
    """Name the file as vLLM does, unless the user has."""
    if options.result_filename:
        return options.result_filename
    rate = f"{options.request_rate}qps"
    if ramp_up := options.ramp_up:
        start, end = whole(ramp_up.start_rps), whole(ramp_up.end_rps)
        rate = f"ramp-up-{ramp_up.strategy}-{start}qps-{end}qps"
    most = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    label, base = options.label or options.backend, model.rpartition("/")[2]
    return f"{label}-{rate}{most}-{base}-{at}.json"


def save(options: LoadOptions, name: str, result: Mapping[str, Any]) -> None:
    """Write the file, or a line more.

    Raises:
        CommandError: it cannot be written.
    """
    left_out = () if options.save_detailed else DETAILS
    kept = {key: value for key, value in result.items() if key not in left_out}
    path = options.result_dir / name
    with using(f"--result-filename {path}"):
        before = b""
        if options.append_result and path.exists():
            before = path.read_bytes()
        # A line that vLLM wrote has no end.
        gap = "\n" if before and not before.endswith(b"\n") else ""
        with path.open("a" if options.append_result else "w", encoding="utf-8") as file:
            file.write(gap + json.dumps(kept) + "\n")
