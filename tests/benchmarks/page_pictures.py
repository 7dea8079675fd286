"""Takes the pictures of the page for docs: `make pictures`, or this file with arguments `WAV CHECKPOINT`.

A server of its own, a headless Chromium whose microphone is WAV, two sizes, light and dark.
"""

import asyncio
import io
import shutil
import sys
from pathlib import Path

from local_server import local_server
from PIL import Image
from playwright.async_api import Browser, ViewportSize, async_playwright, expect

ROOT = Path(__file__).parents[2]
SPEECH = ROOT / "tests" / "fixtures" / "weather.wav"
LISTENED_S = 7
DESKTOP, PHONE = ViewportSize(width=1000, height=660), ViewportSize(width=390, height=780)
PICTURES = [
    ("page.png", DESKTOP, "light", 1),
    ("page-dark.png", DESKTOP, "dark", 1),
    ("page-phone.png", PHONE, "light", 1.5),
]


async def take(browser: Browser, address: str, name: str, size: ViewportSize, scheme: str, scale: float) -> None:
    """One picture, while the page listens."""
    page = await browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=scale)  # type: ignore[arg-type]
    await page.goto(address)
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("Listening.", timeout=60_000)
    await page.wait_for_timeout(1000 * LISTENED_S)
    picture = Image.open(io.BytesIO(await page.screenshot()))
    picture.quantize(96, dither=Image.Dither.NONE).save(ROOT / "docs" / name, optimize=True)
    await page.close()


async def main(speech: Path, *checkpoint: str) -> None:
    """All pictures."""
    microphone = ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    microphone += [f"--use-file-for-fake-audio-capture={speech}", "--no-sandbox"]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with local_server(*(["--model", *checkpoint] if checkpoint else [])) as (_, host):
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=microphone)
            for picture in PICTURES:
                await take(browser, f"http://{host}/", *picture)
            await browser.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SPEECH, *sys.argv[2:3]))
