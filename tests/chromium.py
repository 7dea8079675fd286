"""The page in headless Chromium, a wav file as its microphone."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, ViewportSize, async_playwright, expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FIXTURES = Path(__file__).parent / "fixtures"
SIZES = {"desktop": ViewportSize(width=1100, height=800), "phone": ViewportSize(width=360, height=700)}
SOME_TEXT = re.compile(r"\w{3}")
SLOW_MS = 60_000  # a guard against hanging, no measure
NEEDED = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium binary to drive the page")
expect.set_options(timeout=SLOW_MS)
Opener = Callable[..., Awaitable[Page]]


async def holds(page: Page, expression: str, argument: Any = None) -> None:
    """Wait until it does. What Playwright has for that evaluates text in the page, which the page's policy forbids."""
    for _ in range(SLOW_MS // 100):
        if await page.evaluate(expression, argument):
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(expression)


@asynccontextmanager
async def pages(usual: Any) -> AsyncIterator[Opener]:
    """Opens the page, of the server `usual` or another; nothing may go wrong on it, nor be asked of another host."""
    arguments = [
        "--no-sandbox",
        "--disable-background-networking",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={FIXTURES / 'weather.wav'}",
    ]
    problems: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)

        async def opened(size: str = "desktop", server: Any = usual, script: str = "", **options: Any) -> Page:
            page = await browser.new_page(viewport=SIZES[size], **options)
            await page.add_init_script(script)
            page.set_default_timeout(SLOW_MS)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
            page.on("request", lambda r: None if r.url.startswith(server.http) else problems.append(r.url))
            await page.goto(server.http)
            return page

        opened.problems = problems  # type: ignore[attr-defined]
        yield opened
        await browser.close()
    assert not [p for p in problems if not p.startswith(("blob:", "data:"))]


async def hear_file(page: Page, name: str | Path = "weather.wav") -> None:
    await page.set_input_files("#file", FIXTURES / name)
    await expect(page.locator("#status")).to_contain_text("s heard")
