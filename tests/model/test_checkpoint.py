"""Checkpoints: a round trip, and a clear error for every way a file can be wrong."""

import copy
import json
import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import sound

from mocha_model.checkpoint import BUNDLED, CheckpointError, load_checkpoint, save_checkpoint
from mocha_model.emissions import WordAssembler, text_of
from mocha_model.language import WordLanguageModel
from mocha_model.recognizer import BUNDLED_LANGUAGE, Recognizer
from mocha_model.tokenizer import Tokenizer, normalize_text


def test_round_trip(tmp_path: Path, lively: Recognizer):
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, lively.model, lively.tokenizer, {"name": "x", "steps": 3})
    loaded = load_checkpoint(path)
    assert loaded.config == lively.config and loaded.provenance == {"name": "x", "steps": 3}
    assert loaded.tokenizer.symbols == lively.tokenizer.symbols
    for name, tensor in lively.model.state_dict().items():
        assert torch.equal(tensor, loaded.model.state_dict()[name])


def test_a_compact_one_holds_the_integers_that_streams_multiply(tmp_path: Path, lively: Recognizer):
    """So its text, and each p, are those of the weights before, in as many bits."""
    whole, compact, again = (tmp_path / f"{name}.safetensors" for name in ("whole", "compact", "again"))
    model = copy.deepcopy(lively.model).half().float()  # all but the LSTM layers' weights are what float16 holds
    save_checkpoint(whole, model, lively.tokenizer, {})
    save_checkpoint(compact, model, lively.tokenizer, {}, compact=True)
    save_checkpoint(again, load_checkpoint(compact).model, lively.tokenizer, {}, compact=True)
    assert compact.stat().st_size < 0.75 * whole.stat().st_size
    before, after = Recognizer.load(whole), Recognizer.load(compact)
    rounded = 0
    for name, weight in before.model.state_dict().items():
        kept = after.model.state_dict()[name]
        assert torch.equal(load_checkpoint(again).model.state_dict()[name], kept)
        if not torch.equal(kept, weight):
            assert re.fullmatch(r"encoder\.stack\.\d\.(lstm\.weight_.*|projection\.weight)", name)
            assert ((kept - weight).abs() <= 1.001 * weight.abs().amax(1, keepdim=True) / 254).all()
            rounded += 1
    assert rounded >= 2
    audio = sound(80_000)
    heard = before.transcribe(audio)
    assert len(heard) > 10 and after.transcribe(audio) == heard


def test_a_checkpoint_without_integers_is_of_the_format_before(tmp_path: Path, lively: Recognizer):
    new, old, broken = (tmp_path / f"{name}.safetensors" for name in ("new", "old", "broken"))
    save_checkpoint(new, lively.model, lively.tokenizer, {"name": "x"})
    with safe_open(new, framework="pt") as file:
        metadata = file.metadata()
    save_file(lively.model.state_dict(), old, {**metadata, "format": "mocha-asr/1"})
    assert load_checkpoint(old).provenance == {"name": "x"}
    save_checkpoint(new, lively.model, lively.tokenizer, {}, compact=True)
    weights = load_file(new)
    del weights[next(name for name in weights if name.endswith(".scale"))]
    save_file(weights, broken, metadata)
    with pytest.raises(CheckpointError, match=r"do not fit.*\.scale"):
        load_checkpoint(broken)


def test_who_may_read_other_new_files_may_read_a_checkpoint(tmp_path: Path, lively: Recognizer):
    plain, model, language = (tmp_path / name for name in ("plain", "model.safetensors", "language.safetensors"))
    plain.touch()
    save_checkpoint(model, lively.model, lively.tokenizer, {})
    WordLanguageModel.load(BUNDLED_LANGUAGE, load_checkpoint().tokenizer).save(language, lively.tokenizer, {})
    assert model.stat().st_mode == language.stat().st_mode == plain.stat().st_mode


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


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vocabulary", [5, None, {}, [[]], "ab", ["<blank>", "<sos>", "<eos>", "<unk>", 7]]),
        ("provenance", [5, None, [1]]),
        ("config", [5, None, {}]),
        ("config.features", [{"sample_rate": 0}, {"highest_hz": 10.0}, {"num_fft": 256}]),
        ("config.encoder", [{"lstm_sizes": [], "projection_size": None}, {"lstm_sizes": [0, 8]}]),
        ("config.decoder", [{"max_emissions_per_frame": 49}]),
        ("calibration", [5, {"bias": 1}]),
    ],
)
def test_what_is_no_configuration_is_an_error(tmp_path: Path, lively: Recognizer, name: str, changes: list[Any]):
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_checkpoint(good, lively.model, lively.tokenizer, {})
    with safe_open(good, framework="pt") as file:
        metadata = file.metadata()
    field, _, part = name.partition(".")
    for change in changes:
        if part:
            config = json.loads(metadata["config"])
            change = config | {part: config[part] | change}
        save_file(load_file(good), bad, metadata | {field: json.dumps(change)})
        with pytest.raises(CheckpointError, match=r"bad\.safetensors: its parts do not fit together"):
            load_checkpoint(bad)


def test_weights_are_numbers(tmp_path: Path, lively: Recognizer):
    model = copy.deepcopy(lively.model)
    next(model.decoder.parameters()).data[0] = torch.nan
    save_checkpoint(tmp_path / "bad.safetensors", model, lively.tokenizer, {})
    with pytest.raises(CheckpointError, match="no finite numbers"):
        load_checkpoint(tmp_path / "bad.safetensors")


def test_vocabulary_is_data_of_any_script():
    tokenizer = Tokenizer.from_texts([normalize_text("Привет, мир!"), normalize_text("日本語")])
    assert tokenizer.decode(tokenizer.encode("мир")) == "мир"
    assert tokenizer.encode("x") == [tokenizer.unk_id]


def test_words_are_units_too(tmp_path: Path, lively: Recognizer):
    phones = "h#  sh ix hv eh dcl ax-h q h#\n"
    text = normalize_text(phones, "words")
    assert text == "h# sh ix hv eh dcl ax-h q h#"
    tokenizer = Tokenizer.from_texts([text, *string.ascii_letters], "words")
    ids = tokenizer.encode(text)
    assert len(ids) == 9 and tokenizer.decode(ids) == text and tokenizer.decode([2, *ids[:2], 0]) == "h# sh"
    assert tokenizer.encode("zz sh") == [tokenizer.unk_id, ids[1]] and tokenizer.space_id == -1
    lively = Recognizer(lively.model, Tokenizer(tokenizer.symbols[: lively.config.vocab_size], "words"))
    save_checkpoint(tmp_path / "phones.safetensors", lively.model, lively.tokenizer, {})
    loaded = Recognizer.load(tmp_path / "phones.safetensors")
    assert (loaded.tokenizer.units, loaded.tokenizer.symbols) == ("words", lively.tokenizer.symbols)
    emissions = loaded.transcribe(torch.randn(30_000, generator=torch.Generator().manual_seed(0)) * 0.1)
    assembler = WordAssembler(0.04)
    spoken = [word.word for e in emissions for word in assembler.push(e)]
    assert spoken == text_of(emissions).split() and len(spoken) > 10
    assert set(spoken) <= set(lively.tokenizer.symbols)
    with pytest.raises(ValueError, match="units"):
        Tokenizer(tokenizer.symbols, "phones")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("IT'S  REALLY", "it's really"),
        ("“Well,” he said—‘no’.", "well he said no"),
        ("A-B\n", "a b"),
        ("don\u2019t", "don't"),
        ("\ufeffco\u00adoperate zero\u200bwidth", "cooperate zerowidth"),
    ],
)
def test_text_normalisation(raw: str, clean: str):
    assert normalize_text(raw) == clean
