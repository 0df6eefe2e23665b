"""``moesaic status``: every service, the readiness for requests, and the holders of experts."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from moesaic.cli.terminal.console import print_json, print_table
from moesaic.cli.terminal.options import JsonOption, SchedulerOption, UrlOption
from moesaic.cli.terminal.outcome import CommandError, Exit

if TYPE_CHECKING:
    from moesaic.cli.machine.state import SuiteState

ADDRESSES = ("admin_address", "metrics_address", "data_address")  # gRPC, Prometheus, tensors
ROLES = ("gateway", "scheduler", "edge-agent", "attention", "expert")


def status(
    scheduler: SchedulerOption = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the services of a suite; exit status 3 unless requests are taken."""
    import asyncio

    from moesaic.cli.clients.gateway import gateway_url
    from moesaic.cli.machine.state import StateFile

    suite = StateFile().running()
    if suite is None and not (scheduler or url):
        raise CommandError(
            "nothing runs in this directory; start a suite with 'moesaic up', "
            "or name one with --url and --scheduler",
            Exit.UNHEALTHY,
        )
    facts = asyncio.run(_facts(gateway_url(url), suite, scheduler))
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    if not facts["ready"]:
        raise typer.Exit(Exit.UNHEALTHY)


async def _facts(url: str, suite: "SuiteState | None", scheduler: str) -> dict[str, Any]:
    import httpx

    from moesaic.cli.clients.fleet import gather_facts, service_facts
    from moesaic.cli.clients.gateway import client_settings
    from moesaic.cli.clients.readiness import readiness_and_unused

    processes = suite.processes if suite else []
    known = {p.name: (p.role, p.admin_address) for p in processes if p.admin_address}
    if not scheduler:
        scheduler = next((p.admin_address for p in processes if p.role == "scheduler"), "")
    services, placement = await gather_facts(known, scheduler or None)
    if scheduler and scheduler not in {service["admin_address"] for service in services}:
        # Shown as it was named.
        services.append(await service_facts("scheduler", "", scheduler))
    shown = {p.name: p for p in processes}
    for service in services:
        process = shown.get(service["id"])
        service["restarts"] = process.restarts if process else None
        # A service that does not answer gives none.
        for name in ADDRESSES:
            service[name] = service.get(name) or getattr(process, name, "")
        service.setdefault("load", {})
    async with httpx.AsyncClient(**client_settings(url)) as client:
        missing, unused = await readiness_and_unused(client)
    return {
        "url": url,
        "model": next((s["model"] for s in sorted(services, key=_order) if s.get("model")), None),
        "ready": missing == [],
        "waiting_for": ["the gateway does not answer"] if missing is None else missing,
        "other_protocol": unused,
        "services": sorted(services, key=_order),
        "placement": placement,
    }


def _order(service: dict[str, Any]) -> tuple[int, str]:
    role = service["role"]
    return (ROLES.index(role) if role in ROLES else len(ROLES), service["id"])


def _print(facts: dict[str, Any]) -> None:
    services, placement = facts["services"], facts["placement"]
    waits = "; ".join(facts["waiting_for"])
    serves = f", serves {facts['model']}" if facts["model"] else ""
    print(f"{facts['url']} is {'ready' if facts['ready'] else f'not ready: {waits}'}{serves}")
    for why in facts["other_protocol"]:
        print(why)
    host = common_host(service[name] for service in services for name in ADDRESSES)
    columns = ("id", "state", "pid", "gRPC", "metrics", "tensors", "epoch")
    print_table(
        columns,
        [
            (
                service["id"] or service["role"],
                service["state"],
                service.get("pid", ""),
                *(str(service[name]).removeprefix(host) for name in ADDRESSES),
                service.get("epoch") or "",
            )
            for service in services
        ],
    )
    if host:
        print(f"addresses: {host}PORT")
    for line in numbers_lines(services):
        print(line)
    for service in services:
        if service["waiting_for"]:
            print(f"{service['id']} waits for: {'; '.join(service['waiting_for'])}")
        if service["restarts"]:
            print(f"{service['id']} was started again, restarts: {service['restarts']}")
    loads = [(service["id"], *load_row(service["load"])) for service in services if service["load"]]
    if loads:
        print_table(("id", "running", "waiting", "KV blocks", "now"), loads)
    _print_sites({service["id"]: service["edge"] for service in services if "edge" in service})
    if placement:
        print(f"placement of epoch {placement['epoch']}, {len(placement['layers'])} MoE layers")
        rows = [(worker["id"], experts_text(worker["experts"])) for worker in placement["workers"]]
        print_table(("worker", "experts"), rows)
        if decided := placement.get("decided_by"):
            print(_decided_text(decided))


def _print_sites(edges: dict[str, dict[str, Any]]) -> None:
    if not edges:
        return
    from moesaic.cli.clients.sites import LINK_COLUMNS, SITE_COLUMNS, link_rows, site_row

    print_table(SITE_COLUMNS, map(site_row, edges.values()))
    if links := [*link_rows(edges)]:
        print_table(LINK_COLUMNS, links)


def numbers_lines(services: Iterable[dict[str, Any]]) -> list[str]:
    """Describe the numbers in which workers hold their weights: one line if all do alike."""
    workers: dict[str, list[str]] = {}
    for service in services:
        if dtype := service.get("dtype"):
            numbers = [name for name in (dtype, service["quantization"]) if name != "none"]
            workers.setdefault(" ".join(numbers), []).append(service["id"])
    if len(workers) == 1:
        return [f"weights in {numbers}" for numbers in workers]
    return [f"weights in {numbers}: {', '.join(ids)}" for numbers, ids in workers.items()]


def common_host(addresses: Iterable[str]) -> str:
    """Find the common beginning of all ``host:port``, colon included; empty if there are several hosts."""
    hosts = {address.rpartition(":")[0] for address in addresses if address}
    return f"{hosts.pop()}:" if len(hosts) == 1 else ""


def load_row(load: dict[str, Any]) -> tuple[object, ...]:
    """Make a row of running and waiting requests, KV blocks in use, and the rate; empty where unknown."""
    blocks, used = load.get("kv_blocks"), load.get("kv_blocks_used", 0)
    kv = f"{used} of {blocks} ({used / blocks:.0%})" if blocks else ""
    rates = [(load.get(f"{what}_per_s"), what) for what in ("tokens", "rows")]
    rate = next((f"{rate:g} {what}/s" for rate, what in rates if rate is not None), "")
    return load.get("running", ""), load.get("waiting", ""), kv, rate


def _decided_text(decided: dict[str, Any]) -> str:
    last = decided["last_decision"]
    text = f"policy {decided['policy']}" + f", {decided['num_pins']} pins" * bool(
        decided["num_pins"]
    )
    if last is None:
        return text
    done = "kept"
    if last["adopted"]:
        uncommitted = "failed" if last["failure"] else "under way"
        done = f"epoch {last['epoch']}" if last["epoch"] else uncommitted
    return f"{text}; last decision, by {last['cause']}: {done} ({last['reason']})"


def experts_text(by_layer: Sequence[Sequence[int]]) -> str:
    """Describe a worker's experts: by ranges if all layers are alike, else by counts per layer."""
    if all(experts == by_layer[0] for experts in by_layer):
        return f"{ranges(by_layer[0])} in every layer" if by_layer and by_layer[0] else "none"
    counts = [len(experts) for experts in by_layer]
    few, many = min(counts), max(counts)
    return f"{few if few == many else f'{few} to {many}'} a layer, different ones"


def ranges(numbers: Sequence[int]) -> str:
    """Abbreviate ascending numbers: ``0-3, 7, 9-10``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
