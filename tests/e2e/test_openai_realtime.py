"""OpenAI's Realtime API, transcription sessions, with the `openai` package unmodified; `websockets` for bad input."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from tests.e2e.conftest import exchange
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from mocha_model.recognizer import Recognizer

INPUT = "conversation.item.input_audio_transcription"
PCM16K = {"type": "audio/pcm", "rate": 16_000}


@asynccontextmanager
async def session(server: Any, greeted: bool = True, **audio_input: Any) -> AsyncIterator[Any]:
    """A connection of the SDK, configured."""
    async with (
        AsyncOpenAI(api_key="any", base_url=f"{server.http}/v1", max_retries=0) as client,
        client.realtime.connect(model="whisper-1", extra_query={"intent": "transcription"}) as connection,
    ):
        if greeted:
            assert (await connection.recv()).type == "session.created"
        if audio_input:
            transcription = {"model": "whisper-1", "language": "en"}
            body = {"type": "transcription", "audio": {"input": {"transcription": transcription} | audio_input}}
            await connection.session.update(session=body)
            assert (await connection.recv()).type == "session.updated"
        yield connection


@asynccontextmanager
async def recorded(name: str, server: Any, **audio_input: Any) -> AsyncIterator[Any]:
    """A connection of 16 kHz that goes as the exchange of that name."""
    with exchange(name, server):
        async with session(server, format=PCM16K, **audio_input) as connection:
            yield connection


async def append(connection: Any, pieces: list[bytes]) -> None:
    for piece in pieces:
        await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())


async def until(connection: Any, kind: str) -> list[Any]:
    events = []
    while not events or events[-1].type != kind:
        events.append(await connection.recv())
        assert events[-1].type != "error", events[-1]
    return events


async def until_error(connection: Any, code: str) -> list[Any]:
    events = [await connection.recv()]
    while events[-1].type not in ("error", f"{INPUT}.completed"):
        events.append(await connection.recv())
    assert events[-1].type == "error" and events[-1].error.code == code
    return events


def deltas(events: list[Any]) -> str:
    return "".join(e.delta for e in events if e.type == f"{INPUT}.delta")


async def test_manual_commits_give_the_native_text(any_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(any_server, speech.pcm).text
    previous = None
    async with recorded("openai-python-realtime", any_server, turn_detection=None) as connection:
        for _ in range(2):
            await append(connection, speech.pieces())
            await connection.input_audio_buffer.commit()
            events = await until(connection, f"{INPUT}.completed")
            done = events[-1]
            assert done.transcript == expected and done.content_index == 0
            assert done.usage.type == "duration" and done.usage.seconds == pytest.approx(speech.seconds, abs=1.01)
            assert deltas(events).split() == expected.split()
            assert {e.item_id for e in events if hasattr(e, "item_id")} == {done.item_id}
            kinds = [e.type for e in events]
            committed = kinds.index("input_audio_buffer.committed")
            assert kinds[committed + 1] == "conversation.item.created"
            assert events[committed].previous_item_id == previous
            assert kinds.index(f"{INPUT}.delta") < committed  # as emitted, before the turn is over
            assert len({e.event_id for e in events}) == len(events)
            previous = done.item_id
    assert await any_server.streams_left() == 0


async def test_server_vad_ends_turns_where_segments_end(server: Any, speech: Any, heard: Callable[..., Any]):
    paused = replace(speech, samples=np.concatenate([speech.samples, np.zeros(32_000, np.int16)]))
    expected = heard(server, paused.pcm)
    assert len(expected.segments) >= 2  # all ended by the pauses
    vad = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 100, "silence_duration_ms": 500}
    async with recorded("openai-python-realtime-vad", server, turn_detection=vad) as connection:
        await append(connection, paused.pieces())
        turns = [await until(connection, f"{INPUT}.completed") for _ in expected.segments]
    for turn, segment in zip(turns, expected.segments, strict=True):
        assert turn[-1].transcript == deltas(turn).strip() == segment["text"]
        assert [e.type for e in turn if not e.type.endswith(".delta")] == [
            "input_audio_buffer.speech_started",
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
            "conversation.item.created",
            f"{INPUT}.completed",
        ]
        start_ms = next(e.audio_start_ms for e in turn if e.type.endswith("speech_started"))
        assert abs(start_ms + 100 - 1000 * segment["start"]) < 100
        assert next(e.audio_end_ms for e in turn if e.type.endswith("stopped")) == round(1000 * segment["end"])
        assert len({e.item_id for e in turn if hasattr(e, "item_id")}) == 1
    committed = next(e for e in turns[1] if e.type == "input_audio_buffer.committed")
    assert committed.previous_item_id == turns[0][-1].item_id
    assert len({t[-1].item_id for t in turns}) == len(turns)


async def test_a_turn_that_ends_leaves_what_was_appended_after_it(server: Any, speech: Any, heard: Callable[..., Any]):
    more = replace(speech, samples=np.concatenate([speech.samples, np.zeros(32_000, np.int16), speech.samples]))
    expected = heard(server, more.pcm)
    async with session(server, format=PCM16K, turn_detection={"type": "server_vad"}) as connection:
        await append(connection, [more.pcm])  # heard long after it was appended
        await connection.input_audio_buffer.commit()
        done: list[Any] = []
        while " ".join(e.transcript for e in done).strip() != expected.text:
            done.append((await until(connection, f"{INPUT}.completed"))[-1])
    assert len(done) >= 2
    assert sum(e.usage.seconds for e in done) == pytest.approx(len(more.samples) / 16_000, abs=len(done))


async def test_the_default_is_24_khz_and_server_vad(lively_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(lively_server, speech.pcm, sample_rate=24_000)
    async with session(lively_server) as connection:
        await append(connection, speech.pieces())
        await connection.input_audio_buffer.commit()
        found: list[str] = []
        while len(found) < len(expected.segments) and " ".join(found) != expected.text:
            found.append((await until(connection, f"{INPUT}.completed"))[-1].transcript)
    assert " ".join(found) == expected.text


@pytest.mark.parametrize(("kind", "encoding"), [("audio/pcmu", "mulaw"), ("audio/pcma", "alaw")])
async def test_telephony(lively_server: Any, heard: Callable[..., Any], kind: str, encoding: str):
    audio = bytes(range(256)) * 60
    async with session(lively_server, format={"type": kind}, turn_detection=None) as connection:
        await append(connection, [audio])
        await connection.input_audio_buffer.commit()
        done = (await until(connection, f"{INPUT}.completed"))[-1]
    assert done.transcript == heard(lively_server, audio, encoding=encoding, sample_rate=8_000).text


async def test_clear_forgets_what_was_appended(any_server: Any, speech: Any, heard: Callable[..., Any]):
    async with session(any_server, format=PCM16K, turn_detection=None) as connection:
        await append(connection, speech.pieces()[:20])
        await connection.input_audio_buffer.clear()
        await until(connection, "input_audio_buffer.cleared")
        await append(connection, speech.pieces())
        await connection.input_audio_buffer.commit()
        events = await until(connection, f"{INPUT}.completed")
    assert events[-1].transcript == heard(any_server, speech.pcm).text
    assert deltas(events).split() == events[-1].transcript.split()


async def test_what_is_cleared_cannot_be_committed(lively_server: Any, speech: Any):
    async with session(lively_server, format=PCM16K, turn_detection=None) as connection:
        await append(connection, speech.pieces())
        await connection.input_audio_buffer.clear()
        await connection.input_audio_buffer.commit()
        kinds = [event.type for event in await until_error(connection, "input_audio_buffer_commit_empty")]
        assert "input_audio_buffer.cleared" in kinds and "input_audio_buffer.committed" not in kinds


async def test_mistakes_are_error_events_and_the_session_goes_on(lively_server: Any, speech: Any):
    async with session(lively_server, format=PCM16K, turn_detection=None) as connection:

        async def code(**event: Any) -> tuple[str, str | None]:
            await connection.send({"event_id": "mine", **event})
            while (answer := await connection.recv()).type == f"{INPUT}.delta":
                pass  # text of what was appended comes when it is read
            assert answer.type == "error" and answer.error.type == "invalid_request_error"
            assert answer.error.event_id == "mine" and answer.error.message
            return answer.error.code, answer.error.param

        assert await code(type="input_audio_buffer.commit") == ("input_audio_buffer_commit_empty", None)
        assert await code(type="input_audio_buffer.append", audio="***") == ("invalid_base64", "audio")
        assert (await code(type="input_audio_buffer.append"))[0] == "invalid_event"
        assert (await code(type="response.create"))[0] == "invalid_event"
        assert (await code(type="session.update", session={"type": "realtime"})) == ("invalid_event", "session")
        bad_rate = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 1}}}}
        assert (await code(type="session.update", session=bad_rate))[1] == "session"
        bad_type = {"audio": {"input": {"format": {"type": "audio/opus"}}}}
        assert (await code(type="session.update", session=bad_type))[1] == "session"
        for bad in ({"audio": 7}, {"input_audio_format": "g711_ulaw"}, {"x": 10**30}, {"x": "x" * 70_000}):
            assert (await code(type="session.update", session=bad))[1] == "session"
        await append(connection, [b""])  # is no audio yet
        for other in ({"type": "audio/pcmu"}, PCM16K):
            update = {"audio": {"input": {"format": other}}}
            await connection.send({"type": "session.update", "session": {"type": "transcription", **update}})
            assert (await connection.recv()).type == "session.updated"
        await append(connection, speech.pieces()[:1])
        late = {"audio": {"input": {"format": {"type": "audio/pcmu"}}}}
        assert (await code(type="session.update", session=late))[1] == "session.audio.input.format"
        await append(connection, speech.pieces())
        await connection.input_audio_buffer.commit()
        assert (await until(connection, f"{INPUT}.completed"))[-1].transcript


@pytest.mark.parametrize("data", ["hello", "[]", "7", '"x"', b"\0\1", '{"event_id":7}'])
async def test_what_is_no_event(lively_server: Any, data: str | bytes):
    async with connect(f"ws://127.0.0.1:{lively_server.port}/v1/realtime") as socket:  # without a model
        assert json.loads(await socket.recv())["type"] == "session.created"
        await socket.send(data)
        assert json.loads(await socket.recv())["error"]["code"] == "invalid_event"
        await socket.send('{"type":"input_audio_buffer.clear"}')
        assert json.loads(await socket.recv())["type"] == "input_audio_buffer.cleared"


async def test_an_update_changes_only_what_it_names(lively_server: Any):
    async with session(lively_server, format=PCM16K, turn_detection=None) as connection:
        await connection.session.update(session={"type": "transcription", "include": []})
        event = await connection.recv()
        assert event.session.audio.input.format.rate == 16_000
        assert event.session.audio.input.turn_detection is None
        assert event.session.audio.input.transcription.model == "lively"
        await connection.session.update(
            session={"type": "transcription", "audio": {"input": {"format": {"rate": 48_000}}}}
        )
        assert (await connection.recv()).session.audio.input.format.rate == 48_000
        same = {"format": {"type": "audio/pcm"}, "turn_detection": None}
        await connection.session.update(session={"type": "transcription", "audio": {"input": same}})
        assert (await connection.recv()).session.audio.input.format.rate == 48_000


async def test_a_full_server(make_server: Any, lively: Recognizer):
    server = make_server(lively, max_streams=1)
    async with session(server, format=PCM16K), session(server) as second:
        with pytest.raises(ConnectionClosed) as closed:
            await second.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1013
        assert "all 1 streams" in closed.value.rcvd.reason


async def test_an_idle_client_is_told(make_server: Any, lively: Recognizer):
    server = make_server(lively, idle_s=0.3)
    async with session(server) as connection:
        with pytest.raises(ConnectionClosed) as closed:
            await connection.recv()
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    assert "nothing was sent" in closed.value.rcvd.reason
    assert await server.streams_left() == 0
