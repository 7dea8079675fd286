"""The page in headless Chromium, at the sizes of a desktop and of a phone."""

import asyncio
import re
import wave
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, expect
from tests.chromium import FIXTURES, NEEDED, SIZES, SOME_TEXT, Opener, hear_file, holds

from mocha_client.client import transcribe_stream
from mocha_model.recognizer import Recognizer
from mocha_server.messages import Segment, Text
from mocha_server.subtitles import srt, vtt

pytestmark = NEEDED


async def no_serious_finding(page: Page) -> None:
    found = (await Axe().run(page)).response["violations"]
    assert not [(v["id"], [n["html"] for n in v["nodes"]]) for v in found if v["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("size", SIZES)
async def test_microphone(open_page: Opener, size: str):
    page = await open_page(size)
    await page.click("#microphone")
    await expect(page.locator("#status")).to_have_text("Listening.")
    await expect(page.locator("#text")).to_have_text(SOME_TEXT)
    await expect(page.locator("#lag-text")).to_have_text(re.compile(r"\d+ m?s"))
    marks, seconds = await page.evaluate("import('./app.js').then(({ strip }) => [strip.numMarks, strip.seconds])")
    assert marks >= 3 and seconds > 0
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
        "the page is wider than the screen"
    )
    await page.click("summary")
    await page.uncheck("#noiseSuppression")  # in the same stream
    assert await page.locator("#device option").count() >= 1
    await page.keyboard.press("Escape")
    await page.click("#microphone")
    await expect(page.locator("#status")).to_contain_text("Finished")
    await expect(page.locator("#text")).to_have_text(SOME_TEXT)


@pytest.fixture(scope="module")
def expected(lively_server: Any, clip: Any) -> list[Any]:
    return transcribe_stream([clip.tobytes()], lively_server.url)


async def test_file_copy_and_downloads(open_page: Opener, expected: list[Any]):
    page = await open_page(permissions=["clipboard-read", "clipboard-write"])
    await hear_file(page)
    segments = [e for e in expected if isinstance(e, Segment)]
    text = " ".join(s.text for s in segments)
    assert " ".join((await page.inner_text("#text")).split()) == text
    assert await page.evaluate("import('./app.js').then(({ strip }) => strip.numMarks)") == sum(
        len(e.characters) for e in expected if isinstance(e, Text)
    )
    for name, wanted in {"txt": f"{text}\n", "srt": srt(segments), "vtt": vtt(segments)}.items():
        async with page.expect_download() as download:
            await page.click(f"[data-format={name}]")
        got = await download.value
        content = await asyncio.to_thread(Path(await got.path()).read_text)
        assert got.suggested_filename == f"transcript.{name}" and content == wanted
    await page.click("#copy")
    await expect(page.locator("#status")).to_have_text("Copied.")
    assert await page.evaluate("navigator.clipboard.readText()") == text
    await hear_file(page)  # text goes on, and so do its times
    cues = await page.evaluate("import('./app.js').then(({ transcript }) => transcript.as('vtt'))")
    starts = re.findall(r"^[\d:.]+", cues, re.MULTILINE)
    assert starts == sorted(starts) and len(starts) == 2 * (vtt(segments).count("-->"))


async def test_it_asks_for_patience_unless_told_otherwise(
    open_page: Opener, make_server: Any, bundled: Recognizer, clip: Any
):
    server = make_server(bundled, live_beam=4, max_streams=8)
    page, said = await open_page(server=server), []
    for patient in (True, False):
        events = await asyncio.to_thread(transcribe_stream, [clip.tobytes()], server.url, patient=patient)
        said.append(" ".join(e.text for e in events if isinstance(e, Segment)))
        await hear_file(page)
        assert " ".join((await page.inner_text("#text")).split()) == said[-1]
        await page.click("#clear")
        await page.click("summary")
        await page.uncheck("#patient")
        await page.keyboard.press("Escape")
    assert said[0] != said[1]


async def test_dropped_file_that_only_the_server_can_read(open_page: Opener, clip: Any, tmp_path: Path):
    with av.open(str(tmp_path / "speech.aiff"), "w") as container:
        track = container.add_stream("pcm_s16be", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(clip[None]), format="s16", layout="mono")
        frame.sample_rate = 16_000
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    page = await open_page()
    data = list((tmp_path / "speech.aiff").read_bytes())
    await page.evaluate(
        """(bytes) => {
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([new Uint8Array(bytes)], "speech.aiff"));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
        }""",
        data,
    )
    await expect(page.locator("#status")).to_contain_text("s heard")
    assert (await page.inner_text("#text")).strip()


async def test_words_and_characters_by_pointer_and_keyboard(open_page: Opener):
    page = await open_page()
    await hear_file(page)
    times = re.compile(r"^\d+\.\d\d – \d+\.\d\d s · p 0\.\d\d$")
    await page.hover("#text span >> nth=0")
    await expect(page.locator("#tip")).to_have_text(times)
    await page.mouse.move(1, 1)
    await expect(page.locator("#tip")).to_be_hidden()
    await page.hover("#text span >> nth=0")
    await page.hover("#tip")  # is on the way to nothing, so that it can be read enlarged
    await expect(page.locator("#tip")).to_have_text(times)
    await page.keyboard.press("Escape")
    await expect(page.locator("#tip")).to_be_hidden()
    await page.mouse.move(1, 1)
    await page.focus("#text")
    await page.keyboard.press("ArrowLeft")
    await expect(page.locator("#text span >> nth=-1")).to_be_focused()
    await expect(page.locator("#tip")).to_have_text(times)
    assert await page.locator("#text span >> nth=-1").get_attribute("aria-describedby") == "tip"
    await page.focus("#strip")
    await page.keyboard.press("Home")
    await expect(page.locator("#readout")).to_have_text(
        re.compile(r"^\S+ · \d+\.\d\d s · frame \d+ · p [01]\.\d\d · attention( [01]\.\d\d)+$")
    )
    first = await page.locator("#readout").inner_text()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#readout")).not_to_have_text(first)
    await page.focus("#latest")
    await page.keyboard.press("Enter")
    await expect(page.locator("#latest")).to_be_hidden()
    await expect(page.locator("#strip")).to_be_focused()
    unheeded = """(id) => ["alt", "ctrl", "meta", "shift"].every((name) => document.getElementById(id).dispatchEvent(
        new KeyboardEvent("keydown", { key: "ArrowLeft", [`${name}Key`]: true, cancelable: true })))"""
    for name in ("strip", "text"):
        assert await page.evaluate(unheeded, name), "the browser's own shortcuts are not taken"
    for _ in range(12):  # everything is reached by Tab alone
        await page.keyboard.press("Tab")
    reached = set()
    for _ in range(14):
        await page.keyboard.press("Tab")
        reached.add(await page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"microphone", "open", "Settings", "strip", "copy", "txt", "srt", "vtt", "clear", "text"} <= reached


async def test_text_is_selected_from_the_first_letter_of_a_word(open_page: Opener):
    page = await open_page()
    await page.evaluate("""async () => {
        const words = ["one", "two", "three", "four"].map((word, start) => ({ word, start, end: start + 1 }));
        (await import("./app.js")).transcript.close({ text: "one two three four", start: 0, end: 4, words });
    }""")
    first, last = page.locator("#text span >> nth=1"), page.locator("#text span >> nth=3")
    begin, end = await first.bounding_box(), await last.bounding_box()
    assert begin and end
    await page.mouse.move(begin["x"] + 1, begin["y"] + begin["height"] / 2)
    await page.mouse.down()
    await page.mouse.move(end["x"] + end["width"] - 1, end["y"] + end["height"] / 2, steps=4)
    await page.mouse.up()
    selected = await page.evaluate("getSelection().toString()")
    assert selected.startswith(await first.inner_text()) and len(selected.split()) == 3


async def test_names_of_controls_begin_with_what_is_seen(open_page: Opener):
    page = await open_page()
    for name in ("txt", "srt", "vtt"):
        assert await page.get_by_role("button", name=re.compile(f"^{name}, download")).inner_text() == name


async def test_what_is_dragged_and_no_file_is_no_business_of_the_page(open_page: Opener):
    page = await open_page()
    drag = """(kind) => {
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(...(kind === "file" ? [new File(["x"], "x.wav")] : ["text", "text/plain"]));
        document.body.dispatchEvent(new DragEvent("dragover", { dataTransfer, bubbles: true }));
    }"""
    await page.evaluate(drag, "text")
    await expect(page.locator("#drop")).to_be_hidden()
    await page.evaluate(drag, "file")
    await expect(page.locator("#drop")).to_be_visible()


async def test_a_screen_reader_hears_each_segment_once_and_no_characters(open_page: Opener, expected: list[Any]):
    page = await open_page()
    await page.evaluate(
        """() => {
            window.said = [];
            new MutationObserver(() => said.push(document.getElementById("spoken").textContent))
                .observe(document.getElementById("spoken"), { childList: true });
        }"""
    )
    live = await page.evaluate("[...document.querySelectorAll('[aria-live], [role=status], output')].map((e) => e.id)")
    assert set(live) == {"spoken", "status", "readout"}
    await hear_file(page)
    assert await page.evaluate("said") == [e.text for e in expected if isinstance(e, Segment)]


PUSH = """async ([from, to]) => {
    const { strip, transcript } = await import("./app.js");
    if (from === 0) strip.begin(16000, 40);
    const words = Array.from({ length: 12 }, (_, i) => ({ word: "word", start: i, end: i + 1, confidence: 1 }));
    for (let n = from; n < to; n++) {
        const characters = Array.from({ length: 59 }, (_, i) =>
            ({ text: "w", frame: 60 * n + i, time: n, p: 0.9, q: 0.9, chunk: [0.5, 0.5] }));
        strip.hear(new Float32Array(800));
        strip.mark(characters);
        transcript.add({ delta: "word ".repeat(12), characters });
        transcript.close({ segment: n, text: "word ".repeat(12).trim(), start: n, end: n + 1, words });
    }
    for (let n = 0; n < 500; n++) transcript.add({ delta: "no pause at all ", characters: [] });
    await new Promise(requestAnimationFrame);
    const walker = document.createTreeWalker(document, NodeFilter.SHOW_ALL);
    let nodes = 0;
    while (walker.nextNode()) nodes++;
    const open = document.querySelector("p.open").textContent.length;
    transcript.close({ segment: to, text: "", start: to, end: to, words: words.concat(...Array(500).fill(words)) });
    return { nodes, open, spans: document.querySelectorAll("#text span").length, marks: strip.numMarks,
             words: transcript.text.split(" ").length };
}"""


async def test_a_long_session_does_not_grow_the_page(open_page: Opener):
    page = await open_page()
    early = await page.evaluate(PUSH, [0, 1000])
    late = await page.evaluate(PUSH, [1000, 3000])
    assert late["nodes"] == pytest.approx(early["nodes"], rel=0.1) and late["nodes"] < 10_000
    assert late["open"] <= 4000 and late["spans"] <= 3000 and late["marks"] <= 22_000
    assert late["words"] >= 3000 * 12, "what left the page must still be in its downloads"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_accessibility(open_page: Opener, size: str, scheme: str):
    page = await open_page(size, color_scheme=scheme)
    await no_serious_finding(page)
    await hear_file(page)
    await page.click("summary")
    await page.focus("#text")
    await page.keyboard.press("End")  # the times of a word are shown
    await no_serious_finding(page)


async def test_policy_allows_nothing_from_elsewhere(open_page: Opener, lively_server: Any):
    page = await open_page()
    for path in ("/", "/app.js", "/client/mocha-asr.js"):
        response = await page.request.get(lively_server.http + path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    await page.evaluate("addEventListener('securitypolicyviolation', (e) => (window.refused = e.violatedDirective))")
    await page.evaluate("fetch('http://127.0.0.1:9/').catch(() => {})")
    await holds(page, "window.refused === 'connect-src'")
    refusals: list[str] = open_page.problems  # type: ignore[attr-defined]
    assert refusals and all("Content Security Policy" in refusal for refusal in refusals)
    refusals.clear()


async def test_files_are_read_whole_one_after_the_other(open_page: Opener, expected: list[Any]):
    page = await open_page()
    text = " ".join(e.text for e in expected if isinstance(e, Segment))
    await page.set_input_files("#file", [FIXTURES / "weather.wav"] * 2)
    await page.set_input_files("#file", FIXTURES / "weather.wav")
    whole = " ".join([text] * 3)
    shown = "(text) => document.querySelector('#text').innerText.trim().split(/\\s+/).join(' ') === text"
    await holds(page, shown, whole)
    await expect(page.locator("#status")).to_contain_text("s heard")
    await expect(page.locator("#microphone")).to_have_text("Start microphone")


async def test_a_file_can_be_stopped(open_page: Opener, clip: Any, tmp_path: Path):
    with wave.open(str(tmp_path / "long.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(np.tile(clip, 40).tobytes())
    page = await open_page()
    await page.set_input_files("#file", tmp_path / "long.wav")
    await expect(page.locator("#text")).to_have_text(SOME_TEXT)
    await page.click("text=Stop reading")
    await expect(page.locator("#status")).to_contain_text("s heard")
    heard = re.search(r"Finished: ([\d.]+) s heard", await page.inner_text("#status"))
    assert heard and float(heard[1]) < 40 * len(clip) / 16_000 - 1
    await hear_file(page)  # and another read


CLEARED = """async () => {
    const { transcript } = await import("./app.js");
    const said = (text, from) => {
        const characters = [...text].map((text, i) => ({ text, time: from + i / 10 }));
        transcript.add({ delta: text, characters });
    };
    said("one tw", 1);
    transcript.clear(SECONDS);
    const cleared = transcript.text;
    said("o three ", 1.6);
    const open = transcript.text;
    const times = [["one", 1, 1.3], ["two", 1.4, 1.7], ["three", 1.8, 2.3]];
    const words = times.map(([word, start, end]) => ({ word, start, end }));
    transcript.close({ segment: 0, text: "one two three", start: 1, end: 2.3, words });
    return [cleared, open, transcript.text, transcript.as("vtt")];
}"""


@pytest.mark.parametrize(("seconds", "open_text", "text"), [("1.75", "three", "three"), ("", "o three", "two three")])
async def test_what_is_cleared_does_not_come_back(open_page: Opener, seconds: str, open_text: str, text: str):
    page = await open_page()
    cleared, opened, closed, cues = await page.evaluate(CLEARED.replace("SECONDS", seconds))
    assert (cleared, opened, closed) == ("", open_text, text) and cues.endswith(f"\n{text}\n")
    assert (await page.inner_text("#text")).strip() == text


async def test_the_focus_stays_where_it_is(open_page: Opener):
    asks = """
        const ask = MediaDevices.prototype.getUserMedia;
        window.asked = [];
        MediaDevices.prototype.getUserMedia = async function (wanted) {
            await new Promise((allow) => asked.push(allow));
            return ask.call(this, wanted);
        };
    """
    page = await open_page(script=asks)
    await page.focus("#microphone")
    for _ in range(2):  # once is enough
        await page.keyboard.press("Enter")
    await expect(page.locator("#microphone")).to_be_focused()
    assert await page.evaluate("asked.length") == 1
    await page.focus("#open")
    await page.evaluate("asked[0]()")
    await expect(page.locator("#status")).to_have_text("Listening.")
    await page.click("#microphone")
    await expect(page.locator("#status")).to_contain_text("Finished")
    await page.click("summary")
    await page.focus("#autoGainControl")
    await page.keyboard.press("Escape")
    await expect(page.locator("summary")).to_be_focused()
    await expect(page.locator("#autoGainControl")).to_be_hidden()


async def test_hours_of_listening_fit_a_small_screen(open_page: Opener):
    page = await open_page("phone")
    await page.set_viewport_size({"width": 320, "height": 600})
    await page.evaluate("heard.textContent = '10:00:00', document.getElementById('lag-text').textContent = '9999 ms'")
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
