"""Pages of settings, metrics, request fields, checkpoint fields, schema keywords and GPU results, made from the code.

``make reference`` runs it; a test holds that the committed pages are what it makes.
"""

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from docs.inside import paths
from docs.reference.checkpoint_fields import fields_page
from docs.reference.gpu_results import gpu_results_page
from docs.reference.request_fields import request_fields_page
from docs.reference.schema_keywords import schema_keywords_page
from moesaic.settings import ServiceSettings
from moesaic.usage.flags import Flag, flags_of
from moesaic.usage.names import ROLES, SETTINGS, settings_model

HERE = Path(__file__).parent
MADE = "Made by `make reference` from the services themselves; do not edit."

# A process a service, so that a metric is listed where it is counted. Each is a fork of one that has imported what
# takes longest and counts nothing.
METRICS = """
import os, sys
from importlib import import_module
import fastapi, grpc.aio, numpy, pydantic_settings, redis.asyncio, torch
from prometheus_client import REGISTRY
for role in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        import_module(f"moesaic.services.{role.replace('-', '_')}.main")
        for collector in list(REGISTRY._collector_to_names):
            for metric in collector.collect():
                # The client keeps the names of labels to itself.
                labels = getattr(collector, "_labelnames", getattr(metric, "_labelnames", ()))
                if metric.name.startswith("moesaic_"):
                    text = metric.documentation.replace(chr(10), " ")
                    print(role, metric.name, metric.type, ", ".join(labels), text, sep="\\t")
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"the metrics of {role} cannot be read")
"""


def settings_page() -> str:
    """Every setting of every service, in tables by group; those of all services once."""
    lines = ["# Settings", "", MADE, ""]
    lines += [
        "A flag comes before the variable, and the variable before a file of the variable's name",
        "in lower case in `/run/secrets`. `moesaic up` takes them as flags as well, but addresses and",
        "threads, which it deals out.",
        "A service shows its own with `moesaic serve ROLE --help`.",
        "",
    ]
    common = ServiceSettings.model_fields
    shared = [flag for flag in _flags(settings_model("scheduler")) if flag.field in common]
    lines += ["## Every service", "", *_tables(shared)]
    for role in ROLES:
        own = [flag for flag in _flags(settings_model(role)) if flag.field not in common]
        if role == "edge-agent":  # it has all settings of an attention worker
            inherited = {flag.field for flag in _flags(settings_model("attention"))}
            own = [flag for flag in own if flag.field not in inherited]
            lines += ["## Edge agent", "", "All settings of an attention worker, and these.", ""]
            lines += _tables(own)
            continue
        lines += [f"## {role.capitalize()}", "", *_tables(own)]
    return "\n".join(lines).rstrip() + "\n"


class MetricRow(NamedTuple):
    """A metric, as the services tell it; ``roles`` count it."""

    name: str  # of a counter with its _total
    kind: str
    labels: list[str]
    roles: list[str]
    meaning: str


def metrics_of_services() -> list[MetricRow]:
    """Every metric of every service, by name."""
    rows: dict[str, MetricRow] = {}
    command = [sys.executable, "-c", METRICS, *ROLES]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    for line in listed.stdout.splitlines():
        role, name, kind, labels, text = line.split("\t")
        name += "_total" if kind == "counter" else ""
        names = labels.split(", ") if labels else []
        rows.setdefault(name, MetricRow(name, kind, names, [], text)).roles.append(role)
    return sorted(rows.values())


def metrics_page() -> str:
    """Every metric, by name, with its labels and the services that count it."""
    lines = ["# Metrics", "", MADE, ""]
    lines += ["| metric | kind | labels | of | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{row.name}` | {row.kind} | {', '.join(row.labels)} | {', '.join(row.roles)} | "
        f"{_cell(row.meaning)} |"
        for row in metrics_of_services()
    ]
    return "\n".join(lines) + "\n"


def _flags(cls: type[ServiceSettings]) -> list[Flag]:
    return flags_of(cls, cls.groups)


def _tables(flags: list[Flag]) -> list[str]:
    lines: list[str] = []
    groups = dict.fromkeys(flag.group for flag in flags)
    for group in groups:
        lines += [
            f"### {group}",
            "",
            "| flag | variable | value | default | meaning |",
            "|---|---|---|---|---|",
        ]
        for flag in flags:
            if flag.group == group:
                value = f"{flag.form.strip('<>')} {flag.bounds}".strip()
                lines.append(
                    f"| `{flag.name}` | `MOESAIC_{flag.field.upper()}` | {_cell(value)} | "
                    f"{_cell('on' if flag.on else flag.default)} | {_cell(flag.description)} |"
                )
        lines.append("")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def names_of_settings() -> str:
    """Variables of all settings of all services, one a line."""
    fields = {name for role in ROLES for name in settings_model(role).model_fields}
    return "".join(f"MOESAIC_{name.upper()}\n" for name in sorted(fields))


def main() -> None:
    """Write all pages beside this file, and the names of settings that every program knows."""
    SETTINGS.write_text(names_of_settings(), encoding="utf-8")
    (HERE / "settings.md").write_text(settings_page(), encoding="utf-8")
    (HERE / "metrics.md").write_text(metrics_page(), encoding="utf-8")
    (HERE / "checkpoint-fields.md").write_text(fields_page(), encoding="utf-8")
    (HERE / "request-fields.md").write_text(request_fields_page(MADE), encoding="utf-8")
    (HERE / "schema-keywords.md").write_text(schema_keywords_page(MADE), encoding="utf-8")
    (HERE / "gpu-results.md").write_text(gpu_results_page(MADE), encoding="utf-8")
    paths.PAGE.write_text(paths.page_of(paths.read_record()), encoding="utf-8")


if __name__ == "__main__":
    main()
