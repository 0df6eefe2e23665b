"""Dashboards, alerts and what scrapes: every name in them exists, and every alert has its section of the runbooks."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from docs.reference.generate import HERE as REFERENCE
from docs.reference.generate import MetricRow
from moesaic.services.gateway.vllm_metrics import COUNTERS, HISTOGRAMS
from tests.deploy.test_docs import anchors
from tests.deploy.test_files import services
from tests.suites import ROOT

HERE = ROOT / "deploy/observability"
DASHBOARDS = sorted((HERE / "dashboards").glob("*.json"))
RULES = sorted((HERE / "rules").glob("*.yml"))
# Prometheus adds them to what it scrapes.
OF_SCRAPES = {"job", "instance"}
FUNCTIONS = {
    *(
        "absent",
        "and",
        "avg_over_time",
        "by",
        "count",
        "deriv",
        "group",
        "group_left",
        "histogram_quantile",
    ),
    *("increase", "max", "max_over_time", "min", "on", "or", "rate", "sum", "time", "topk"),
    "vector",
}
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not on the PATH: it is in Debian's package prometheus"
)


def promtool(*arguments: str, text: str = "") -> None:
    """Run it, and fail with what it says."""
    command = [str(PROMTOOL), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def rules() -> Iterator[dict[str, Any]]:
    for file in RULES:
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def targets() -> Iterator[tuple[str, dict[str, str]]]:
    """Title of a panel, and what it asks."""
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}: {panel['title']}", target


def queries() -> Iterator[tuple[str, str]]:
    """Where a query stands, and the query."""
    yield from ((title, target["expr"]) for title, target in targets())
    yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())


def metrics_of_page() -> list[MetricRow]:
    """Metrics as the generated page lists them, which another test compares with the services."""
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    found = []
    for line in page.splitlines():
        if line.startswith("| `"):
            name, kind, labels, roles, meaning = (
                cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]
            )
            names = labels.split(", ") if labels else []
            found.append(MetricRow(name.strip("`"), kind, names, roles.split(", "), meaning))
    return found


@cache
def known() -> dict[str, set[str]]:
    """Labels of every series there is, by its name."""
    found: dict[str, set[str]] = {"up": set()}
    for row in metrics_of_page():
        if row.kind == "histogram":
            found |= {f"{row.name}_{part}": set(row.labels) for part in ("sum", "count")}
            found[f"{row.name}_bucket"] = {*row.labels, "le"}
        else:
            found[row.name] = set(row.labels)
    of_vllm = {"model_name", "engine"}
    found |= {name: of_vllm for name in (*HISTOGRAMS, *(f"{name}_total" for name in COUNTERS))}
    found["vllm:num_requests_running"] = found["vllm:num_requests_waiting"] = of_vllm
    return found | {rule["record"]: {"job"} for rule in rules() if "record" in rule}


def names_of(query: str) -> set[str]:
    """Names of series in a query: what remains without selectors, groupings, ranges and numbers."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", query)
    bare = re.sub(r"\b(by|on|group_left)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", re.sub(r"\b\d[\w.]*", " ", bare))) - FUNCTIONS


def labels_of(query: str) -> set[str]:
    """Labels that a query selects or groups by."""
    selected = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", query)
    grouped = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", query)
    return {*selected, *(label.strip() for group in grouped for label in group.split(","))} - {""}


def test_names_and_labels_are_found_in_queries() -> None:
    query = '1 - sum by (le, a) (rate(x:y_total{b="c", d=~"e"}[5m])) > 14 * up'

    assert names_of(query) == {"x:y_total", "up"}
    assert labels_of(query) == {"le", "a", "b", "d"}


@pytest.mark.parametrize(("where", "query"), list(queries()))
def test_every_series_and_label_of_a_query_exists(where: str, query: str) -> None:
    names = names_of(query)

    assert names
    assert names - known().keys() == set(), where
    having = set().union(*(known()[name] for name in names))
    assert labels_of(query) - having - OF_SCRAPES == set(), where


@pytest.mark.parametrize(("where", "target"), list(targets()))
def test_a_legend_names_labels_that_the_query_keeps(where: str, target: dict[str, str]) -> None:
    shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    grouped = re.findall(r"\b(?:sum|max|min|count|topk) by \(([^)]*)\)", target["expr"])
    kept = {label.strip() for group in grouped for label in group.split(",")}
    if not re.search(r"\b(sum|max|min|count)\b", target["expr"]):
        kept = OF_SCRAPES.union(*(known()[name] for name in names_of(target["expr"])))

    assert shown <= kept, where


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: str(alert["alert"]))
def test_every_alert_has_a_section_of_the_runbooks_that_says_what_to_do(
    alert: dict[str, Any],
) -> None:
    page, _, anchor = alert["annotations"]["runbook_url"].partition("#")

    assert anchor in anchors(ROOT / page)
    section = re.split(r"(?m)^## ", (ROOT / page).read_text(encoding="utf-8"))
    [mine] = [each for each in section if each.splitlines()[0].lower().replace(" ", "-") == anchor]
    for part in (alert["alert"], "**Symptom.**", "**Meaning.**", "**Look.**", "**Do.**", "```"):
        assert part in mine
    assert alert["labels"]["severity"] in ("page", "ticket")


def test_every_alert_is_raised_in_a_test_and_stays_silent_in_one() -> None:
    file = ROOT / "tests/deploy/rules.test.yml"
    tests = yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    raised = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent = {check["alertname"] for check in checks if not check.get("exp_alerts")}

    assert raised == silent == {alert["alert"] for alert in alerts()}


def test_dashboards_are_found_by_grafana_and_read_the_chosen_source() -> None:
    boards = [json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARDS]

    assert len({board["uid"] for board in boards}) == len(boards) == 4
    for board in boards:
        for panel in board["panels"]:
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert all(source["uid"] == "${datasource}" for source in sources)


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: str(file.stem))
def test_a_dashboard_has_nothing_that_the_schema_of_grafana_does_not_know(file: Path) -> None:
    board = json.loads(file.read_text(encoding="utf-8"))

    register_default_plugins()

    assert through_the_schema(board) == board
    wrong = deepcopy(board)
    wrong["panels"][0]["targets"][0]["legend"] = wrong["panels"][0]["fieldConfig"]["units"] = "x"
    assert through_the_schema(wrong) == board


def through_the_schema(board: dict[str, Any]) -> dict[str, Any]:
    """Read a dashboard by Grafana's own classes, which forget what they do not know, and write it again."""
    read = Dashboard.from_json(board)
    written = json.loads(JSONEncoder(sort_keys=True).encode(read))
    return dict(_of_keys(written, board))


def _of_keys(written: Any, asked: Any) -> Any:
    """Leave out what the classes add by themselves."""
    if isinstance(asked, dict) and isinstance(written, dict):
        return {key: _of_keys(written[key], asked[key]) for key in asked if key in written}
    if isinstance(asked, list) and isinstance(written, list):
        return [_of_keys(*pair) for pair in zip(written, asked, strict=True)]
    return written


def test_prometheus_scrapes_the_metrics_port_of_every_role_by_its_name_in_the_network() -> None:
    config = yaml.safe_load((HERE / "prometheus.yml").read_text(encoding="utf-8"))
    found = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    roles = services("compose.yaml")

    assert {*found} == {name for name, role in roles.items() if "build" in role} - {
        "attention-local"
    }
    for name, where in found.items():
        networks = roles[name]["networks"]
        assert where["names"] == networks["control"]["aliases"]
        assert str(where["port"]) == roles[name]["environment"]["MOESAIC_METRICS_PORT"]


def test_mounted_files_of_prometheus_and_grafana_are_here() -> None:
    for name in ("prometheus", "grafana"):
        for volume in services("compose.yaml")[name]["volumes"]:
            if isinstance(volume, dict):
                assert (ROOT / volume["source"]).is_dir()
    provider = yaml.safe_load((HERE / "grafana/dashboards/moesaic.yml").read_text())
    path = provider["providers"][0]["options"]["path"]
    assert (HERE / Path(path).relative_to("/etc/moesaic")).is_dir()


@needs_promtool
def test_promtool_finds_no_fault_in_rules_and_configuration_and_the_tests_of_rules_pass(
    tmp_path: Path,
) -> None:
    promtool("check", "config", str(HERE / "prometheus.yml"))
    promtool("test", "rules", str(ROOT / "tests/deploy/rules.test.yml"))
    asked = [{"record": "a:b", "expr": target["expr"]} for _, target in targets()]
    for rule, number in zip(asked, range(len(asked)), strict=True):
        rule["record"] += f":{number}"
    panels = tmp_path / "panels.yml"
    panels.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": asked}]}))
    promtool("check", "rules", str(panels))


@needs_promtool
def test_promtool_finds_no_fault_in_the_names_and_texts_of_metrics() -> None:
    promtool("check", "metrics", text="".join(map(_exposed, metrics_of_page())))


def _exposed(row: MetricRow) -> str:
    """A metric as a scrape shows it; Prometheus leaves out families without a sample."""
    head = f"# HELP {row.name} {row.meaning}\n# TYPE {row.name} {row.kind}\n"
    if row.kind != "histogram":
        return head + "".join(row.name + _labels(row.labels) + " 1\n")
    buckets = f"{row.name}_bucket{_labels([*row.labels, 'le'], '+Inf')} 1\n"
    return (
        head
        + buckets
        + "".join(f"{row.name}_{p}{_labels(row.labels)} 1\n" for p in ("sum", "count"))
    )


def _labels(names: list[str], value: str = "x") -> str:
    return "{" + ",".join(f'{name}="{value}"' for name in names) + "}"
