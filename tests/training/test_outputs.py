"""What commands write: tried before the work, in directories that are made, and an error of one line if not."""

import json
import wave
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mocha_model.checkpoint import save_checkpoint
from mocha_model.language import WordLanguageModel
from mocha_model.recognizer import Recognizer
from mocha_training import cli
from mocha_training.data import Corpus
from mocha_training.manifests import Utterance
from tests.training.made_up import run, said

WEATHER = Path(__file__).parents[1] / "fixtures" / "weather.wav"


@pytest.fixture
def checkpoint(lively: Recognizer, tmp_path: Path) -> Path:
    path = tmp_path / "lively.safetensors"
    save_checkpoint(path, lively.model, lively.tokenizer, {})
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat\na rat ate the cat\nthe rat sat\n")
    return path


@pytest.fixture(autouse=True)
def recordings(clip: NDArray[np.int16], monkeypatch: pytest.MonkeyPatch) -> None:
    """What every manifest has."""
    row = Utterance("k", "the weather is fine today", "", "made", 0, len(clip))
    monkeypatch.setattr(cli, "load_corpus", lambda *_, **__: Corpus((row,), (clip,)))


@pytest.mark.parametrize(
    ("command", "option", "name"),
    [
        (("prepare", "timit", "none"), "--out", ""),
        (("evaluate", "--manifest", "none", "--model", "none"), "--hypotheses", "texts.jsonl"),
        (("average", "none"), "--out", "mean.safetensors"),
        (("calibrate", "--manifest", "none", "--model", "none"), "--picture", "curve.svg"),
        (("train-lm", "--text", "none"), "--out", "lm.safetensors"),
        (("report", "--run", "none", "--data", "none"), "--out", ""),
        (("align", "none"), "--out", "alignment.png"),
    ],
)
def test_files_to_be_written_are_tried_first(command: tuple[str, ...], option: str, name: str, text: Path):
    status, output = said(*command, option, text / name)
    assert status == 1 and output.startswith(f"error: {text}") and "cannot be written" in output


def test_a_directory_is_no_file_to_write(checkpoint: Path, tmp_path: Path):
    status, output = said("average", checkpoint, "--out", tmp_path)
    assert status == 1 and output == f"error: {tmp_path}: cannot be written (it is a directory)"


@pytest.mark.parametrize("command", [("calibrate", "--manifest", "none", "--model", "none", "--picture"), ("align",)])
def test_pictures_have_the_names_of_their_kinds(command: tuple[str, ...]):
    status, output = said(*command, *(("none", "--out") if command == ("align",) else ()), "picture.gif")
    assert status == 1 and output == "error: picture.gif: a picture is .png or .svg"


def test_a_picture_is_of_a_minute_at_most(checkpoint: Path, tmp_path: Path):
    file = tmp_path / "long.wav"
    with wave.open(str(file), "wb") as long:
        long.setparams((1, 2, 16_000, 0, "NONE", ""))
        long.writeframes(bytes(2 * 16_000 * 61))
    status, output = said("align", file, "--model", checkpoint, "--out", tmp_path / "a.png")
    assert status == 1 and output == f"error: {file}: longer than 60 s, which is too much for a picture"


def test_directories_are_made(checkpoint: Path, text: Path, tmp_path: Path, lively: Recognizer):
    new = tmp_path / "new" / "directory"
    run("train-lm", "--text", text, "--model", checkpoint, "--least", 1, "--out", new / "a" / "lm.safetensors")
    assert "rat" in WordLanguageModel.load(new / "a" / "lm.safetensors", lively.tokenizer).counts.words
    run("evaluate", "--manifest", "dev.jsonl", "--model", checkpoint, "--hypotheses", new / "b" / "texts.jsonl")
    assert json.loads((new / "b" / "texts.jsonl").read_text())["key"] == "k"
    run("average", checkpoint, checkpoint, "--out", new / "c" / "mean.safetensors")
    assert Recognizer.load(new / "c" / "mean.safetensors").provenance["averaged"] == 2
    run("align", WEATHER, "--model", checkpoint, "--out", new / "d" / "alignment.svg")
    assert "<svg" in (new / "d" / "alignment.svg").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_figures_are_shown_before_what_cannot_be_written(checkpoint: Path):
    command = ("evaluate", "--manifest", "dev.jsonl", "--model", checkpoint)
    status, output = said(*command, "--hypotheses", "/dev/full")
    assert status == 1 and "real-time factor" in output and "error: [Errno 28]" in output


def test_a_language_model_that_cannot_be_written_leaves_the_one_before(checkpoint: Path, text: Path, tmp_path: Path):
    out = tmp_path / "lm.safetensors"
    out.write_text("the one before")
    out.with_name("lm.safetensors.partial").mkdir()
    status, output = said("train-lm", "--text", text, "--model", checkpoint, "--least", 1, "--out", out)
    assert status == 1 and output.startswith("error: [Errno") and out.read_text() == "the one before"


def test_a_run_without_a_log_is_named(checkpoint: Path, tmp_path: Path):
    command = ("report", "--run", tmp_path, "--data", tmp_path, "--out", tmp_path / "out", "--model", checkpoint)
    status, output = said(*command)
    assert (
        status == 1 and output == f"error: {tmp_path / 'log.jsonl'}: no such file; a run has it from its tenth step on"
    )
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 10, "ctc": 2.0, "ce": 1.0}) + '\n{"step": 20, "c')
    run(*command)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"losses.png", "alignment-1.png"}
