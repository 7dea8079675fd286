"""Live segments settled by joint search when they end: the same finals in every protocol, and live text as ever."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tests.conftest import Server
from tests.e2e.conftest import Clip, native
from tests.e2e.test_deepgram import finals, http, listen, text_of  # noqa: F401 `http` is a fixture
from tests.e2e.test_vosk import CONFIG, EOF, address, lockstep
from websockets.asyncio.client import connect
from websockets.sync.client import connect as connect_sync

from mocha_model.recognizer import Recognizer
from mocha_server.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:websockets.* is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def settling_server(bundled: Recognizer) -> Iterator[Server]:
    running = Server(bundled, final_beam=4, file_beam=4, max_streams=8)
    yield running
    running.stop()


def messages(server: Any, pcm: bytes, **start: Any) -> list[dict[str, Any]]:
    with connect_sync(server.url) as socket:
        socket.send(json.dumps({"type": "start", **start}))
        for at in range(0, len(pcm), 5_000):
            socket.send(pcm[at : at + 5_000])
        socket.send('{"type":"finish"}')
        return [json.loads(message) for message in socket]


def test_live_text_is_as_ever_and_segments_are_settled(settling_server: Server, server: Server, speech: Clip):
    settled, greedy = (messages(s, speech.pcm) for s in (settling_server, server))
    deltas = [[m["delta"] for m in found if m["type"] == "text"] for found in (settled, greedy)]
    assert "".join(deltas[0]).split() == "".join(deltas[1]).split() != []
    said = " ".join(m["text"] for m in settled if m["type"] == "segment")
    upload = httpx.post(
        f"{settling_server.http}/v1/audio/transcriptions", files={"file": ("s.wav", speech.wav)}, timeout=120
    )
    assert said == upload.json()["text"] != "".join(deltas[0]).strip()
    for segment in (m for m in settled if m["type"] == "segment"):
        assert " ".join(w["word"] for w in segment["words"]) == segment["text"]
        assert segment["start"] == segment["words"][0]["start"] < segment["words"][-1]["end"] == segment["end"]


def test_an_upload_that_is_read_as_streams_are_ends_with_what_is_settled(bundled: Recognizer, speech: Clip):
    server = Server(bundled, final_beam=4, file_beam=0, max_streams=8)
    try:
        client = OpenAI(base_url=f"{server.http}/v1", api_key="none")
        whole = client.audio.transcriptions.create(file=("s.wav", speech.wav), model="whisper-1")
        events = list(client.audio.transcriptions.create(file=("s.wav", speech.wav), model="whisper-1", stream=True))
    finally:
        server.stop()
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text
    assert "".join(e.delta for e in events if e.type == "transcript.text.delta").strip() != whole.text  # live text


async def others_get_the_same_results(server: Server, speech: Clip) -> None:
    """Whether clients of vosk and Deepgram get the text that the native protocol gives."""
    expected = native(server.url, speech.pcm)
    async with connect(address(server)) as socket:
        await socket.send(CONFIG % 16_000)
        replies = await lockstep(socket, [*speech.pieces(), EOF])
    assert " ".join(r["text"] for r in replies if r.get("text")) == expected.text
    assert text_of(finals(listen(server, speech.pieces()))) == expected.text


async def test_clients_of_others_get_settled_results(settling_server: Server, speech: Clip):
    await others_get_the_same_results(settling_server, speech)


def test_it_is_off_unless_asked_for():
    assert Settings().final_beam == 0
