"""Live audio in containers over real sockets, natively and with Deepgram's unmodified SDK."""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from deepgram import DeepgramClient
from numpy.typing import NDArray
from tests.e2e.conftest import FIXTURES, Clip, native
from tests.e2e.test_deepgram import environment, finals, text_of
from tests.server.test_decoding import children, encoded, helper, until
from tests.server.test_stream import FINISH, cut, exchange, frames
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from mocha_model.recognizer import Recognizer
from mocha_server.audio import decode_file

NAMES = ["weather.webm", "weather.ogg", "weather.mp3", "weather.flac", "weather.wav"]  # weather.opus is weather.ogg
WEBM = (FIXTURES / "weather.webm").read_bytes()
CONTAINER = {"encoding": "container"}
pytestmark = pytest.mark.filterwarnings("ignore:websockets.* is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=60) as client:
        yield client


def uploaded(server: Any, http: httpx.Client, name: str) -> str:
    files = {"file": (name, (FIXTURES / name).read_bytes())}
    return str(http.post(f"{server.http}/v1/audio/transcriptions", files=files).json()["text"])


def segments_text(said: list[dict[str, Any]]) -> str:
    return " ".join(m["text"] for m in said if m["type"] == "segment")


async def heard(server: Any, pieces: list[bytes]) -> list[dict[str, Any]]:
    said = await exchange(server.url, [*pieces, FINISH], **CONTAINER)
    assert said[-1]["type"] == "end", said[-1]
    return said


@pytest.mark.parametrize("name", NAMES)
async def test_the_text_is_that_of_the_upload_however_it_is_cut(any_server: Any, http: httpx.Client, name: str):
    data, chance = (FIXTURES / name).read_bytes(), random.Random(0)
    whole = await heard(any_server, [data])
    expected = uploaded(any_server, http, name)
    assert len(expected) > 10 and segments_text(whole) == expected
    for sizes in (itertools.repeat(61), (chance.choice([1, 2, 3, 700, 5001]) for _ in itertools.count())):
        assert frames(await heard(any_server, cut(data, sizes))) == frames(whole)


async def test_frames_are_those_of_the_samples(lively_server: Any, lively: Recognizer):
    samples = np.concatenate(list(decode_file(str(FIXTURES / "weather.webm"), 16_000)))
    alone = [(e.text, e.frame) for e in lively.transcribe(torch.from_numpy(samples)) if e.text]
    assert frames(await heard(lively_server, cut(WEBM, itertools.repeat(100)))) == alone


async def test_text_comes_while_the_container_does(lively_server: Any, clip: NDArray[np.int16]):
    data = encoded("libopus", np.tile(clip, 3), "webm")
    said: list[dict[str, Any]] = []
    async with connect(lively_server.url) as socket:

        async def listen() -> None:
            async for message in socket:
                said.append(json.loads(message))

        listening = asyncio.create_task(listen())
        await socket.send(json.dumps({"type": "start"} | CONTAINER))
        last = len(data) * 9 // 10
        for piece in cut(data[:last], itertools.repeat(500)):
            await socket.send(piece)
        await asyncio.sleep(2)
        early = len(frames(said))
        await socket.send(data[last:])
        await socket.send(FINISH)
        await listening
    assert early > 0.75 * len(frames(said)) > 20


async def test_what_cannot_be_decoded_ends_that_stream_only(lively_server: Any):
    good = asyncio.create_task(heard(lively_server, cut(WEBM, itertools.repeat(50))))
    m4a = (FIXTURES / "weather.m4a").read_bytes()
    noise = np.random.default_rng(0).bytes(1 << 16)
    for pieces in ([m4a, FINISH], [noise], [b"short", FINISH]):
        said = await exchange(lively_server.url, pieces, **CONTAINER)
        assert [m["type"] for m in said] == ["ready", "error"]
        assert said[-1]["code"] == "unsupported_media" and said[-1]["fatal"]
    assert frames(await good) == frames(await heard(lively_server, [WEBM]))
    assert await lively_server.streams_left() == 0
    await until(lambda: not children(helper()))


async def test_mistakes_are_told_as_ever(lively_server: Any):
    said = await exchange(lively_server.url, [WEBM[:3000], FINISH, b"more"], **CONTAINER)
    assert said[-1]["type"] == "end" or said[-1]["code"] == "invalid_message"
    said = await exchange(lively_server.url, [WEBM[:3000], '{"type":"start"}'], **CONTAINER)
    assert said[-1]["code"] == "invalid_message"
    nothing = await exchange(lively_server.url, [FINISH], **CONTAINER)
    assert nothing[1:] == (await exchange(lively_server.url, [FINISH]))[1:] and nothing[-1]["type"] == "end"
    await until(lambda: not children(helper()))


async def test_clients_that_vanish_and_a_server_that_stops(make_server: Any, lively: Recognizer):
    server = make_server(lively)
    for _ in range(3):
        async with connect(server.url) as socket:
            await socket.send(json.dumps({"type": "start"} | CONTAINER))
            await socket.send(WEBM[:5000])
            await until(lambda: len(children(helper())) == 1)
            socket.transport.abort()
        await until(lambda: not children(helper()))
        assert await server.streams_left() == 0
    async with connect(server.url) as socket:
        await socket.send(json.dumps({"type": "start"} | CONTAINER))
        await socket.send(WEBM[:5000])
        await until(lambda: len(children(helper())) == 1)
        await asyncio.to_thread(server.stop)
        await until(lambda: not children(helper()))


async def test_who_sends_too_fast_is_paced_and_delays_nobody(lively_server: Any):
    noise = np.random.default_rng(0).integers(-9000, 9000, 60 * 16_000).astype(np.int16)
    data = encoded("pcm_s16le", np.tile(noise, 10), "wav")
    plain = frames(await exchange(lively_server.url, [Clip(noise[:64_000]).pcm, FINISH]))
    async with connect(lively_server.url) as socket:
        await socket.send(json.dumps({"type": "start"} | CONTAINER))
        sent = 0

        async def send() -> None:
            nonlocal sent
            for piece in cut(data, itertools.repeat(1 << 16)):
                await socket.send(piece)
                sent += len(piece)

        sending = asyncio.create_task(send())
        await asyncio.sleep(1)
        assert 0 < sent < len(data) / 2 and not sending.done()
        began = time.monotonic()
        assert frames(await exchange(lively_server.url, [Clip(noise[:64_000]).pcm, FINISH])) == plain
        assert time.monotonic() - began < 10
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        socket.transport.abort()
    assert await lively_server.streams_left() == 0
    await until(lambda: not children(helper()))


def listen(server: Any, http: httpx.Client, pieces: list[bytes], **options: Any) -> list[Any]:
    """Everything the SDK yields for a stream that is closed in order."""
    client = DeepgramClient(api_key="any", environment=environment(server), httpx_client=http)
    with client.listen.v1.connect(model="nova-3", **options) as connection:
        for piece in pieces:
            connection.send_media(piece)
        connection.send_close_stream()
        return list(connection)


def test_deepgrams_sdk_sends_webm_without_an_encoding(any_server: Any, http: httpx.Client):
    messages = listen(any_server, http, cut(WEBM, itertools.repeat(250)), interim_results=True)
    assert text_of(finals(messages)) == uploaded(any_server, http, "weather.webm")
    assert messages[-1].type == "Metadata" and messages[-1].duration == pytest.approx(56740 / 16_000, abs=2e-3)


@pytest.mark.parametrize(("encoding", "name"), [("ogg-opus", "weather.ogg"), ("flac", "weather.flac")])
def test_encodings_that_name_a_container(lively_server: Any, http: httpx.Client, encoding: str, name: str):
    pieces = cut((FIXTURES / name).read_bytes(), itertools.repeat(700))
    messages = listen(lively_server, http, pieces, encoding=encoding, sample_rate=48_000)
    assert text_of(finals(messages)) == uploaded(lively_server, http, name)


@pytest.mark.parametrize("encoding", ["opus", "speex", "amr-nb", "amr-wb", "g729"])
async def test_raw_packets_of_codecs_are_refused(lively_server: Any, encoding: str):
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.1:{lively_server.port}/v1/listen?encoding={encoding}&sample_rate=16000")
    assert "in a container" in refused.value.response.headers["dg-error"]


def test_finalize_ends_an_utterance_in_the_middle_of_a_container(lively_server: Any, http: httpx.Client):
    client = DeepgramClient(api_key="any", environment=environment(lively_server), httpx_client=http)

    def halves(size: int) -> tuple[str, str, float]:
        with client.listen.v1.connect(model="nova-3") as connection:
            for piece in cut(WEBM[:6000], itertools.repeat(size)):
                connection.send_media(piece)
            connection.send_finalize()
            first = [connection.recv()]
            while not first[-1].from_finalize:
                first.append(connection.recv())
            for piece in cut(WEBM[6000:], itertools.repeat(size)):
                connection.send_media(piece)
            connection.send_close_stream()
            rest = list(connection)
        return text_of(finals(first)), text_of(finals(rest)), rest[-1].duration

    samples = np.concatenate(list(decode_file(str(FIXTURES / "weather.webm"), 16_000)))
    first, second, duration = halves(100)
    assert first and second and duration == pytest.approx(len(samples) / 16_000, abs=2e-3)
    assert halves(6000) == (first, second, duration)
    full = native(lively_server.url, (samples * 32767).astype(np.int16).tobytes()).text
    assert full.startswith(first[: len(first) // 2])


def test_bytes_that_are_no_container_are_an_error_of_deepgrams(lively_server: Any, http: httpx.Client):
    client = DeepgramClient(api_key="any", environment=environment(lively_server), httpx_client=http)
    with client.listen.v1.connect(model="nova-3") as connection:
        connection.send_media(np.random.default_rng(0).bytes(1 << 16))
        error = connection.recv()
    assert error.type == "Error" and error.variant == "DATA-0000" and "encoding" in error.description
