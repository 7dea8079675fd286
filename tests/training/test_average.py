"""Means of checkpoints: whose weights stand for the same."""

from pathlib import Path

import pytest

from mocha_model.checkpoint import CheckpointError, save_checkpoint
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer
from mocha_training.average import average_checkpoints


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
