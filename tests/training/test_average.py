"""Means of checkpoints: whose weights stand for the same."""

from pathlib import Path

import pytest
import torch

from mocha_model.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from mocha_model.config import tiny
from mocha_model.model import SpeechModel
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer
from mocha_training.average import average_checkpoints
from tests.conftest import lively_recognizer


def test_models_of_other_symbols_or_units_are_not_averaged(lively: Recognizer, tmp_path: Path):
    symbols = lively.tokenizer.symbols
    others = {
        "same": lively.tokenizer,
        "letters": Tokenizer([*symbols[:-1], "é"]),
        "order": Tokenizer([*symbols[:4], *symbols[:3:-1]]),
        "units": Tokenizer(symbols, "words"),
    }
    paths = {name: tmp_path / f"{name}.safetensors" for name in others}
    for name, tokenizer in others.items():
        save_checkpoint(paths[name], lively.model, tokenizer, {})
    mean = tmp_path / "mean.safetensors"
    for name in ("letters", "order", "units"):
        with pytest.raises(CheckpointError, match="of one vocabulary"):
            average_checkpoints([paths["same"], paths[name]], mean)
    assert not mean.exists()
    average_checkpoints([paths["same"], paths["same"]], mean)
    assert Recognizer.load(mean).tokenizer.symbols == symbols


def test_a_model_that_looks_ahead_and_one_that_does_not_are_averaged(tmp_path: Path):
    """By what the second would be if it did: a look-ahead of 0. One by another number is another network."""
    recognizer = lively_recognizer(tiny(32).with_look_ahead(2))
    without = SpeechModel(recognizer.config.with_look_ahead(0))
    own = recognizer.model.state_dict()
    without.load_state_dict({name: -own[name] if name == "ctc.bias" else own[name] for name in without.state_dict()})
    further = SpeechModel(recognizer.config.with_look_ahead(1))
    paths = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for path, model in zip(paths, (recognizer.model, without, further), strict=True):
        save_checkpoint(path, model, recognizer.tokenizer, {})
    mean = tmp_path / "mean.safetensors"
    for order in (paths[:2], paths[1::-1]):
        average_checkpoints(order, mean)
        found = load_checkpoint(mean)
        assert found.config.encoder.look_ahead == 2
        assert not found.model.state_dict()["ctc.bias"].any() and own["ctc.bias"].any()
        half = own["encoder.look_ahead.0.later.weight"] / 2
        torch.testing.assert_close(found.model.encoder.look_ahead[0].later.weight.data, half, atol=0.01, rtol=0)
    with pytest.raises(CheckpointError, match="one configuration"):
        average_checkpoints([paths[0], paths[2]], mean)
