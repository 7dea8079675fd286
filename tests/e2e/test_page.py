"""The page in headless Chromium, a wav file as its microphone: text appears while it plays."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright, expect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FIXTURES = Path(__file__).parents[1] / "fixtures"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium binary to drive the page")


async def on_page(server: Any, check: Any) -> None:
    arguments = [
        "--no-sandbox",
        "--disable-background-networking",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={FIXTURES / 'weather.wav'}",
    ]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = await browser.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        await page.goto(server.http)
        await check(page)
        await browser.close()
    assert not problems


async def test_microphone(lively_server: Any):
    some_text = re.compile(r"\w{3}")

    async def check(page: Page) -> None:
        await page.click("#microphone")
        await expect(page.locator("#status")).to_have_text("Listening.")
        await expect(page.locator("#text")).to_have_text(some_text, timeout=20_000)
        await page.click("#microphone")
        await expect(page.locator("#status")).to_contain_text("Finished", timeout=20_000)
        await expect(page.locator("#text")).to_have_text(some_text)

    await on_page(lively_server, check)


async def test_file(lively_server: Any):
    async def check(page: Page) -> None:
        await page.set_input_files("#file", FIXTURES / "weather.mp3")
        await expect(page.locator("#status")).to_contain_text("s heard", timeout=20_000)
        assert (await page.inner_text("#text")).strip()

    await on_page(lively_server, check)
