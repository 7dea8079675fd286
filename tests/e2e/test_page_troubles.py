"""What the page does where something fails: microphones, connections, uploads, the clipboard."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.async_api import Route, expect
from tests.chromium import NEEDED, SOME_TEXT, Opener, hear_file, holds

from mocha_model.recognizer import Recognizer

pytestmark = NEEDED


async def test_a_microphone_that_gives_no_sound(open_page: Opener):
    suspended = "constructor(...options) { super(...options); window.context = this; }"
    page = await open_page(script=f"const Usual = AudioContext; AudioContext = class extends Usual {{ {suspended} }};")
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("Listening.")
    await page.evaluate("context.suspend()")
    await expect(page.locator("#status")).to_have_text("No sound comes from the microphone.")
    await page.evaluate("context.resume()")
    await expect(page.locator("#status")).to_have_text("Listening.")


def answering(status: int, body: str) -> Callable[[Route], Any]:
    return lambda route: route.fulfill(status=status, body=body)


async def test_uploads_that_something_else_answers(open_page: Opener, tmp_path: Path):
    page = await open_page()
    opened = tmp_path / "unknown.bin"
    opened.write_bytes(b"no audio")
    answers = {"The server answered 413.": (413, "<html>"), "The server answered 502.": (502, '{"detail": 1}')}
    for said, (status, body) in answers.items():
        await page.route("**/v1/audio/transcriptions", answering(status, body))
        await page.set_input_files("#file", opened)
        await expect(page.locator("#status")).to_have_text(said)
    await page.route("**/v1/audio/transcriptions", lambda r: r.abort())
    await page.set_input_files("#file", opened)
    await expect(page.locator("#status")).to_have_text("The server cannot be reached.")
    open_page.problems.clear()  # type: ignore[attr-defined] - which the browser tells of each


async def test_a_file_does_not_wait_for_a_microphone_that_nobody_has_allowed_yet(open_page: Opener):
    page = await open_page(script="navigator.mediaDevices.getUserMedia = () => new Promise(() => {});")
    await page.click("#microphone")
    await hear_file(page)


GIVEN = """
    window.given = [];
    const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (wanted) => {
        if (window.none) throw new DOMException("", "NotFoundError");
        window.given.push(await ask(wanted));
        return window.given.at(-1);
    };
    window.unplug = () => window.given.at(-1).getTracks()[0].dispatchEvent(new Event("ended"));
"""


async def test_a_microphone_that_is_gone_gives_way_to_another(open_page: Opener):
    page = await open_page(script=GIVEN)
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("Listening.")
    await page.evaluate("unplug()")
    await holds(page, "given.length === 2")
    await expect(page.locator("#text")).to_have_text(SOME_TEXT)
    await expect(page.locator("#microphone")).to_have_text("Stop microphone")
    await page.evaluate("none = true, unplug()")
    await expect(page.locator("#status")).to_have_text(re.compile(r"The microphone is gone. Finished: [\d.]+ s heard."))
    await expect(page.locator("#microphone")).to_have_text("Start microphone")
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("There is no microphone.")


async def test_a_device_that_is_faster_than_the_server_takes(open_page: Opener):
    rate = "constructor(options) { super(options ?? { sampleRate: 96000 }); }"
    page = await open_page(script=f"const Usual = AudioContext; AudioContext = class extends Usual {{ {rate} }};")
    await page.click("#microphone")
    await expect(page.locator("#text")).to_have_text(SOME_TEXT)


async def test_a_microphone_that_fails_leaves_no_stream_behind(open_page: Opener, make_server: Any, lively: Recognizer):
    fails = """
        const usual = AudioContext.prototype.createMediaStreamSource;
        AudioContext.prototype.createMediaStreamSource = function (media) {
            AudioContext.prototype.createMediaStreamSource = usual;
            throw new DOMException("once", "NotSupportedError");
        };
    """
    page = await open_page(server=make_server(lively, idle_s=600), script=fails)
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("once")
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("Listening.")
    await page.close()  # before its server, to which it would connect again


async def test_a_device_that_cannot_be_heard_leaves_the_one_before(open_page: Opener):
    fails = """
        const usual = AudioContext.prototype.createMediaStreamSource;
        window.heard = [];
        AudioContext.prototype.createMediaStreamSource = function (media) {
            window.heard.push(media);
            if (window.heard.length === 2) throw new DOMException("cannot be heard", "NotSupportedError");
            return usual.call(this, media);
        };
    """
    page = await open_page(script=fails)
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("Listening.")
    await page.evaluate("document.querySelector('#noiseSuppression').click()")
    await expect(page.locator("#status")).to_have_text("cannot be heard")
    await expect(page.locator("#noiseSuppression")).to_be_checked()
    states = "heard.map((media) => media.getTracks()[0].readyState).join()"
    assert await page.evaluate(states) == "live,ended"
    await expect(page.locator("#text")).to_have_text(SOME_TEXT)
    await page.evaluate("document.querySelector('#noiseSuppression').click()")
    await holds(page, f"{states} === 'ended,ended,live'")


async def test_errors_are_told_by_where_they_come_from(open_page: Opener):
    refused = """
        Clipboard.prototype.writeText = async () => { throw new DOMException("no writing", "NotAllowedError"); };
        MediaDevices.prototype.getUserMedia = async () => { throw new DOMException("", failure); };
    """
    page = await open_page(script=refused)
    await page.click("#copy")
    await expect(page.locator("#status")).to_have_text("no writing")
    for name, said in {"AbortError": "cannot be started", "NotAllowedError": "is not allowed"}.items():
        await page.evaluate("(name) => { window.failure = name; }", name)
        await page.click("#microphone")
        await expect(page.locator("#status")).to_have_text(f"The microphone {said}.")


async def test_a_lost_connection_is_told_once(open_page: Opener):
    loses = """
        const Usual = WebSocket;
        window.WebSocket = class extends Usual {
            constructor(url) { super(url); window.socket = this; window.numSockets = (window.numSockets ?? 0) + 1; }
            send(data) { if (numSockets === 1) super.send(data); } // others wait for ever
        };
    """
    page = await open_page(script=loses)
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("Listening.")
    await page.evaluate(
        """() => {
            window.said = [];
            const status = document.getElementById("status");
            const tell = (changes) => changes.forEach(() => said.push(status.textContent));
            new MutationObserver(tell).observe(status, { childList: true });
            socket.close();
        }"""
    )
    await expect(page.locator("#status")).to_contain_text("lost")
    heard = await page.evaluate("import('./app.js').then(({ strip }) => strip.heard)")
    await holds(page, "(heard) => import('./app.js').then(({ strip }) => strip.heard > heard + 1)", heard)
    assert await page.evaluate("said") == ["The connection is lost; trying again."]


async def test_without_a_clipboard_it_says_what_to_do(open_page: Opener):
    page = await open_page(script="Object.defineProperty(Navigator.prototype, 'clipboard', { value: undefined });")
    await page.click("#copy")
    await expect(page.locator("#status")).to_contain_text("take txt")
