"""All protocols at once on one server, between clients that misbehave: each gets the text it would get alone."""

import asyncio
import base64
import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from wyoming.asr import Transcript
from wyoming.audio import AudioChunk, AudioStop
from wyoming.client import AsyncTcpClient

from mocha_model.recognizer import Recognizer
from mocha_training.data import Corpus


async def vosk(server: Any, speech: Any) -> str:
    texts = []
    async with connect(f"ws://127.0.0.1:{server.port}/") as socket:
        await socket.send('{"config":{"sample_rate":16000.000000}}')
        for piece in [*speech.pieces(), '{"eof" : 1}']:
            await socket.send(piece)
            texts.append(json.loads(await socket.recv()).get("text"))
    return " ".join(t for t in texts if t)


async def deepgram(server: Any, speech: Any) -> str:
    texts = []
    async with connect(f"ws://127.0.0.1:{server.port}/v1/listen?encoding=linear16&sample_rate=16000") as socket:
        for piece in [*speech.pieces(), '{"type":"CloseStream"}']:
            await socket.send(piece)
        async for message in socket:
            body = json.loads(message)
            if body["type"] == "Results":
                texts.append(body["channel"]["alternatives"][0]["transcript"])
    return " ".join(t for t in texts if t)


async def realtime(server: Any, speech: Any) -> str:
    audio_input = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}
    update = {"type": "session.update", "session": {"audio": {"input": audio_input}}}
    append = {"type": "input_audio_buffer.append", "audio": base64.b64encode(speech.pcm).decode()}
    async with connect(f"ws://127.0.0.1:{server.port}/v1/realtime") as socket:
        for event in (update, append, {"type": "input_audio_buffer.commit"}):
            await socket.send(json.dumps(event))
        async for message in socket:
            body = json.loads(message)
            if body["type"].endswith("completed"):
                return str(body["transcript"])
    raise AssertionError("closed before the end")


async def wyoming(server: Any, speech: Any) -> str:
    async with AsyncTcpClient("127.0.0.1", server.app.state.wyoming_port) as client:
        for piece in speech.pieces():
            await client.write_event(AudioChunk(rate=16_000, width=2, channels=1, audio=piece).event())
        await client.write_event(AudioStop().event())
        while event := await client.read_event():
            if Transcript.is_type(event.type):
                return Transcript.from_event(event).text
    raise AssertionError("closed before the end")


async def upload(server: Any, speech: Any) -> str:
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(f"{server.http}/v1/audio/transcriptions", files={"file": ("a.wav", speech.wav)})
    return str(response.json()["text"])


async def misbehave(server: Any, speech: Any, rng: random.Random) -> str:
    """Connect somewhere, send a little audio or rubbish, and vanish, politely or not."""
    path = rng.choice(["/", "/v1/stream", "/v1/realtime", "/v1/listen?encoding=linear16&sample_rate=16000"])
    rubbish = [rng.randbytes(999), "{", "null", '{"type":"start"}', '{"type":"Finalize"}', '{"eof":1}', speech.pcm]
    with suppress(ConnectionClosed):
        socket = await connect(f"ws://127.0.0.1:{server.port}{path}")
        for _ in range(rng.randrange(4)):
            await socket.send(rng.choice(rubbish))
        if rng.random() < 0.5:
            socket.transport.abort()
        else:
            await socket.close()
    with suppress(InvalidStatus):
        await connect(f"ws://127.0.0.1:{server.port}/v1/listen?encoding=rubbish")
    multipart = b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 9999\r\n\r\n--b\r\n"
    requests = {
        server.port: [
            b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: x\r\n" + multipart,
            b"POST /v1/audio/translations HTTP/1.1\r\nHost: x\r\n" + multipart,
            b"POST /v1/listen HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n" + rng.randbytes(500),
        ],
        server.app.state.wyoming_port: [
            rng.randbytes(500),
            b'{"type":"audio-chunk","payload_length":100}\n',
            b"{}\n",
        ],
    }
    for port, broken_off in requests.items():
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(rng.choice(broken_off))
        writer.close()
    return ""


async def test_all_protocols_at_once_between_bad_clients(
    make_server: Any,
    lively: Recognizer,
    speech: Any,
    heard: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
):
    server = make_server(lively, wyoming_port=0, max_streams=64)
    expected = heard(server, speech.pcm).text
    rng = random.Random(0)
    good = [vosk, deepgram, realtime, wyoming, upload] * 2
    bad = [misbehave(server, speech, rng) for _ in range(20)]
    found = await asyncio.gather(*(client(server, speech) for client in good), *bad)
    assert found[: len(good)] == [expected] * len(good)
    assert await server.streams_left() == 0
    assert await vosk(server, speech) == expected
    assert not [r.message for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")]


async def test_real_recordings_through_every_protocol(
    server: Any,
    speech: Any,
    heard: Callable[..., Any],
    recorded: Corpus,
):
    texts = []
    for index, utterance in enumerate(recorded.utterances[:5]):
        recording = replace(speech, samples=np.asarray(recorded.pcm(index)))
        texts.append(await asyncio.to_thread(lambda clip=recording: heard(server, clip.pcm).text))
        for client in (vosk, deepgram, realtime, wyoming, upload):
            assert await client(server, recording) == texts[-1], (utterance.key, client.__name__)
    assert any(texts)
