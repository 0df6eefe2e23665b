"""The documentation: links lead somewhere, and the pages of settings and metrics are true."""

import re
from pathlib import Path

import pytest

from docs.reference import checkpoint_fields, generate
from docs.reference.gpu_results import gpu_results_page
from docs.reference.schema_keywords import schema_keywords_page
from moesaic.services.gateway.app import body_types
from moesaic.services.gateway.fields.known import REFUSED
from moesaic.usage.names import SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Heads of a page as links spell them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_pages_and_heads_that_there_are(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        to = page.parent / path if path else page
        assert to.exists(), target
        assert not anchor or to.suffix != ".md" or anchor in anchors(to), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit_a_screen(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    long = [line for line in prose.splitlines() if len(line) > 160 and not line.startswith("|")]
    assert not long


def test_every_setting_is_on_the_page_of_settings() -> None:
    assert (generate.HERE / "settings.md").read_text(encoding="utf-8") == generate.settings_page()


def test_every_setting_is_in_the_list_of_names() -> None:
    assert SETTINGS.read_text(encoding="utf-8") == generate.names_of_settings()


def test_every_metric_is_on_the_page_of_metrics() -> None:
    assert (generate.HERE / "metrics.md").read_text(encoding="utf-8") == generate.metrics_page()


def test_the_page_lists_every_request_field() -> None:
    page = (generate.HERE / "request-fields.md").read_text(encoding="utf-8")

    assert page == generate.request_fields_page(generate.MADE)
    told = [kind.model_fields.keys() for _, kind in body_types()]
    for name in (*REFUSED, *(name for names in told for name in names)):
        assert f"| `{name}` |" in page or f"| `{name.rstrip('_')}` |" in page


def test_the_page_lists_every_checkpoint_field() -> None:
    page = (generate.HERE / "checkpoint-fields.md").read_text(encoding="utf-8")
    assert page == checkpoint_fields.fields_page()


def test_the_page_lists_every_schema_keyword() -> None:
    page = (generate.HERE / "schema-keywords.md").read_text(encoding="utf-8")
    assert page == schema_keywords_page(generate.MADE)


def test_the_page_names_the_kernels_that_have_changed_since_they_were_measured() -> None:
    page = (generate.HERE / "gpu-results.md").read_text(encoding="utf-8")
    assert page == gpu_results_page(generate.MADE)
