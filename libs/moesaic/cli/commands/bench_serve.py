"""``moesaic bench serve``: a load on any server of OpenAI's API, with the options of ``vllm bench serve``."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from moesaic.cli.load.options.load import LoadOptions
from moesaic.cli.terminal.console import say
from moesaic.cli.terminal.options import UrlArgument, takes
from moesaic.cli.terminal.outcome import CommandError, Exit, using

if TYPE_CHECKING:
    from moesaic.cli.load.datasets.prompt import LoadPrompt
    from moesaic.cli.load.datasets.vocabulary import Vocabulary
    from moesaic.cli.load.serving import LoadOutcome

# Options with several values behind one flag, and how each value is written.
SEVERAL = {"--header": r"[^=/]+=", "--metadata": r"[^=/]+=", "--goodput": r"\w+:[\d.]+$"}


class SeveralValues(TyperCommand):
    """Takes ``--goodput ttft:200 tpot:50`` as vLLM does, beside one value for each flag."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each value a flag of its own."""
        return super().parse_args(ctx, list(_repeated(args)))


def _repeated(args: Iterable[str]) -> Iterable[str]:
    flag, has_value = "", False
    for each in args:
        if each.startswith("--"):
            flag, has_value = (each if each in SEVERAL else ""), False
        elif flag and not has_value:
            has_value = True
        elif flag and re.match(SEVERAL[flag], each):
            yield flag
        else:
            flag = ""
        yield each


@takes(LoadOptions, variables=False)
def bench_serve(values: dict[str, Any], url: UrlArgument = None) -> None:
    """Measure a server under load, and print figures as 'vllm bench serve' does.

    All options that this command has in common with vLLM mean the same, unless the option says otherwise. The
    address is an argument, not --base-url. Any server of OpenAI's API will do. Unlike in vLLM, a first token has
    text, and an answer without an end counts as failed.
    """
    import asyncio
    from dataclasses import replace

    import httpx

    from moesaic.cli.clients.gateway import client_settings, first_model, gateway_url, reported
    from moesaic.cli.load.datasets.choosing import prompts_of
    from moesaic.cli.load.datasets.vocabulary import FileVocabulary, ServerVocabulary
    from moesaic.cli.load.serving import LoadServer, loaded, wait_for_models

    options = LoadOptions(**values)
    if options.is_kept:
        with using(f"--result-dir {options.result_dir}"):
            options.result_dir.mkdir(parents=True, exist_ok=True)
    address = gateway_url(url)
    settings = client_settings(address)
    settings["headers"] |= options.headers
    settings["verify"] = settings["verify"] and not options.insecure
    # What is wrong here is told before anything is asked.
    own = FileVocabulary(_path(options.tokenizer)) if options.tokenizer else None
    with reported(address), httpx.Client(**settings) as client:
        ready_s: float | None = None
        if options.ready_check_timeout_sec:
            ready_s = wait_for_models(client, options.ready_check_timeout_sec)
        options = replace(options, model=options.model or first_model(client))
        served = options.served_model_name or options.model
        vocabulary: Vocabulary = own or ServerVocabulary(client, served)
        prompts = prompts_of(options, vocabulary)
    extra = {"ignore_eos": True} if options.has_full_answers else {}
    server = LoadServer(
        address,
        options.backend,
        options.route,
        served,
        settings["headers"],
        extra | options.body,
        options.insecure,
    )
    say(f"{len(prompts)} requests to {address}{server.route}, model {served}")
    plan = _plan(options, prompts, ready_s)
    try:
        outcome = asyncio.run(loaded(server, plan))
    except KeyboardInterrupt:
        raise CommandError("interrupted", Exit.INTERRUPTED) from None
    _report(options, prompts, plan.due, outcome, own)


def _path(text: str) -> Any:
    from pathlib import Path

    return Path(text)


def _plan(options: LoadOptions, prompts: "list[LoadPrompt]", ready_s: float | None) -> Any:
    import uuid

    from moesaic.cli.load.arrivals import due_times
    from moesaic.cli.load.serving import LoadPlan

    due = (
        [each.due_s or 0.0 for each in prompts]
        if options.is_self_timed
        else due_times(
            len(prompts), options.request_rate, options.burstiness, options.seed, options.ramp_up
        )
    )
    return LoadPlan(
        prompts,
        due,
        options.max_concurrency,
        options.num_warmups,
        ready_s,
        options.request_id_prefix or f"bench-{uuid.uuid4().hex[:8]}-",
    )


def _report(
    options: LoadOptions,
    prompts: "list[LoadPrompt]",
    due: Any,
    outcome: "LoadOutcome",
    own: "Vocabulary | None",
) -> None:
    """Print the figures and keep them; fail if nothing was answered."""
    from datetime import datetime

    from moesaic.cli.load.report import pooling_report_of, report_of
    from moesaic.cli.load.result_file import described, file_name, save, stamp
    from moesaic.cli.load.table import table_of

    requests, duration_s = outcome.requests, outcome.duration_s
    if options.is_pooling:
        figures = pooling_report_of(requests, prompts, duration_s, options.percentiles)
    else:
        known = [each.prompt_tokens for each in prompts]
        tokens = (lambda text: len(own.tokens(text))) if own else None
        figures = report_of(requests, known, duration_s, options.percentiles, options.goals, tokens)
    if ramp_up := options.ramp_up:
        figures["rps_change_events"] = ramp_up.changes(list(due), outcome.began)
    metrics = [
        each
        for each in options.metrics(is_pooling=options.is_pooling)
        if f"mean_{each}_ms" in figures
    ]
    rate, most = options.request_rate, options.max_concurrency
    print(table_of(figures, metrics, options.percentiles, rate, most))
    if options.is_kept:
        at = stamp(datetime.now())
        asked = described(options, options.model, own.name if own else None, at)
        save(options, file_name(options, options.model, at), {**asked, **figures})
    failures = [each.error for each in requests if not each.complete]
    if failures:
        say(f"{len(failures)} requests failed, the first one: {failures[0]}")
        if any("stream_options" in each for each in failures):
            say(
                """for a server without stream_options, add --extra-body '{"stream_options": null}'"""
            )
    if len(failures) == len(requests):
        raise CommandError("no request was answered")
