"""The native protocol over real sockets, with a model that emits plenty: chunking, company, and every bad input."""

import asyncio
import base64
import json
import random
import re
import time
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from mocha_model.recognizer import Recognizer
from mocha_server.protocols import native
from mocha_server.session import Session

Frames = list[tuple[str, int]]


async def exchange(url: str, pieces: list[bytes | str], **start: Any) -> list[dict[str, Any]]:
    """Send a start message and `pieces`; everything the server says until it closes."""
    said: list[dict[str, Any]] = []
    async with connect(url, max_size=None) as socket:

        async def feed() -> None:
            await socket.send(json.dumps({"type": "start"} | start))
            for piece in pieces:
                await socket.send(piece)

        feeder = asyncio.create_task(feed())
        try:
            async for message in socket:
                said.append(json.loads(message))
        except ConnectionClosed:
            pass
        feeder.cancel()
        await asyncio.gather(feeder, return_exceptions=True)
    return said


FINISH = '{"type":"finish"}'


def frames(said: list[dict[str, Any]]) -> Frames:
    return [(c["text"], c["frame"]) for m in said if m["type"] == "text" for c in m["characters"]]


def cut(data: bytes, sizes: Any) -> list[bytes]:
    pieces, at = [], 0
    while at < len(data):
        size = next(sizes)
        pieces.append(data[at : at + size])
        at += size
    return pieces


def constant(size: int) -> Any:
    while True:
        yield size


def irregular(seed: int) -> Any:
    rng = random.Random(seed)
    while True:
        yield rng.choice([1, 2, 3, 333, 641, 5000, 20_000])


@pytest.fixture(scope="module")
def expected(lively: Recognizer, clip: NDArray[np.int16]) -> Frames:
    emissions = lively.transcribe(torch.from_numpy(clip.astype(np.float32) / 32768))
    found = [(e.text, e.frame) for e in emissions if not e.end_of_segment]
    assert len(found) > 20
    return found


async def test_any_pieces_alone_and_in_company_give_the_offline_frames(
    lively_server: Any, clip: NDArray[np.int16], expected: Frames
):
    data = clip.tobytes()
    cuts = [constant(len(data)), constant(320), constant(1184), irregular(1)]
    for sizes in cuts:
        assert frames(await exchange(lively_server.url, [*cut(data, sizes), FINISH])) == expected
    company = [exchange(lively_server.url, [*cut(data, irregular(k)), FINISH]) for k in range(17)]
    for said in await asyncio.gather(*company):
        assert frames(said) == expected
    assert await lively_server.streams_left() == 0


async def test_the_shape_of_a_conversation(lively_server: Any, clip: NDArray[np.int16]):
    said = await exchange(lively_server.url, [clip.tobytes(), FINISH])
    kinds = [m["type"] for m in said]
    assert kinds[0] == "ready" and kinds[-1] == "end" and set(kinds) == {"ready", "text", "segment", "end"}
    deltas = "".join(m["delta"] for m in said if m["type"] == "text")
    segments = [m for m in said if m["type"] == "segment"]
    assert " ".join(deltas.split()) == " ".join(" ".join(s["text"] for s in segments).split())
    assert said[-1]["segments"] == len(segments)
    assert said[-1]["duration"] == pytest.approx(len(clip) / 16_000, abs=1e-3)


@pytest.mark.parametrize(("encoding", "dtype", "scale"), [("pcm_f32le", "<f4", 1 / 32768), ("pcm_s16le", "<i2", 1)])
async def test_encodings_agree(
    lively_server: Any, clip: NDArray[np.int16], expected: Frames, encoding: str, dtype: str, scale: float
):
    data = (clip * scale).astype(dtype).tobytes()
    assert frames(await exchange(lively_server.url, [data, FINISH], encoding=encoding)) == expected


@pytest.mark.parametrize(
    ("pieces", "start", "code"),
    [
        (["hello"], {}, "invalid_message"),
        ([], {"encoding": "flac"}, "start_expected"),
        ([], {"sample_rate": 96_000}, "start_expected"),
        ([np.array([0.5, np.nan], "<f4").tobytes()], {"encoding": "pcm_f32le"}, "invalid_audio"),
    ],
)
async def test_bad_input_gets_its_typed_error(lively_server: Any, pieces: list[bytes | str], start: Any, code: str):
    said = await exchange(lively_server.url, pieces, **start)
    assert [m["code"] for m in said if m["type"] == "error"] == [code]
    assert await lively_server.streams_left() == 0


async def test_no_start_message(lively_server: Any):
    async with connect(lively_server.url) as socket:
        await socket.send(b"\0\0\0\0")
        error = json.loads(await socket.recv())
    assert (error["type"], error["code"]) == ("error", "start_expected")


async def test_an_odd_number_of_bytes_is_a_warning(lively_server: Any, clip: NDArray[np.int16], expected: Frames):
    said = await exchange(lively_server.url, [clip.tobytes() + b"\x01", FINISH])
    assert frames(said) == expected
    assert [m["code"] for m in said if m["type"] == "error"] == ["invalid_audio"]
    assert said[-1]["type"] == "end"


async def test_no_audio_at_all(lively_server: Any):
    said = await exchange(lively_server.url, [FINISH])
    assert said[0]["type"] == "ready" and (said[-1]["type"], said[-1]["duration"]) == ("end", 0.0)


async def test_a_vanished_client_frees_its_row(lively_server: Any, clip: NDArray[np.int16]):
    for _ in range(3):
        socket = await connect(lively_server.url)
        await socket.send('{"type":"start"}')
        await socket.send(clip.tobytes())
        socket.transport.abort()  # no close frame: the machine went away
    assert await lively_server.streams_left() == 0


def audio_seconds(server: Any) -> float:
    """How much `server` has recognised."""
    found = re.findall(r"^mocha_audio_seconds_total{.*} (\S+)", server.app.state.metrics.text().decode(), re.M)
    return sum(map(float, found))


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("/v1/stream", '{"type":"start"}'),
        ("/v1/listen?encoding=linear16&sample_rate=16000", None),
        ("/", '{"config":{"sample_rate":16000}}'),
        ("/v1/realtime", "realtime"),
    ],
)
async def test_what_a_client_sent_before_it_vanished_is_not_heard_for_long(
    make_server: Any, lively: Recognizer, path: str, start: str | None
):
    server, seconds = make_server(lively), 360
    audio: bytes | str = bytes(2 * 16_000 * seconds)  # in one message, and silence, of which nothing is said
    if start == "realtime":
        pcm = {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}
        start = json.dumps({"type": "session.update", "session": {"type": "transcription", **pcm}})
        silence = base64.b64encode(b"\xff" * 8_000 * seconds).decode()
        audio = json.dumps({"type": "input_audio_buffer.append", "audio": silence})
    socket = await connect(f"{server.http.replace('http', 'ws')}{path}")
    if start:
        await socket.send(start)
    await socket.send(audio)
    for _ in range(2000):
        if audio_seconds(server):
            break
        await asyncio.sleep(0.01)
    socket.transport.abort()
    assert await server.streams_left() == 0
    assert 0 < audio_seconds(server) < seconds / 2


async def test_keepalive_drops_no_client_whose_pongs_wait_behind_its_audio(
    make_server: Any, lively: Recognizer, clip: NDArray[np.int16]
):
    server = make_server(lively, max_buffer_s=0.5)
    keepalive = server._server.config
    keepalive.ws_ping_interval /= 400  # the clock of the pings runs faster, so that the test need not last a minute
    if keepalive.ws_ping_timeout is not None:
        keepalive.ws_ping_timeout /= 400
    data = np.tile(clip, 8).tobytes()  # half a minute, sent at once
    said = await exchange(server.url, [*cut(data, constant(8_000)), FINISH])
    assert said[-1]["type"] == "end" and said[-1]["duration"] == pytest.approx(len(data) / 32_000, abs=1e-3)


async def test_an_idle_stream_is_closed(make_server: Any, lively: Recognizer):
    async with connect(make_server(lively, idle_s=0.3).url) as socket:
        await socket.send('{"type":"start"}')
        assert json.loads(await socket.recv())["type"] == "ready"
        assert json.loads(await socket.recv())["code"] == "idle"
        with pytest.raises(ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1008


async def test_a_server_that_was_suspended_reads_what_came_before_a_stream_is_idle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "LATE_S", 0.1)
    idle = native.IdleTimer(0.1)
    reader = asyncio.create_task(asyncio.sleep(10))
    idle.waiting()
    idle.watch(reader)  # type: ignore[arg-type]
    time.sleep(0.4)  # noqa: ASYNC251 it is the loop that stands still
    await asyncio.sleep(0.02)
    assert not idle.expired
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reader, 1)
    assert idle.expired


async def test_a_full_server_refuses_and_says_that_later_will_do(make_server: Any, lively: Recognizer):
    server = make_server(lively, max_streams=1)
    async with connect(server.url) as first, connect(server.url) as second:
        for socket in (first, second):
            await socket.send('{"type":"start"}')
            answer = json.loads(await socket.recv())
            assert (answer["type"], answer.get("code")) == (("ready", None), ("error", "server_full"))[socket is second]
        with pytest.raises(ConnectionClosed):
            await second.recv()
        assert second.close_code == 1013


async def test_who_waits_for_the_server_is_not_idle(
    make_server: Any, lively: Recognizer, clip: NDArray[np.int16], monkeypatch: pytest.MonkeyPatch
):
    """While it is paced, and between its last message and the end."""
    slow = Recognizer(lively.model, lively.tokenizer)
    server = make_server(slow, idle_s=0.5, max_buffer_s=1)
    step = slow.step

    def slowly(samples: Any, *rest: Any) -> Any:
        time.sleep(samples.shape[1] / 2 / 16_000)
        return step(samples, *rest)

    monkeypatch.setattr(slow, "step", slowly)
    said = await exchange(server.url, [clip.tobytes(), FINISH])
    assert said[-1]["type"] == "end" and said[-1]["duration"] == pytest.approx(len(clip) / 16_000, abs=1e-3)


async def test_a_failing_step_ends_its_streams_and_the_server_lives(
    make_server: Any, lively: Recognizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    server = make_server(lively_copy := Recognizer(lively.model, lively.tokenizer))

    def broken(*_: object) -> None:
        raise RuntimeError("injected fault")

    with monkeypatch.context() as fault:
        fault.setattr(lively_copy, "step", broken)
        said = await exchange(server.url, [b"\0" * 32_000, FINISH])
    assert said[-1]["code"] == "internal" and "injected" not in said[-1]["message"]
    assert "injected fault" in caplog.text
    said = await exchange(server.url, [b"\0" * 32_000, FINISH])
    assert said[-1]["type"] == "end"


async def test_minutes_of_silence_and_noise(lively_server: Any):
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(16_000 * 60) * 1000).astype("<i2").tobytes()
    for data in (bytes(2 * 16_000 * 60), noise):
        said = await exchange(lively_server.url, [*cut(data, constant(64_000)), FINISH])
        assert said[-1] == {"type": "end", "segments": said[-1]["segments"], "duration": 60.0}


async def test_what_fails_when_messages_are_written_is_told(lively_server: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Session, "emitted", lambda *_: 1 / 0)
    *_, last = await exchange(lively_server.url, [bytes(64_000), '{"type":"finish"}'])
    assert last["type"] == "error" and last["code"] == "internal"
    assert await lively_server.streams_left() == 0
