"""The page in headless Firefox: files, and a microphone that hears speech."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests import firefox

pytestmark = [
    pytest.mark.skipif(not firefox.BINARY or not firefox.PULSEAUDIO, reason="needs Firefox and PulseAudio"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory, speech: Any) -> AsyncIterator[firefox.Firefox]:
    folder = tmp_path_factory.mktemp("firefox")
    async with firefox.sound(folder, speech.pcm) as environment, firefox.started(folder, environment) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: firefox.Firefox, lively_server: Any) -> AsyncIterator[firefox.Firefox]:
    """The page; afterwards nothing may have gone wrong on it, nor been asked of another host."""
    await browser.go(lively_server.http)
    yield browser
    assert not browser.problems
    assert {a.split("/")[2] for a in browser.asked if not a.startswith(("blob:", "data:"))} == {
        f"127.0.0.1:{lively_server.port}"
    }


async def test_files_chosen_and_dropped_give_the_native_text(
    page: firefox.Firefox, lively_server: Any, speech: Any, heard: Callable[..., Any], tmp_path: Path
):
    (tmp_path / "speech.wav").write_bytes(speech.wav)
    expected = heard(lively_server, speech.pcm).text
    await page.choose("file", tmp_path / "speech.wav")
    await page.until("status", "s heard")
    assert await page.text("text") == expected
    await page.evaluate(
        f"""{{
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([new Uint8Array({json.dumps(list(speech.wav))})], "speech.wav"));
            document.getElementById("clear").click();
            document.getElementById("status").textContent = "";
            document.body.dispatchEvent(new DragEvent("drop", {{ dataTransfer, bubbles: true, cancelable: true }}));
        }}"""
    )
    await page.until("status", "s heard")
    assert await page.text("text") == expected


async def test_microphone(page: firefox.Firefox):
    await page.click("microphone")
    await page.until("status", "^Listening.$")
    await page.until("text", r"\w{3}")
    await page.until("lag-text", r"\d+ m?s")
    for _ in range(10 * firefox.SLOW_S):  # between words it may be 0
        if float(await page.evaluate("document.getElementById('level').value")) > 0:
            break
        await asyncio.sleep(0.1)
    else:
        raise AssertionError("the microphone's level stays 0")
    await page.click("microphone")
    await page.until("status", "^Finished")


async def test_a_sound_device_that_is_faster_than_the_server_takes(lively_server: Any, speech: Any, tmp_path: Path):
    async with (
        firefox.sound(tmp_path, speech.pcm, 96_000) as environment,
        firefox.started(tmp_path, environment) as page,
    ):
        await page.go(lively_server.http)
        assert await page.evaluate("new AudioContext().sampleRate") == 96_000
        await page.click("microphone")
        await page.until("text", r"\w{3}")
        await page.click("microphone")
        await page.until("status", "^Finished")


async def test_what_the_policy_refuses_is_seen_by_these_tests(page: firefox.Firefox):
    await page.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    await firefox.until(lambda: any("-Policy: " in said and "(connect-src)" in said for said in page.problems))
    page.problems.clear()
