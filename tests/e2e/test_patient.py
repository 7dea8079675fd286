"""Live streams that want patience, beside others that do not: each gets its own text, in every protocol."""

import asyncio
import json
import subprocess
import sys
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.conftest import Server
from tests.e2e.conftest import FIXTURES, Clip, native
from tests.e2e.test_deepgram import finals, http, listen, text_of  # noqa: F401 `http` is a fixture
from tests.e2e.test_openai_realtime import INPUT, append, session, until
from tests.e2e.test_settled import messages, others_get_the_same_results
from tests.e2e.test_vosk import EOF, address, lockstep
from websockets.asyncio.client import connect

from mocha_client.client import ClientError, StreamingClient, transcribe_stream
from mocha_model import emissions
from mocha_model.recognizer import Recognizer
from mocha_server.messages import ErrorCode, Segment
from mocha_server.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:websockets.* is deprecated:DeprecationWarning")
PATIENCE = {"live_beam": 4, "live_patience_ms": 400, "max_streams": 8}


@pytest.fixture(scope="module")
def both(bundled: Recognizer) -> Iterator[Server]:
    """A server that reads greedily unless asked otherwise."""
    running = Server(bundled, **PATIENCE)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def patient(speech: Clip, bundled: Recognizer) -> str:
    """What the search with patience reads alone."""
    samples = torch.from_numpy(speech.samples / 32768).float()
    return emissions.text_of(bundled.searching(4, patience_s=0.4).transcribe(samples))


@pytest.fixture(scope="module")
def greedy(server: Server, speech: Clip) -> str:
    return native(server.url, speech.pcm).text


def test_deltas_are_the_transcript_that_the_search_gives(both: Server, speech: Clip, patient: str, greedy: str):
    said = messages(both, speech.pcm, patient=True)
    deltas = "".join(m["delta"] for m in said if m["type"] == "text")
    segments = [m for m in said if m["type"] == "segment"]
    assert " ".join(deltas.split()) == " ".join(m["text"] for m in segments) == patient != greedy
    frames = [c["frame"] for m in said if m["type"] == "text" for c in m["characters"]]
    assert frames == sorted(frames) and len(frames) > 20
    for segment in segments:
        assert " ".join(w["word"] for w in segment["words"]) == segment["text"]


def test_ready_says_how_patient_the_stream_is(both: Server, server: Server, speech: Clip, bundled: Recognizer):
    frame_ms = 1000 * bundled.frame_samples / bundled.sample_rate
    told = [messages(s, b"", **start)[0]["patience_ms"] for s, start in ((both, {"patient": True}), (both, {}))]
    assert told == [400 // frame_ms * frame_ms, 0]
    assert messages(server, b"", patient=True)[0]["patience_ms"] == 0, "a server that has no such streams says so"
    assert native(server.url, speech.pcm, patient=True).text == native(server.url, speech.pcm).text


async def test_streams_of_both_kinds_at_once(both: Server, speech: Clip, patient: str, greedy: str):
    wanted: list[bool | None] = [True, None, False, True, None, True]
    texts = await asyncio.gather(*(asyncio.to_thread(native, both.url, speech.pcm, patient=w) for w in wanted))
    assert [t.text for t in texts] == [patient if w else greedy for w in wanted]
    assert await both.streams_left() == 0


async def test_they_share_the_places_of_the_server(make_server: Any, bundled: Recognizer):
    server = make_server(bundled, **PATIENCE | {"max_streams": 2})
    async with StreamingClient(server.url, patient=True), StreamingClient(server.url, patient=False):
        health = await asyncio.to_thread(httpx.get, f"{server.http}/health")
        assert health.json()["streams"] == 2
        for wanted in (True, False):
            with pytest.raises(ClientError) as refused:
                await StreamingClient(server.url, patient=wanted).__aenter__()
            assert refused.value.code is ErrorCode.SERVER_FULL


async def test_clients_of_others_ask_by_the_name_of_the_model(both: Server, speech: Clip, patient: str, greedy: str):
    listed = await asyncio.to_thread(httpx.get, f"{both.http}/v1/models")
    plain, without, named = (m["id"] for m in listed.json()["data"])
    for name, expected in ((named, patient), (without, greedy), (plain, greedy), ("whisper-1", greedy)):
        assert text_of(finals(listen(both, speech.pieces(), model=name))) == expected
        async with connect(address(both)) as socket:
            await socket.send(json.dumps({"config": {"sample_rate": 16_000, "model": name}}))
            replies = await lockstep(socket, [*speech.pieces(), EOF])
        assert " ".join(r["text"] for r in replies if r.get("text")) == expected
        audio_input = {"format": {"type": "audio/pcm", "rate": 16_000}, "transcription": {"model": name}}
        async with session(both, turn_detection=None, **audio_input) as connection:
            await append(connection, speech.pieces())
            await connection.input_audio_buffer.commit()
            assert (await until(connection, f"{INPUT}.completed"))[-1].transcript == expected
    assert await both.streams_left() == 0


async def test_another_kind_from_the_next_utterance_on(both: Server, speech: Clip, patient: str, greedy: str):
    audio_input = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}
    async with session(both, **audio_input) as connection:
        for asked, told, expected in (
            ({"model": "mocha-asr-patient", "delay": "minimal"}, "mocha-asr-patient", patient),  # our own name counts
            ({"model": "gpt-realtime-whisper"}, "mocha-asr", greedy),
            ({"delay": "xhigh"}, "mocha-asr", patient),
            ({"delay": "minimal"}, "mocha-asr", greedy),
        ):
            body = {"type": "transcription", "audio": {"input": {"transcription": asked}}}
            await connection.session.update(session=body)
            updated = (await until(connection, "session.updated"))[-1].session.audio.input.transcription
            assert (updated.model, updated.delay) == (told, asked.get("delay", updated.delay))
            await append(connection, speech.pieces())
            await connection.input_audio_buffer.commit()
            assert (await until(connection, f"{INPUT}.completed"))[-1].transcript == expected
    assert await both.streams_left() == 0


def test_our_clients_ask_for_it(both: Server, speech: Clip, patient: str, greedy: str):
    for wanted, expected in ((True, patient), (None, greedy)):
        events = transcribe_stream([speech.pcm], both.url, patient=wanted)
        assert " ".join(e.text for e in events if isinstance(e, Segment)) == expected
    with wave.open(str(FIXTURES / "weather.wav")) as file:
        weather = file.readframes(file.getnframes())
    command = [str(Path(sys.executable).with_name("mocha-asr")), "stream", "--url", both.url]
    for option, wanted in (("--patient", True), ("--greedy", False)):
        done = subprocess.run([*command, option, str(FIXTURES / "weather.wav")], capture_output=True, timeout=100)
        assert done.stdout.decode().strip() == native(both.url, weather, patient=wanted).text


async def test_a_server_may_be_patient_unless_asked_otherwise(
    make_server: Any, bundled: Recognizer, speech: Clip, patient: str, greedy: str
):
    server = make_server(bundled, patient=True, final_beam=4, **PATIENCE)
    assert native(server.url, speech.pcm).text == patient
    await others_get_the_same_results(server, speech)
    said = messages(server, speech.pcm, patient=False)
    deltas = "".join(m["delta"] for m in said if m["type"] == "text")
    assert " ".join(deltas.split()) == greedy != " ".join(m["text"] for m in said if m["type"] == "segment")


def test_what_is_not_set():
    settings = Settings()
    assert settings.live_beam > 0 and not settings.patient
