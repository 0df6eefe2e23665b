"""``moesaic bench serve``: a load on any server of OpenAI's API, with the options of ``vllm bench serve``."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.options import UrlArgument
from moesaic.cli.terminal.outcome import CommandError, Exit, using

if TYPE_CHECKING:
    import httpx

    from moesaic.cli.load.prompts import LoadPrompt

DATA, TRAFFIC, RESULT = "Prompts", "Traffic", "Result"


def bench_serve(
    url: UrlArgument = None,
    backend: Annotated[
        Literal["openai", "vllm", "openai-chat"],
        typer.Option(help="API: openai and vllm are completions."),
    ] = "openai",
    endpoint: Annotated[str, typer.Option(help="Route (default: that of the backend).")] = "",
    model: Annotated[
        str, typer.Option(help="Model to ask (default: the first that is served).")
    ] = "",
    header: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Header of all requests.")
    ] = None,
    extra_body: Annotated[
        str, typer.Option(metavar="JSON", help="Further fields of all requests.")
    ] = "{}",
    dataset_name: Annotated[
        Literal["random", "sharegpt", "custom"],
        typer.Option(help="Where prompts come from.", rich_help_panel=DATA),
    ] = "random",
    dataset_path: Annotated[
        Path | None, typer.Option(help="File of sharegpt or custom.", rich_help_panel=DATA)
    ] = None,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Number of requests.", rich_help_panel=DATA)
    ] = 1000,
    random_input_len: Annotated[
        int, typer.Option(min=1, help="Tokens of a random prompt.", rich_help_panel=DATA)
    ] = 1024,
    random_output_len: Annotated[
        int, typer.Option(min=1, help="Tokens of its answer.", rich_help_panel=DATA)
    ] = 128,
    random_range_ratio: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.999,
            help="Lengths are drawn from [length * (1 - ratio), length * (1 + ratio)].",
            rich_help_panel=DATA,
        ),
    ] = 0.0,
    output_len: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of every answer (default: as files say).", rich_help_panel=DATA
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Do not end answers early; always so with random prompts.",
            rich_help_panel=DATA,
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Temperature (default: the server's).", rich_help_panel=DATA),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of all that is drawn.", rich_help_panel=DATA)] = 0,
    request_rate: Annotated[
        float,
        typer.Option(help="Requests a second; inf: all at once.", rich_help_panel=TRAFFIC),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            help="Shape of the Gamma distribution of gaps; 1: Poisson, less: more bursty.",
            rich_help_panel=TRAFFIC,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests in flight.", rich_help_panel=TRAFFIC),
    ] = None,
    num_warmups: Annotated[
        int, typer.Option(min=0, help="Requests before the measurement.", rich_help_panel=TRAFFIC)
    ] = 0,
    percentile_metrics: Annotated[
        str, typer.Option(help="Of ttft,tpot,itl,e2el.", rich_help_panel=RESULT)
    ] = "ttft,tpot,itl",
    metric_percentiles: Annotated[
        str, typer.Option(help="Such as 50,99.", rich_help_panel=RESULT)
    ] = "99",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Targets of a good request, such as 'ttft:200 tpot:50'.",
            rich_help_panel=RESULT,
        ),
    ] = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help="Write a JSON file.", rich_help_panel=RESULT)
    ] = False,
    save_detailed: Annotated[
        bool,
        typer.Option(
            "--save-detailed", help="Also each request, in that file.", rich_help_panel=RESULT
        ),
    ] = False,
    result_dir: Annotated[
        Path, typer.Option(help="Directory of that file.", rich_help_panel=RESULT)
    ] = Path(),
    result_filename: Annotated[
        str,
        typer.Option(
            help="Its name (default: from backend, rate, model and time).", rich_help_panel=RESULT
        ),
    ] = "",
) -> None:
    """Measure a server under load, and print figures as 'vllm bench serve' does.

    All options that this command has in common with vLLM mean the same. Any server of OpenAI's API will do.
    """
    import asyncio

    import httpx

    from moesaic.cli.clients.gateway import client_settings, first_model, gateway_url, reported
    from moesaic.cli.load.prompts import due_times
    from moesaic.cli.load.report import DETAILS, METRICS, report_of, table_of
    from moesaic.cli.load.serving import ROUTES, LoadServer, loaded

    for name, value in (("request-rate", request_rate), ("burstiness", burstiness)):
        if not value > 0:
            raise CommandError(f"--{name}: must be above 0, got {value:g}", Exit.USAGE)
    metrics = _listed("--percentile-metrics", percentile_metrics)
    if unknown := [each for each in metrics if each not in METRICS]:
        text = f"--percentile-metrics {unknown[0]}: give some of {','.join(METRICS)}"
        raise CommandError(text, Exit.USAGE)
    percentiles = [
        _percentile(each) for each in _listed("--metric-percentiles", metric_percentiles)
    ]
    goals = _goals(goodput or [])
    if save_result and not result_dir.is_dir():
        raise CommandError(f"--result-dir {result_dir}: no such directory", Exit.USAGE)
    extra = _extra(extra_body)
    if ignore_eos or dataset_name == "random":
        extra = {"ignore_eos": True, **extra}
    if temperature is not None:
        extra = {"temperature": temperature, **extra}
    address = gateway_url(url)
    settings = client_settings(address)
    headers = settings["headers"] | _headers(header or [])
    settings["headers"] = headers
    with reported(address), httpx.Client(**settings) as client:
        model = model or first_model(client)
        sizes = random_input_len, output_len or random_output_len, random_range_ratio
        prompts = (
            _random(client, model, backend, num_prompts, sizes, seed)
            if dataset_name == "random"
            else _of_file(client, model, dataset_path, dataset_name, num_prompts, output_len, seed)
        )
    server = LoadServer(address, backend, endpoint or ROUTES[backend], model, headers, extra)
    due = due_times(num_prompts, request_rate, burstiness, seed)
    say(f"{num_prompts} requests to {address}{server.route}, model {model}")
    try:
        load = loaded(server, prompts, due, max_concurrency, num_warmups)
        requests, duration_s = asyncio.run(load)
    except KeyboardInterrupt:
        raise CommandError("interrupted", Exit.INTERRUPTED) from None
    known = [each.prompt_tokens for each in prompts]
    figures = report_of(requests, known, duration_s, percentiles, goals)
    print(table_of(figures, metrics, percentiles, request_rate, max_concurrency))
    if save_result:
        now = time.strftime("%Y%m%d-%H%M%S")
        base = model.rpartition("/")[2]
        name = result_filename or f"{backend}-{request_rate}qps-{base}-{now}.json"
        asked = {
            **{"date": now, "endpoint_type": backend, "backend": backend, "label": None},
            **{"model_id": model, "tokenizer_id": None, "num_prompts": num_prompts},
            "request_rate": "inf" if math.isinf(request_rate) else request_rate,
            **{"burstiness": burstiness, "max_concurrency": max_concurrency},
        }
        kept = {k: v for k, v in figures.items() if save_detailed or k not in DETAILS}
        _save(result_dir / name, {**asked, **kept})
    failures = [each.error for each in requests if not each.complete]
    if failures:
        say(f"{len(failures)} requests failed, the first one: {failures[0]}")
    if len(failures) == len(requests):
        raise CommandError("no request was answered")


def _save(path: Path, result: dict[str, Any]) -> None:
    with using(f"--result-filename {path}"):
        path.write_text(json.dumps(result) + "\n", encoding="utf-8")


def _random(
    client: "httpx.Client",
    model: str,
    backend: str,
    count: int,
    sizes: tuple[int, int, float],
    seed: int,
) -> "list[LoadPrompt]":
    """Draw prompts of tokens that the server knows, or of words if it does not tell its tokens."""
    from moesaic.cli.load.prompts import random_prompts
    from moesaic.cli.load.serving import pool_of, spelt

    pool = pool_of(client, model)
    if not pool:
        say("the server has no /tokenize: random prompts are of words, and it counts their tokens")
    prompts = random_prompts(count, sizes[:2], sizes[2], pool, seed)
    return spelt(client, model, prompts) if backend == "openai-chat" else prompts


def _of_file(
    client: "httpx.Client",
    model: str,
    path: Path | None,
    kind: str,
    count: int,
    answer_tokens: int | None,
    seed: int,
) -> "list[LoadPrompt]":
    """Read prompts; the lengths of recorded answers are counted by the server, or in words."""
    from moesaic.cli.load.prompts import file_prompts
    from moesaic.cli.load.serving import tokens_of

    if path is None:
        raise CommandError(f"--dataset-path: --dataset-name {kind} needs a file", Exit.USAGE)

    def tokens(text: str) -> int:
        return len(tokens_of(client, model, text) or text.split())

    return file_prompts(path, kind, count, answer_tokens, tokens, seed)


def _listed(flag: str, text: str) -> list[str]:
    found = [each.strip() for each in text.split(",") if each.strip()]
    if not found:
        raise CommandError(f"{flag}: is empty", Exit.USAGE)
    return found


def _percentile(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        text = f"--metric-percentiles {text}: give numbers from 0 to 100, such as 50,99"
        raise CommandError(text, Exit.USAGE)
    return value


def _goals(texts: Sequence[str]) -> dict[str, float]:
    from moesaic.cli.load.report import GOALS

    found = {}
    for pair in " ".join(texts).split():
        name, _, value = pair.partition(":")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in GOALS or not found[name] >= 0:
            why = f"write NAME:MS, with a name of {', '.join(GOALS)}"
            raise CommandError(f"--goodput {pair}: {why}", Exit.USAGE)
    return found


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, has_value, value = (part.strip() for part in pair.partition("="))
        is_sendable = (name + value).isascii() and (name + value).isprintable()
        if not (name and has_value and is_sendable) or ":" in name or " " in name:
            raise CommandError("--header: write KEY=VALUE, in printable ASCII", Exit.USAGE)
        found[name] = value
    return found


def _extra(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CommandError('--extra-body: write a JSON object, such as {"top_k": 5}', Exit.USAGE)
    return found
