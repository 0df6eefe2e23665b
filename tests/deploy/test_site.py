"""The site of the documentation: every page, nothing from elsewhere, and links that lead somewhere without it."""

import json
import os
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.deploy.test_docs import PAGES, ROOT

pytestmark = pytest.mark.skipif(not find_spec("material"), reason="needs mkdocs-material")

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
DRAWINGS = sorted((ROOT / "docs" / "inside" / "drawings").glob("*.svg"))
# Elements that load what they name; a link of a person's choice does not.
LOADED = {"src", "srcset", "poster", "data"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does, which fails for any broken link."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--site-dir", str(built)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return built


class Loads(HTMLParser):
    """The addresses that a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses = list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        wanted = LOADED | ({"href"} if tag == "link" else set())
        self.addresses += [value for name, value in attrs if name in wanted and value]


def test_every_page_is_in_the_site_and_no_source_is(site: Path) -> None:
    built = [file for file in (site / VERSION).rglob("*.html") if file.name != "404.html"]
    assert len(built) == len([page for page in PAGES if page.name != "SAMPLES.md"])
    ours = {file.name for suffix in ("*.py", "*.json") for file in (ROOT / "docs").rglob(suffix)}
    assert not ours & {file.name for file in site.rglob("*")}


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        for address in loads.addresses:
            if not address.startswith("data:"):
                assert ":" not in address, address
                assert not address.startswith("/") or page.name == "404.html", address
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text)


def test_no_page_asks_to_be_edited_while_no_repository_is_named(site: Path) -> None:
    page = (site / VERSION / "use" / "install.html").read_text(encoding="utf-8")
    assert "Edit this page" not in page


def test_the_search_works_without_a_server(site: Path) -> None:
    index = (site / VERSION / "search" / "search_index.js").read_text(encoding="utf-8")
    found = json.loads(index.removeprefix("var __index = "))["docs"]
    assert any(entry["location"].startswith("operate/brownout.html") for entry in found)


def test_the_first_page_and_the_list_of_versions_lead_to_the_one_that_was_built(site: Path) -> None:
    listed = json.loads((site / "versions.json").read_text(encoding="utf-8"))
    assert listed[0]["version"] == VERSION
    assert f"{VERSION}/index.html" in (site / "index.html").read_text(encoding="utf-8")


def test_pages_that_the_index_does_not_name_follow_in_their_folder() -> None:
    from docs.site.hooks import navigation

    index = "## Use\n| [Install](use/install.md) | [Chat](use/clients/chat.md) |\n"
    pages = ["use/new.md", "use/install.md", "use/clients/curl.md", "use/clients/chat.md"]
    sections = dict(item for entry in navigation(index, pages) for item in entry.items())
    clients = {"Clients": [{"Chat": "use/clients/chat.md"}, "use/clients/curl.md"]}
    assert sections["Use"] == [{"Install": "use/install.md"}, clients, "use/new.md"]


@pytest.mark.parametrize("address", [None, "https://forge.example/moesaic"])
def test_links_lead_into_the_site_or_to_the_repository_if_that_is_known(
    address: str | None,
) -> None:
    changed = changed_text(
        "[a](../README.md#use) [b](../../CHANGELOG.md) [`c`](../../deploy/Dockerfile) `[d](../x)`\n"
        "[e](../../absent.py)\n```\n[f](../../deploy/Dockerfile)\n```\n",
        address,
    )
    shown = f"[`c`]({address}/blob/main/deploy/Dockerfile)" if address else "`c`"
    assert changed == (
        f"[a](../README.md#use) [b](../project/changes.md) {shown} `[d](../x)`\n"
        "[e](../../absent.py)\n```\n[f](../../deploy/Dockerfile)\n```\n"
    )


def changed_text(text: str, address: str | None) -> str:
    """A text of the page ``use/install.md`` as the site has it."""
    from mkdocs.config import load_config
    from mkdocs.structure.files import File, Files
    from mkdocs.structure.pages import Page

    from docs.site.hooks import OF_ROOT, on_page_markdown

    config: Any = load_config(str(ROOT / "mkdocs.yml"))
    config.repo_url = address
    names = ["README.md", "use/install.md", *OF_ROOT.values()]
    files = [File(name, config.docs_dir, config.site_dir, False) for name in names]
    return on_page_markdown(text, Page(None, files[1], config), config, Files(files))


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda drawing: drawing.stem)
def test_a_drawing_tells_what_it_shows_and_follows_light_and_dark(drawing: Path) -> None:
    text = drawing.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    named = {os.path.basename(child.tag).partition("}")[2]: child.text for child in root}
    assert named["title"]
    assert named["desc"]
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\((?!#)|<script", text)
