"""Checkpoints: a round trip, and a clear error for every way a file can be wrong."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mocha_model.checkpoint import BUNDLED, CheckpointError, load_checkpoint, save_checkpoint
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer, normalize_text


def test_round_trip(tmp_path: Path, lively: Recognizer):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, lively.model, lively.tokenizer, {"name": "x", "steps": 3})
    loaded = load_checkpoint(path)
    assert loaded.config == lively.config and loaded.provenance == {"name": "x", "steps": 3}
    assert loaded.tokenizer.symbols == lively.tokenizer.symbols
    for name, tensor in lively.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])


def test_bundled_checkpoint_loads_and_is_small():
    assert load_checkpoint().provenance["hours_of_corpus"] > 0
    assert BUNDLED.stat().st_size <= 16 * 2**20


def test_wrong_files_are_named_and_explained(tmp_path: Path, lively: Recognizer):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_checkpoint(good, lively.model, lively.tokenizer, {})
    with pytest.raises(CheckpointError, match="no such"):
        load_checkpoint(bad)
    bad.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"bad\.safetensors.*truncated"):
        load_checkpoint(bad)
    bad.write_bytes(b"%PDF-1.4 no weights here")
    with pytest.raises(CheckpointError, match="not a readable"):
        load_checkpoint(bad)
    save_file({"weight": torch.zeros(3)}, bad)
    with pytest.raises(CheckpointError, match="format"):
        load_checkpoint(bad)
    save_checkpoint(bad, lively.model, Tokenizer.from_texts(["only a few"]), {})
    with pytest.raises(CheckpointError, match="do not fit"):
        load_checkpoint(bad)


def test_vocabulary_is_data_of_any_script():
    tokenizer = Tokenizer.from_texts([normalize_text("Привет, мир!"), normalize_text("日本語")])
    assert tokenizer.decode(tokenizer.encode("мир")) == "мир"
    assert tokenizer.encode("x") == [tokenizer.unk_id]


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("IT'S  REALLY", "it's really"),
        ("“Well,” he said—‘no’.", "well he said no"),
        ("A-B\n", "a b"),
        ("don\u2019t", "don't"),
    ],
)
def test_text_normalisation(raw: str, clean: str):
    assert normalize_text(raw) == clean
