"""Wyoming with its own client library, as Home Assistant uses it, and raw sockets for what the library cannot send."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
import typer
from tests.e2e.conftest import exchange
from tests.exchanges import relay
from wyoming.asr import Transcribe, Transcript, TranscriptChunk, TranscriptStart, TranscriptStop
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong

from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer
from mocha_server.cli import serve
from mocha_server.protocols import wyoming


@pytest.fixture
def small(make_server: Any, lively: Recognizer) -> Any:
    return make_server(lively, wyoming_port=0, idle_s=2, max_streams=1)


def client(server: Any) -> AsyncTcpClient:
    return AsyncTcpClient("127.0.0.1", server.app.state.wyoming_port, read_timeout=30)


async def until_stop(connected: AsyncTcpClient) -> list[Event]:
    events = []
    while (event := await connected.read_event()) is not None:
        events.append(event)
        if TranscriptStop.is_type(event.type) or Error.is_type(event.type):
            break
    return events


async def transcribe(connected: AsyncTcpClient, pieces: list[bytes], rate: int = 16_000, **asked: Any) -> list[Event]:
    await connected.write_event(Transcribe(language="en", **asked).event())
    return await speak(connected, pieces, rate)


async def speak(connected: AsyncTcpClient, pieces: list[bytes], rate: int = 16_000) -> list[Event]:
    await connected.write_event(AudioStart(rate=rate, width=2, channels=1).event())
    for piece in pieces:
        await connected.write_event(AudioChunk(rate=rate, width=2, channels=1, audio=piece).event())
    await connected.write_event(AudioStop().event())
    return await until_stop(connected)


async def test_describe(small: Any):
    async with client(small) as connected:
        await connected.write_event(Describe().event())
        event = await connected.read_event()
    assert event is not None and Info.is_type(event.type)
    (program,) = Info.from_event(event).asr
    assert program.supports_transcript_streaming and program.installed
    assert program.models[0].name == "lively" and program.models[0].languages == ["en"]
    assert await small.streams_left() == 0


async def test_a_ping_is_answered_with_its_text(small: Any):
    async with client(small) as connected:
        await connected.write_event(Ping(text="still there?").event())
        event = await connected.read_event()
    assert event is not None and Pong.is_type(event.type) and Pong.from_event(event).text == "still there?"


async def test_an_event_may_say_that_it_has_no_data(small: Any):
    reader, writer = await asyncio.open_connection("127.0.0.1", small.app.state.wyoming_port)
    writer.write(b'{"type": "describe", "data": null, "data_length": null}\n')
    assert json.loads(await asyncio.wait_for(reader.readline(), 30))["type"] == "info"
    writer.close()


async def test_a_file_gives_the_native_text_again_and_again(any_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(any_server, speech.pcm).text
    with exchange("wyoming", any_server) as found:
        async with (
            relay(found, any_server.app.state.wyoming_port) as port,
            AsyncTcpClient("127.0.0.1", port, read_timeout=30) as connected,
        ):
            await connected.write_event(Describe().event())
            assert Info.is_type((await connected.read_event() or Event("gone")).type)
            transcripts = [await transcribe(connected, speech.pieces(2048)) for _ in range(2)]
    for events in transcripts:
        assert TranscriptStart.is_type(events[0].type)
        assert [e.type for e in events[-2:]] == ["transcript", "transcript-stop"]
        assert Transcript.from_event(events[-2]).text == expected
        chunks = [TranscriptChunk.from_event(e).text for e in events if TranscriptChunk.is_type(e.type)]
        assert "".join(chunks).split() == expected.split() and len(chunks) > 1


async def test_other_rates(any_server: Any, speech: Any, heard: Callable[..., Any]):
    async with client(any_server) as connected:
        events = await transcribe(connected, speech.pieces(), rate=22_050)
    assert Transcript.from_event(events[-2]).text == heard(any_server, speech.pcm, sample_rate=22_050).text


async def test_names_and_terms_are_favoured_in_their_own_transcript(
    make_server: Any, lively: Recognizer, speech: Any, heard: Callable[..., Any]
):
    willing = Recognizer(lively.model, lively.tokenizer, phrases=PhraseBook(lively.tokenizer, 100.0))
    server = make_server(willing, wyoming_port=0)
    others, long = [f"q{a}{b}" for a in "abcdefghijklmno" for b in "pqrstuvwxyzabc"], "z" * 61
    assert len(others) > 200

    async def text(**asked: Any) -> str:
        return Transcript.from_event((await transcribe(connected, speech.pieces(), **asked))[-2]).text

    def native(*phrases: str) -> str:
        return str(heard(server, speech.pcm, phrases=list(phrases)).text)

    assert len({native(), native("Qzqz"), native("jj xx"), native("Qzqz", *others[:199])}) == 4
    async with client(server) as connected:
        assert await text(transcript_names=["Qzqz"]) == native("Qzqz")
        assert Transcript.from_event((await speak(connected, speech.pieces()))[-2]).text == native()
        assert await text(transcript_terms=["jj xx"]) == native("jj xx")
        assert await text(transcript_terms=others, transcript_names=["Qzqz", long]) == native("Qzqz", *others[:199])
        await connected.write_event(Transcribe(transcript_names=["Qzqz"]).event())  # the one in `text` replaces it
        assert await text() == native()
    assert await server.streams_left() == 0


@pytest.mark.parametrize("data", [{"transcript_names": "Qzqz"}, {"transcript_terms": [1]}])
async def test_names_and_terms_that_are_no_lists_of_texts(small: Any, data: dict[str, Any]):
    async with client(small) as connected:
        await connected.write_event(Event("transcribe", data))
        (error,) = await until_stop(connected)
        assert Error.from_event(error).code == "invalid_message"


async def test_no_audio(server: Any):
    async with client(server) as connected:
        events = await transcribe(connected, [])
    assert [e.type for e in events] == ["transcript-start", "transcript", "transcript-stop"]
    assert Transcript.from_event(events[1]).text == ""


async def test_unknown_events_are_dropped(small: Any, speech: Any):
    async with client(small) as connected:
        await connected.write_event(Event("select-program", {"name": "x"}))
        await connected.write_event(Event("something-new", {"a": 1}, b"payload"))
        assert (await transcribe(connected, speech.pieces()))[-1].type == "transcript-stop"


@pytest.mark.parametrize(
    "event",
    [
        AudioStart(rate=1, width=2, channels=1).event(),
        AudioStart(rate=16_000, width=4, channels=1).event(),
        AudioStart(rate=16_000, width=2, channels=0).event(),
        Event("audio-chunk", {}, b"\0\0"),
    ],
)
async def test_audio_that_cannot_be_used(small: Any, event: Event):
    async with client(small) as connected:
        await connected.write_event(event)
        (error,) = await until_stop(connected)
        assert Error.from_event(error).code == "invalid_message"
        assert await connected.read_event() is None
    assert await small.streams_left() == 0


@pytest.mark.parametrize(
    "data",
    [
        b"hello\n",
        b"[]\n",
        b'{"type":"audio-chunk","payload_length":-1}\n',
        b'{"type":"audio-chunk","payload_length":99999999999}\n',
        b'{"type":"x","data_length":2}\n[]',
        b'{"type":"x","data_length":2}\n{{',
        b'{"type":"ping","data":{"text":123456789012345678901234567890}}\n',
        b"x" * 200_000,
    ],
)
async def test_bytes_that_are_no_events(small: Any, data: bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", small.app.state.wyoming_port)
    writer.write(data)
    header = json.loads(await reader.readline())
    body = json.loads(await reader.readexactly(header["data_length"]))
    assert header["type"] == "error" and body["code"] == "invalid_message"
    writer.close()


async def test_a_format_that_changes_and_an_idle_client(small: Any):
    async with client(small) as connected:
        await connected.write_event(AudioStart(rate=16_000, width=2, channels=1).event())
        await connected.write_event(AudioStart(rate=8_000, width=2, channels=1).event())
        assert Error.from_event((await until_stop(connected))[0]).code == "invalid_audio"
    async with client(small) as connected:
        assert Error.from_event((await until_stop(connected))[0]).code == "idle"


async def test_a_full_server_and_a_client_that_vanishes(small: Any, speech: Any):
    first = client(small)
    await first.connect()
    await first.write_event(AudioChunk(rate=16_000, width=2, channels=1, audio=bytes(3200)).event())
    assert await small.streams_left(1) == 1
    async with client(small) as second:
        error = (await transcribe(second, [bytes(3200)]))[-1]
        assert Error.from_event(error).code == "server_full"
    await first.disconnect()
    assert await small.streams_left(0) == 0
    async with client(small) as third:
        assert (await transcribe(third, speech.pieces()))[-1].type == "transcript-stop"


async def test_a_client_that_does_not_read_is_given_up(small: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wyoming, "SLOW_S", 0.3)
    with socket.create_connection(("127.0.0.1", small.app.state.wyoming_port)) as asking:
        asking.setblocking(False)
        ask = b'{"type":"describe"}\n' * 100_000  # whose answers are more than sockets hold
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(asking, ask * 20), 60)


def test_off_by_default(make_server: Any, lively: Recognizer):
    assert make_server(lively).app.state.wyoming_port is None


def test_a_port_in_use_is_said_plainly(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(typer.Exit):
            serve(wyoming_port=port)
    assert f"127.0.0.1:{port}" in capsys.readouterr().err.replace("\n", "")
