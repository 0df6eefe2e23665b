"""Hooks of mkdocs: pages outside docs, the order of pages, links to sources, and the list of versions.

Everything in ``docs`` reads well as plain Markdown, and no page is written twice. So the site follows the folders and
``docs/README.md``, and gets pages of the root, such as the changes, from where they are.
"""

import json
import os.path
import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
INDEX, GLOSSARY = "README.md", "glossary.md"
# Pages of the repository's root, as pages of the site.
START = "start.md"
OF_ROOT = {
    "README.md": START,
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
PROJECT = {"Changes": "CHANGELOG.md", "Contributing": "CONTRIBUTING.md", "Security": "SECURITY.md"}
# Where a forge shows a file, below the address of the repository.
SHOWN, EDITED = "blob/main/", "edit/main/docs/"

FENCE = re.compile(r"^( *```.*?^ *```)", re.MULTILINE | re.DOTALL)
# Code comes first, so that no link is found in it.
LINK = re.compile(r"`[^`\n]+`|(!?)\[((?:`[^`]*`|[^\]`])*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give the site the version, and the address of the repository if the project has one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.site_dir = os.path.join(config.site_dir, project["version"])
    if address := project.get("urls", {}).get("Repository"):
        config.repo_url, config.edit_uri = address.rstrip("/"), EDITED
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and put all pages in order."""
    for name, page in OF_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    index = (ROOT / "docs" / INDEX).read_text(encoding="utf-8")
    config.nav = navigation(index, [file.src_uri for file in files.documentation_pages()])
    return files


def navigation(index: str, pages: Iterable[str]) -> list[Any]:
    """Order pages as the index has them: a section for each of its heads, with all pages of that folder.

    Args:
        index: text of ``docs/README.md``.
        pages: all pages, relative to ``docs``. Pages that the index does not name follow the others of their folder.

    Returns:
        A value for ``nav`` of mkdocs.
    """
    there = sorted(pages)
    nav: list[Any] = [{"Documentation": INDEX}, {"First steps": START}]
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        named = {path: name for _, name, path in LINK.findall(section) if path in there}
        folder = PurePosixPath(next(iter(named))).parts[0]
        entries: list[Any] = []
        inner: dict[PurePosixPath, list[Any]] = {PurePosixPath(folder): entries}
        others = (page for page in there if page.startswith(f"{folder}/") and page not in named)
        for page in [*named, *others]:
            parent = PurePosixPath(page).parent
            if parent not in inner:
                inner[parent] = []
                entries.append({parent.name.capitalize(): inner[parent]})
            inner[parent].append({named[page]: page} if page in named else page)
        nav.append({section.splitlines()[0]: entries})
    nav.append({"Glossary": GLOSSARY})
    nav.append({"Project": [{name: OF_ROOT[page]} for name, page in PROJECT.items()]})
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets are in the site, and links to sources to the repository."""
    of_root = {page: name for name, page in OF_ROOT.items()}
    site = {of_root.get(file.src_uri, f"docs/{file.src_uri}"): file.src_uri for file in files}
    here = page.file.src_uri
    folder = os.path.dirname(of_root.get(here, f"docs/{here}"))

    def led(link: re.Match[str]) -> str:
        shown, text, target = link.groups()
        if not target or "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        path, hash_, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(folder, path))
        if path in site:
            to = os.path.relpath(site[path], os.path.dirname(here) or ".")
            return f"{shown}[{text}]({to}{hash_}{anchor})"
        # A link that leads nowhere stays, and fails the build.
        if not (ROOT / path).exists():
            return link[0]
        return f"[{text}]({config.repo_url}/{SHOWN}{path})" if config.repo_url else text

    # Every second piece is a block of code.
    pieces = FENCE.split(markdown)
    return "".join(piece if n % 2 else LINK.sub(led, piece) for n, piece in enumerate(pieces))


def on_post_build(config: MkDocsConfig) -> None:
    """Write the list of versions, and a first page that leads to the one that was built."""
    built = Path(config.site_dir)
    tags = subprocess.run(
        ["git", "tag", "--list", "v*", "--sort=-version:refname"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    ).stdout.split()
    versions = dict.fromkeys([built.name, *(tag.removeprefix("v") for tag in tags)])
    listed = [{"version": name, "title": name, "aliases": []} for name in versions]
    (built.parent / "versions.json").write_text(json.dumps(listed), encoding="utf-8")
    (built.parent / "index.html").write_text(
        f'<!doctype html><title>Moesaic</title><meta http-equiv="refresh" content="0; url={built.name}/index.html">\n',
        encoding="utf-8",
    )
