"""Deepgram's protocol with its own SDK, unmodified: live and pre-recorded, sync and async."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from deepgram import AsyncDeepgramClient, DeepgramClient
from deepgram.core.api_error import ApiError
from deepgram.environment import DeepgramClientEnvironment
from deepgram.listen.v1.types import (
    ListenV1Configure,
    ListenV1ConfigureFailure,
    ListenV1ConfigureSuccess,
    ListenV1Error,
    ListenV1Metadata,
    ListenV1Results,
)
from tests.e2e.conftest import exchange
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
# The SDK imports an old name of websockets' for a fallback.
pytestmark = pytest.mark.filterwarnings("ignore:websockets.* is deprecated:DeprecationWarning")
RAW = {"model": "nova-3", "encoding": "linear16", "sample_rate": 16_000}


def environment(server: Any) -> DeepgramClientEnvironment:
    ws = f"ws://127.0.0.1:{server.port}"
    return DeepgramClientEnvironment(base=server.http, production=ws, agent=ws, agent_rest=server.http)


HTTP: list[httpx.Client] = []


@pytest.fixture(autouse=True, scope="module")
def http() -> Iterator[None]:
    """The SDK does not close its HTTP client; it takes one that we close."""
    with httpx.Client(timeout=60) as client:
        HTTP[:] = [client]
        yield


def sdk(server: Any) -> DeepgramClient:
    return DeepgramClient(api_key="any", environment=environment(server), httpx_client=HTTP[0])


def listen(server: Any, pieces: list[bytes], **options: Any) -> list[Any]:
    """Everything the SDK yields for a stream that is closed in order."""
    with sdk(server).listen.v1.connect(**(RAW | options)) as connection:
        for piece in pieces:
            connection.send_media(piece)
        connection.send_close_stream()
        return list(connection)


def finals(messages: list[Any]) -> list[ListenV1Results]:
    return [m for m in messages if isinstance(m, ListenV1Results) and m.is_final]


def text_of(results: list[ListenV1Results]) -> str:
    return " ".join(t for r in results if (t := r.channel.alternatives[0].transcript))


def refused_status(server: Any, **options: Any) -> int:
    """The HTTP status with which a handshake is refused; which error the SDK raises depends on its websockets."""
    with pytest.raises((ApiError, InvalidStatus)) as refused:
        listen(server, [], **options)
    error = refused.value
    return int(error.response.status_code if isinstance(error, InvalidStatus) else error.status_code or 0)


async def test_a_stream_gives_the_native_text_and_words(any_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(any_server, speech.pcm)
    messages = listen(any_server, speech.pieces())
    results = finals(messages)
    assert text_of(results) == expected.text and len(results) == len(expected.segments)
    words = [w for r in results for w in r.channel.alternatives[0].words]
    assert [(w.word, w.start, w.end) for w in words] == [(w["word"], w["start"], w["end"]) for w in expected.words]
    assert all(r.speech_final and not r.from_finalize and r.metadata.model_info.arch == "mocha" for r in results)
    assert [r for r in messages if isinstance(r, ListenV1Results)] == results  # no interim ones unless asked for
    metadata = messages[-1]
    assert isinstance(metadata, ListenV1Metadata) and metadata.duration == pytest.approx(speech.seconds, abs=1e-3)
    assert await any_server.streams_left() == 0


def test_interim_results_only_grow(any_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(any_server, speech.pcm).text
    with exchange("deepgram-python", any_server):
        messages = listen(any_server, speech.pieces(), interim_results=True)
    results = [m for m in messages if isinstance(m, ListenV1Results)]
    assert text_of(finals(messages)) == expected
    before = ""
    for result in results:
        best = result.channel.alternatives[0]
        assert best.transcript.startswith(before)
        assert [w.word for w in best.words] == best.transcript.split()
        before = "" if result.is_final else best.transcript
    assert sum(not r.is_final for r in results) > len(finals(messages))


async def test_the_async_client_and_events(server: Any, speech: Any, heard: Callable[..., Any]):
    http = httpx.AsyncClient()
    client = AsyncDeepgramClient(api_key="any", environment=environment(server), httpx_client=http)
    options = RAW | {"vad_events": True, "utterance_end_ms": 1000, "smart_format": True, "endpointing": 300}
    expected = heard(server, speech.pcm)
    with exchange("deepgram-python-events", server):
        async with client.listen.v1.connect(**options) as connection:
            for piece in speech.pieces():
                await connection.send_media(piece)
            await connection.send_close_stream()
            messages = [m async for m in connection]
    await http.aclose()
    assert text_of(finals(messages)) == expected.text
    kinds = [m.type for m in messages]
    assert kinds.count("SpeechStarted") == kinds.count("UtteranceEnd") == len(expected.segments)
    ends = [m.last_word_end for m in messages if m.type == "UtteranceEnd"]
    assert ends == [s["end"] for s in expected.segments]


@pytest.mark.parametrize("options", [{}, {"endpointing": "false"}])
def test_finalize_flushes_and_the_stream_goes_on(
    any_server: Any, speech: Any, heard: Callable[..., Any], options: dict[str, str]
):
    expected = heard(any_server, speech.pcm)
    with sdk(any_server).listen.v1.connect(**RAW, **options) as connection:
        texts, starts = [], []
        for _ in range(2):
            for piece in speech.pieces():
                connection.send_media(piece)
            connection.send_keep_alive()
            connection.send_finalize()
            results = []
            while not results or not results[-1].from_finalize:
                results.append(connection.recv())
            assert results[-1].is_final and results[-1].speech_final
            texts.append(text_of(results))
            starts.append(np.array([w.start for r in results for w in r.channel.alternatives[0].words]))
        connection.send_close_stream()
        rest = list(connection)
    assert texts == [expected.text, expected.text]
    assert np.allclose(starts[1] - starts[0], speech.seconds, atol=2e-3)
    assert rest[-1].duration == pytest.approx(2 * speech.seconds, abs=1e-2)


async def test_an_empty_message_ends_the_stream(lively_server: Any, speech: Any, heard: Callable[..., Any]):
    url = f"ws://127.0.0.1:{lively_server.port}/v1/listen?encoding=linear16&sample_rate=16000"
    async with connect(url) as socket:
        for piece in [*speech.pieces(), b""]:
            await socket.send(piece)
        said = [json.loads(message) async for message in socket]
    finals = [m["channel"]["alternatives"][0]["transcript"] for m in said if m["type"] == "Results"]
    assert " ".join(filter(None, finals)) == heard(lively_server, speech.pcm).text
    assert said[-1]["type"] == "Metadata" and socket.close_code == 1000


def test_finalize_with_nothing_said(server: Any):
    with sdk(server).listen.v1.connect(**RAW) as connection:
        connection.send_finalize()
        result = connection.recv()
        assert result.from_finalize and result.is_final and result.channel.alternatives[0].transcript == ""


@pytest.fixture
def willing_server(make_server: Any, lively: Recognizer) -> Any:
    """Favoured phrases are written wherever they can be."""
    return make_server(Recognizer(lively.model, lively.tokenizer, phrases=PhraseBook(lively.tokenizer, 100.0)))


def configured(connection: Any, **changes: Any) -> ListenV1ConfigureSuccess:
    """The answer to a `Configure` that nothing is wrong with."""
    connection.send_configure(ListenV1Configure(**changes))
    answer = connection.recv()
    assert isinstance(answer, ListenV1ConfigureSuccess) and answer.request_id
    return answer


def finalized(connection: Any, pieces: list[bytes]) -> str:
    """The text of what is sent until it is flushed."""
    for piece in pieces:
        connection.send_media(piece)
    connection.send_finalize()
    results: list[ListenV1Results] = []
    while not results or not results[-1].from_finalize:
        results.append(connection.recv())
    return text_of(results)


async def test_configure_replaces_the_keyterms(willing_server: Any, speech: Any, heard: Callable[..., Any]):
    pieces = speech.pieces()
    plain = heard(willing_server, speech.pcm).text
    first, second = (heard(willing_server, speech.pcm, phrases=[term]).text for term in ("Qzqz", "jj xx"))
    assert len({plain, first, second}) == 3
    with sdk(willing_server).listen.v1.connect(**(RAW | {"keyterm": "never heard of"})) as connection:
        assert configured(connection, keyterms=["Qzqz"]).keyterms == ["Qzqz"]  # before any audio: at once
        connection.send_media(pieces[0])
        assert configured(connection, keyterms=["jj xx"]).keyterms == ["jj xx"]  # in mid-speech: after the flush
        assert finalized(connection, pieces[1:]) == first
        assert configured(connection, features={"numerals": True}).keyterms is None
        assert configured(connection).keyterms is None
        assert finalized(connection, pieces) == second
        assert configured(connection, keyterms=[]).keyterms == []
        assert finalized(connection, pieces) == plain
    assert await willing_server.streams_left() == 0


def test_keyterms_that_cannot_be_used_leave_those_before(willing_server: Any, speech: Any, heard: Callable[..., Any]):
    with sdk(willing_server).listen.v1.connect(**(RAW | {"keyterm": "Qzqz"})) as connection:
        for keyterms, code in (
            (["a"] * 201, "CONFIGURE_KEYTERM_LIMIT_EXCEEDED"),
            (["b" * 61], "CONFIGURE_KEYTERM_LIMIT_EXCEEDED"),
            ([1], "CONFIGURE_INTERNAL_ERROR"),
            ("jj xx", "CONFIGURE_INTERNAL_ERROR"),
        ):
            connection._send({"type": "Configure", "keyterms": keyterms})
            answer = connection.recv()
            assert isinstance(answer, ListenV1ConfigureFailure) and answer.request_id
            assert answer.code == code and answer.description.startswith("keyterms")
        assert finalized(connection, speech.pieces()) == heard(willing_server, speech.pcm, phrases=["Qzqz"]).text


def test_encodings_and_channels(lively_server: Any, speech: Any, heard: Callable[..., Any]):
    expected = heard(lively_server, speech.pcm).text
    stereo = np.repeat(speech.samples, 2).tobytes()
    assert text_of(finals(listen(lively_server, [stereo], channels=2))) == expected
    floats = (speech.samples / 32768).astype("<f4").tobytes()
    assert text_of(finals(listen(lively_server, [floats], encoding="linear32"))) == expected
    octets = bytes(range(256)) * 100
    result = text_of(finals(listen(lively_server, [octets], encoding="mulaw", sample_rate=8_000)))
    assert result == heard(lively_server, octets, encoding="mulaw", sample_rate=8_000).text


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "opus"},
        {"sample_rate": 1},
        {"sample_rate": "x"},
        {"channels": 9},
        {"interim_results": "perhaps"},
        {"multichannel": True},
        {"diarize_model": "latest"},
        {"encoding": "linear16", "sample_rate": None},
    ],
)
async def test_options_that_cannot_be_served_are_refused_in_the_handshake(lively_server: Any, options: dict[str, Any]):
    assert refused_status(lively_server, **options) == 400
    assert await lively_server.streams_left() == 0


async def test_the_refusal_says_why(lively_server: Any):
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.1:{lively_server.port}/v1/listen?encoding=opus&sample_rate=16000")
    response = refused.value.response
    body = json.loads(response.body)
    assert response.status_code == 400 and "linear16" in body["err_msg"] and body["request_id"]
    assert response.headers["dg-error"] == body["err_msg"]


async def test_bad_input_is_a_typed_error(lively_server: Any):
    nan = np.array([0.5, np.nan], "<f4").tobytes()
    with sdk(lively_server).listen.v1.connect(**(RAW | {"encoding": "linear32"})) as connection:
        connection.send_media(nan)
        error = connection.recv()
    assert isinstance(error, ListenV1Error) and error.variant == "DATA-0000"
    for bad in ("hello", "{}", '{"type":"Nonsense"}'):
        with sdk(lively_server).listen.v1.connect(**RAW) as connection:
            connection._send(bad)
            error = connection.recv()
            assert isinstance(error, ListenV1Error) and error.variant == "SchemaError"
            with pytest.raises(ConnectionClosed):
                connection.recv()
    assert await lively_server.streams_left() == 0


def test_a_full_server(make_server: Any, lively: Recognizer):
    server = make_server(lively, max_streams=1)
    with sdk(server).listen.v1.connect(**RAW):
        assert refused_status(server) == 503


def test_an_idle_client_is_told(make_server: Any, lively: Recognizer):
    with sdk(make_server(lively, idle_s=0.3)).listen.v1.connect(**RAW) as connection:
        error = connection.recv()
        assert isinstance(error, ListenV1Error) and error.variant == "NET-0001"


def test_keep_alive_keeps_a_silent_connection(
    make_server: Any, lively: Recognizer, speech: Any, heard: Callable[..., Any]
):
    server = make_server(lively, idle_s=1)
    with sdk(server).listen.v1.connect(**RAW) as connection:
        for _ in range(4):
            time.sleep(0.5)
            connection.send_keep_alive()
        connection.send_media(speech.pcm)
        connection.send_close_stream()
        assert text_of(finals(list(connection))) == heard(server, speech.pcm).text


async def test_browsers_authenticate_by_subprotocol(lively_server: Any):
    url = f"ws://127.0.0.1:{lively_server.port}/v1/listen?encoding=linear16&sample_rate=16000"
    async with connect(url, subprotocols=["token", "key"]) as socket:  # type: ignore[list-item]
        assert socket.subprotocol == "token"


@pytest.mark.parametrize("raw", [False, True])
def test_files(any_server: Any, speech: Any, heard: Callable[..., Any], raw: bool):
    expected = heard(any_server, speech.pcm)
    media = sdk(any_server).listen.v1.media
    if raw:  # the SDK has no `sample_rate` for files, so it goes into the query as it is
        query: Any = {"additional_query_parameters": {"sample_rate": "16000"}}
        response = media.transcribe_file(request=speech.pcm, encoding="linear16", request_options=query)
    else:
        with exchange("deepgram-python-file", any_server):
            response = media.transcribe_file(request=speech.wav, model="nova-3", utterances=True)
        paragraphs = media.transcribe_file(request=speech.wav, smart_format=True, paragraphs=True)
    best = response.results.channels[0].alternatives[0]
    assert best.transcript == expected.text
    assert [(w.word, w.start, w.end) for w in best.words] == [(w["word"], w["start"], w["end"]) for w in expected.words]
    assert response.metadata.duration == pytest.approx(speech.seconds, abs=0.05)
    if not raw:
        assert [u.transcript for u in response.results.utterances] == [s["text"] for s in expected.segments]
        (best,) = paragraphs.results.channels[0].alternatives
        said = [(p.sentences[0].text, p.start, p.end, p.num_words) for p in best.paragraphs.paragraphs]
        assert said == [(s["text"], s["start"], s["end"], len(s["words"])) for s in expected.segments]
        assert best.paragraphs.transcript.split() == expected.text.split()


def test_files_of_other_formats(lively_server: Any):
    for name in ("weather.mp3", "weather.ogg", "weather.webm"):
        response = sdk(lively_server).listen.v1.media.transcribe_file(request=(FIXTURES / name).read_bytes())
        assert response.results.channels[0].alternatives[0].transcript


async def test_bad_files(lively_server: Any):
    media = sdk(lively_server).listen.v1.media
    for body in (b"", (FIXTURES / "document.wav").read_bytes()):
        with pytest.raises(ApiError) as refused:
            media.transcribe_file(request=body)
        assert refused.value.status_code == 400 and refused.value.body["err_code"] == "Bad Request"
    with pytest.raises(ApiError) as refused:
        media.transcribe_url(url="https://example.com/a.wav")
    assert refused.value.status_code == 400 and "URL" in refused.value.body["err_msg"]
    unusable: list[dict[str, Any]] = [{"encoding": "speex"}, {"summarize": "v2"}]
    for options in unusable:
        with pytest.raises(ApiError) as refused:
            media.transcribe_file(request=b"", **options)
        assert refused.value.body["err_code"] == "INVALID_QUERY_PARAMETER"
    nan = np.array([0.5, np.nan], "<f4").tobytes()
    response = await asyncio.to_thread(
        httpx.post, f"{lively_server.http}/v1/listen?encoding=linear32&sample_rate=16000", content=nan
    )
    assert response.status_code == 400 and "invalid_audio" in response.json()["err_msg"]
    assert await lively_server.streams_left() == 0
