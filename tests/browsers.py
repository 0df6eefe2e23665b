"""A real browser for tests of pages: Chromium, which the machine has to have."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.waiting import HANG_S

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@asynccontextmanager
async def browser() -> AsyncIterator[Any]:
    """Open a browser for the length of the block."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(_FLAGS))
        try:
            yield opened
        finally:
            await opened.close()


class Page:
    """A page, and the errors that its scripts and its policy have raised."""

    def __init__(self, tab: Any) -> None:
        self.tab, self.errors = tab, list[str]()
        tab.set_default_timeout(1000 * HANG_S)
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", self._note)

    @classmethod
    async def of(cls, opened: Any, *, dark: bool = False) -> "Page":
        """Open an empty page."""
        colors, size = "dark" if dark else "light", {"width": 1300, "height": 900}
        context = await opened.new_context(color_scheme=colors, viewport=size)
        return cls(await context.new_page())

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    async def violations(self) -> list[Any]:
        """Find what is wrong for people with a keyboard or a screen reader, by axe-core."""
        from axe_playwright_python.async_playwright import Axe

        found = (await Axe().run(self.tab)).response["violations"]
        return [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found]
