"""OpenAI's transcription API with the `openai` package, unmodified, sync and async."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.e2e.conftest import exchange
from websockets.sync.client import connect

from mocha_model.recognizer import Recognizer

FIXTURES = Path(__file__).parents[1] / "fixtures"
CUE = re.compile(r"(\d\d:\d\d:\d\d[.,]\d{3}) --> (\d\d:\d\d:\d\d[.,]\d{3})\n(.+)")


@pytest.fixture(scope="module")
def client(any_server: Any) -> Iterator[OpenAI]:
    with OpenAI(api_key="any", base_url=f"{any_server.http}/v1", max_retries=0) as connected:
        yield connected


@pytest.fixture
def lively_client(lively_server: Any) -> Iterator[OpenAI]:
    with OpenAI(api_key="any", base_url=f"{lively_server.http}/v1", max_retries=0) as connected:
        yield connected


@pytest.fixture
def expected(any_server: Any, speech: Any, heard: Callable[..., Any]) -> Any:
    return heard(any_server, speech.pcm)


def ask(client: OpenAI, data: bytes, **options: Any) -> Any:
    return client.audio.transcriptions.create(file=("speech.wav", data), model="whisper-1", **options)


def test_json_and_text(client: OpenAI, speech: Any, expected: Any):
    answer = ask(client, speech.wav)
    assert answer.text == expected.text
    assert (answer.usage.type, answer.usage.seconds) == ("duration", 9)
    options = {"language": "en", "prompt": "weather", "temperature": 0.2, "chunking_strategy": "auto"}
    asked = {"include": ["logprobs"], "timestamp_granularities": ["segment"]}
    assert ask(client, speech.wav, response_format="json", **asked, **options).text == expected.text
    assert ask(client, speech.wav, response_format="text") == expected.text + "\n"


@pytest.mark.parametrize("wanted", [None, ["word"], ["segment"], ["word", "segment"]])
def test_verbose_json(client: OpenAI, speech: Any, expected: Any, wanted: list[Any] | None):
    options = {"timestamp_granularities": wanted} if wanted else {}
    answer = ask(client, speech.wav, response_format="verbose_json", **options)
    assert answer.text == expected.text and answer.language == "english"
    assert answer.duration == pytest.approx(speech.seconds, abs=0.05)
    if wanted and "word" not in wanted:
        assert answer.words is None
    else:
        words = [(w.word, w.start, w.end) for w in answer.words]
        assert words == [(w["word"], w["start"], w["end"]) for w in expected.words]
    if wanted and "segment" not in wanted:
        assert answer.segments is None
    else:
        segments = [(s.text, s.start, s.end) for s in answer.segments]
        assert segments == [(s["text"], s["start"], s["end"]) for s in expected.segments]
        assert all(s.avg_logprob <= 0 and s.compression_ratio > 0 and s.tokens == [] for s in answer.segments)


@pytest.mark.parametrize(("wanted", "comma"), [("srt", ","), ("vtt", ".")])
def test_subtitles(client: OpenAI, speech: Any, expected: Any, wanted: Any, comma: str):
    body = ask(client, speech.wav, response_format=wanted)
    cues = CUE.findall(body)
    assert " ".join(text for _, _, text in cues) == expected.text
    assert all(start[8] == end[8] == comma for start, end, _ in cues)
    assert [start for start, _, _ in cues] == sorted(start for start, _, _ in cues)
    assert body.startswith("WEBVTT\n\n" if wanted == "vtt" else "1\n00:")


def test_streaming(client: OpenAI, speech: Any, expected: Any):
    events = list(ask(client, speech.wav, stream=True))
    assert {e.type for e in events[:-1]} == {"transcript.text.delta"} and len(events) > 3
    assert "".join(e.delta for e in events[:-1]).split() == expected.text.split()
    assert events[-1].type == "transcript.text.done" and events[-1].text == expected.text
    assert events[-1].usage is None  # the SDK's would be of tokens
    again = list(ask(client, speech.wav, response_format="text", stream=True))
    assert {e.type for e in again[:-1]} == {"transcript.text.delta"} and again[-1] == events[-1]
    assert "".join(e.delta for e in again[:-1]) == "".join(e.delta for e in events[:-1])


async def test_the_async_client(server: Any, speech: Any, heard: Callable[..., Any]):
    expected, options = heard(server, speech.pcm), {"file": ("speech.wav", speech.wav), "model": "gpt-4o-transcribe"}
    async with AsyncOpenAI(api_key="any", base_url=f"{server.http}/v1") as client:
        with exchange("openai-python", server):
            create = client.audio.transcriptions.create
            answer = await create(**options)
            verbose = await create(**options, response_format="verbose_json", timestamp_granularities=["word"])
            events = [event async for event in await create(**options, stream=True)]
    assert answer.text == verbose.text == events[-1].text == expected.text


@pytest.mark.parametrize("suffix", ["flac", "mp3", "m4a", "ogg", "opus", "wav", "webm"])
def test_every_format_from_disk(lively_client: OpenAI, suffix: str):
    answer = lively_client.audio.transcriptions.create(file=FIXTURES / f"weather.{suffix}", model="whisper-1")
    assert answer.text


def test_models(lively_client: OpenAI):
    assert [m.id for m in lively_client.models.list()] == ["lively"]


def refused(call: Callable[[], Any]) -> tuple[str | None, str | None]:
    with pytest.raises(openai.BadRequestError) as error:
        call()
    assert error.value.type == "invalid_request_error" and error.value.message
    return error.value.code, error.value.param


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
def test_translations_are_refused_clearly(lively_client: OpenAI, speech: Any):
    def translate() -> Any:
        return lively_client.audio.translations.create(file=("speech.wav", speech.wav), model="whisper-1")

    assert refused(translate) == ("translation_unsupported", None)


@pytest.mark.parametrize(
    ("options", "expected_error"),
    [
        ({"response_format": "xml"}, ("invalid_response_format", "response_format")),
        ({"response_format": "srt", "stream": True}, ("invalid_response_format", "response_format")),
        (
            {"response_format": "verbose_json", "timestamp_granularities": ["letter"]},
            ("invalid_granularity", "timestamp_granularities"),
        ),
    ],
)
def test_bad_requests(lively_client: OpenAI, speech: Any, options: Any, expected_error: Any):
    assert refused(lambda: ask(lively_client, speech.wav, **options)) == expected_error


@pytest.mark.parametrize("stream", [False, True])
def test_bad_files(lively_client: OpenAI, stream: bool):
    for data in (b"", (FIXTURES / "document.wav").read_bytes()):
        code = refused(lambda data=data: ask(lively_client, data, stream=stream))
        assert code == ("unsupported_media", "file")


def test_no_file_at_all(lively_server: Any):
    for body in ({"data": {"model": "x"}}, {"content": b"junk"}, {"json": {}}, {"data": {"file": "text"}}):
        response = httpx.post(f"{lively_server.http}/v1/audio/transcriptions", **body)
        assert response.status_code == 400 and response.json()["error"]["code"] == "missing_file"


def test_a_broken_form(lively_server: Any):
    headers = {"content-type": "multipart/form-data"}  # without its boundary
    response = httpx.post(f"{lively_server.http}/v1/audio/transcriptions", content=b"x", headers=headers)
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_server(make_server: Any, lively: Recognizer, speech: Any, stream: bool):
    server = make_server(lively, max_streams=1)
    with connect(server.url) as taking, OpenAI(api_key="any", base_url=f"{server.http}/v1", max_retries=0) as client:
        taking.send('{"type":"start"}')
        assert "ready" in str(taking.recv())
        with pytest.raises(openai.InternalServerError) as error:  # which the SDK tries again, unless told otherwise
            list(ask(client, speech.wav, stream=stream))
    assert (error.value.code, error.value.status_code) == ("server_full", 503)
    assert int(error.value.response.headers["retry-after"]) > 0
