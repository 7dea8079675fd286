"""Uploads read by beam search with the bundled language model, while streams stay greedy."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from tests.conftest import Server
from tests.e2e.conftest import Clip, native

from mocha_model.recognizer import Recognizer


@pytest.fixture(scope="module")
def searching_server(bundled: Recognizer) -> Iterator[Server]:
    running = Server(bundled, file_beam=4)
    yield running
    running.stop()


def post(server: Any, clip: Clip, **fields: str) -> httpx.Response:
    where = f"{server.http}/v1/audio/transcriptions"
    return httpx.post(where, files={"file": ("speech.wav", clip.wav)}, data=fields, timeout=120)


def test_uploads_are_read_as_the_search_reads_alone(searching_server: Server, speech: Clip, bundled: Recognizer):
    searching = bundled.for_files(4)
    emissions = searching.transcribe(torch.from_numpy(speech.samples / 32768).float())
    text = " ".join("".join("\n" if e.end_of_segment else e.text for e in emissions).split())
    assert post(searching_server, speech).json()["text"] == text
    streamed = post(searching_server, speech, stream="true").text
    assert "transcript.text.done" in streamed and text in streamed


def test_streams_stay_greedy(searching_server: Server, server: Server, speech: Clip):
    greedy = native(server.url, speech.pcm).text
    assert native(searching_server.url, speech.pcm).text == greedy != post(searching_server, speech).json()["text"]


def test_both_engines_are_counted(searching_server: Server, speech: Clip):
    def audio_s() -> float:
        lines = httpx.get(f"{searching_server.http}/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith("mocha_audio_seconds_total")).split()[1])

    before = audio_s()
    post(searching_server, speech)
    between = audio_s()
    native(searching_server.url, speech.pcm)
    assert between - before == pytest.approx(speech.seconds, abs=0.5)
    assert audio_s() - between == pytest.approx(speech.seconds, abs=0.5)
