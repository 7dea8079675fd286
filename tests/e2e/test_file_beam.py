"""Uploads and Home Assistant's audio read by joint search with the bundled language model; streams stay greedy."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from tests.conftest import Server
from tests.e2e.conftest import Clip, native
from tests.e2e.test_wyoming import client, transcribe
from wyoming.asr import Transcript

from mocha_model.recognizer import Recognizer
from mocha_server.settings import FILE_BEAM, Settings


@pytest.fixture(scope="module")
def searching_server(bundled: Recognizer) -> Iterator[Server]:
    running = Server(bundled, file_beam=4, live_beam=0, wyoming_port=0)
    yield running
    running.stop()


def post(server: Any, clip: Clip, **fields: str) -> httpx.Response:
    where = f"{server.http}/v1/audio/transcriptions"
    return httpx.post(where, files={"file": ("speech.wav", clip.wav)}, data=fields, timeout=120)


@pytest.fixture(scope="module")
def read_alone(bundled: Recognizer, speech: Clip) -> str:
    emissions = bundled.searching(4).transcribe(torch.from_numpy(speech.samples / 32768).float())
    return " ".join("".join("\n" if e.end_of_segment else e.text for e in emissions).split())


def test_uploads_are_read_as_the_search_reads_alone(searching_server: Server, speech: Clip, read_alone: str):
    assert post(searching_server, speech).json()["text"] == read_alone
    streamed = post(searching_server, speech, stream="true").text
    assert "transcript.text.done" in streamed and read_alone in streamed


def test_streams_stay_greedy(searching_server: Server, server: Server, speech: Clip):
    greedy = native(server.url, speech.pcm).text
    assert native(searching_server.url, speech.pcm).text == greedy != post(searching_server, speech).json()["text"]


async def test_so_is_what_home_assistant_sends(searching_server: Server, speech: Clip, read_alone: str):
    pieces = [speech.pcm[at : at + 2048] for at in range(0, len(speech.pcm), 2048)]
    async with client(searching_server) as connected:
        for _ in range(2):
            events = await transcribe(connected, pieces)
            (told,) = (Transcript.from_event(e).text for e in events if Transcript.is_type(e.type))
            assert told == read_alone


def test_what_is_not_set_is_the_search():
    assert Settings().file_beam == FILE_BEAM > 0


def test_both_engines_are_counted(searching_server: Server, speech: Clip):
    def audio_s() -> dict[str, float]:
        lines = httpx.get(f"{searching_server.http}/metrics").text.splitlines()
        found = (line.partition(" ") for line in lines if line.startswith("mocha_audio_seconds_total"))
        return {name.split('"')[1]: float(value) for name, _, value in found}

    before = audio_s()
    post(searching_server, speech)
    between = audio_s()
    native(searching_server.url, speech.pcm)
    after = audio_s()
    for engine, (first, second) in {"files": (before, between), "greedy": (between, after)}.items():
        assert {name for name in first if first[name] != second[name]} == {engine}
        assert second[engine] - first[engine] == pytest.approx(speech.seconds, abs=0.5)
