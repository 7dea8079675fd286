"""The pause that ends a segment, as clients of every protocol ask for it."""

from typing import Any

import pytest
from tests.e2e.conftest import native
from tests.e2e.test_deepgram import finals, http, listen  # noqa: F401 `http` is a fixture
from tests.e2e.test_openai_realtime import append, session, until

from mocha_client.client import transcribe_stream
from mocha_server.messages import Segment

pytestmark = pytest.mark.filterwarnings("ignore:websockets.* is deprecated:DeprecationWarning")
FORMAT = {"type": "audio/pcm", "rate": 16_000}
LONG_MS = 5_000  # longer than any in the recording
INPUT = "conversation.item.input_audio_transcription"


@pytest.fixture(scope="module")
def expected(server: Any, speech: Any) -> list[str]:
    """The segments of a stream in which no pause is long enough."""
    texts = [segment["text"] for segment in native(server.url, speech.pcm, pause_ms=LONG_MS).segments]
    assert len(texts) < len(native(server.url, speech.pcm).segments)
    return texts


def test_python(server: Any, speech: Any, expected: list[str]):
    events = transcribe_stream([speech.pcm], server.url, pause_ms=LONG_MS)
    assert [event.text for event in events if isinstance(event, Segment)] == expected


def test_deepgram(server: Any, speech: Any, expected: list[str]):
    results = finals(listen(server, speech.pieces(), endpointing=LONG_MS))
    assert " ".join(r.channel.alternatives[0].transcript for r in results).split() == " ".join(expected).split()
    assert sum(bool(r.speech_final) for r in results) == len(expected)


async def test_openai_realtime(server: Any, speech: Any, expected: list[str]):
    detection = {"type": "server_vad", "silence_duration_ms": LONG_MS}
    async with session(server, format=FORMAT, turn_detection=detection) as connection:
        await append(connection, speech.pieces())
        await connection.input_audio_buffer.commit()
        events = await until(connection, f"{INPUT}.completed")
    assert events[-1].transcript == " ".join(expected)
    assert sum(event.type == "input_audio_buffer.committed" for event in events) == len(expected)


def test_shorter_than_any_is_the_shortest(server: Any, speech: Any):
    shortest = native(server.url, speech.pcm, pause_ms=200)
    results = finals(listen(server, speech.pieces(), endpointing=10))
    assert [r.channel.alternatives[0].transcript for r in results] == [s["text"] for s in shortest.segments]
