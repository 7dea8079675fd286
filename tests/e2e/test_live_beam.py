"""Live streams read by a search with little patience: better text, still append-only, the same in every protocol."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.conftest import Server
from tests.e2e.conftest import Clip, native
from tests.e2e.test_deepgram import http  # noqa: F401 a fixture
from tests.e2e.test_settled import messages, others_get_the_same_results

from mocha_model import emissions
from mocha_model.recognizer import Recognizer
from mocha_server.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:websockets.* is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def patient_server(bundled: Recognizer) -> Iterator[Server]:
    running = Server(bundled, live_beam=4, live_patience_ms=400, file_beam=0, max_streams=8)
    yield running
    running.stop()


def test_deltas_are_the_transcript_that_the_search_gives(
    patient_server: Server, server: Server, speech: Clip, bundled: Recognizer
):
    said = messages(patient_server, speech.pcm)
    deltas = "".join(m["delta"] for m in said if m["type"] == "text")
    segments = [m for m in said if m["type"] == "segment"]
    samples = torch.from_numpy(speech.samples / 32768).float()
    expected = emissions.text_of(bundled.searching(4, patience_s=0.4).transcribe(samples))
    assert " ".join(deltas.split()) == " ".join(m["text"] for m in segments) == expected
    assert expected != native(server.url, speech.pcm).text, "as a greedy server has it"
    frames = [c["frame"] for m in said if m["type"] == "text" for c in m["characters"]]
    assert frames == sorted(frames) and len(frames) > 20
    for segment in segments:
        assert " ".join(w["word"] for w in segment["words"]) == segment["text"]


async def test_clients_of_others_get_the_same(patient_server: Server, speech: Clip):
    await others_get_the_same_results(patient_server, speech)


def test_it_is_off_unless_asked_for():
    assert Settings().live_beam == 0


def test_a_setting_that_cannot_be_is_one_line():
    command = "from mocha_server.cli import serve; import typer; typer.run(serve)"
    given = os.environ | {"MOCHA_LIVE_BEAM": "4", "MOCHA_FINAL_BEAM": "4"}
    done = subprocess.run([sys.executable, "-c", command], env=given, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "live_beam and final_beam exclude each other" in " ".join(done.stderr.split())
