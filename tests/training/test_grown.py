"""Networks that are grown, or begin to look ahead, compute what they did and learn."""

from pathlib import Path

import pytest
import torch

from mocha_model.checkpoint import BUNDLED, load_checkpoint, save_checkpoint
from mocha_model.config import small, tiny
from mocha_model.model import SpeechModel
from mocha_training import splicing
from mocha_training.augment import Augmenter
from mocha_training.average import average_checkpoints
from mocha_training.data import Corpus, load_corpus
from mocha_training.trainer import Trainer
from mocha_training.weights import grown
from tests.training.made_up import make_trainer, path_parts, said


@pytest.mark.parametrize("widths", [((16, 16), 24), ((24, 16), 16), ((20, 28), 18)])
def test_a_grown_network_computes_what_the_small_one_does_and_its_new_units_learn(
    widths: tuple[tuple[int, int], int], corpus: Corpus, tmp_path: Path
):
    trainer = make_trainer(corpus, tmp_path / "small", steps=12, learning_rate=1e-2, attention="path")
    batch = next(iter(trainer._loader()))
    for _ in range(12):
        trainer.train_step(batch)  # so that no weight or statistic is as it was made
    model = trainer.model.eval()
    encoder = model.config.encoder.model_copy(update={"lstm_sizes": widths[0], "projection_size": widths[1]})
    wide = grown(model, model.config.model_copy(update={"encoder": encoder}))
    assert wide.num_parameters > model.num_parameters and not wide.training
    parts = []
    for network in (model, wide):
        trainer.model = network
        with torch.no_grad():
            memory, num_memory, log_probs, ends = path_parts(trainer, batch)
            out = network.along_path(memory, num_memory, batch.tokens, batch.num_tokens, ends)
        parts.append((memory[..., :16], log_probs, out.logits, out.energies))
    for old, new in zip(*parts, strict=True):
        torch.testing.assert_close(new, old, atol=2e-5, rtol=2e-5)
    before = {name: weight.clone() for name, weight in wide.state_dict().items()}
    after = Trainer(trainer.config, wide, trainer.tokenizer, trainer.augmenter, None, tmp_path / "wide")
    for _ in range(3):
        after.train_step(batch)
    changed = {name for name, weight in wide.state_dict().items() if not torch.equal(weight, before[name])}
    heard = "encoder.stack.1.lstm.weight_ih_l0" if widths[1] > 16 else "encoder.stack.0.projection.weight"
    new_inputs = wide.state_dict()[heard][:16, 16:]
    assert heard in changed and new_inputs.numel() and new_inputs.abs().max() > 0


def test_a_network_that_begins_to_look_ahead_computes_what_it_did_and_learns_to(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=3, learning_rate=1e-2, attention="path")
    model = trainer.model.eval()
    ahead = grown(model, model.config.with_look_ahead(2))
    batch = next(iter(trainer._loader()))
    with torch.no_grad():
        (old, num_old), (new, num_new) = (
            network.encode(*network.features(batch.samples, batch.num_samples)) for network in (model, ahead)
        )
        for row, length in enumerate(torch.minimum(num_old, num_new).tolist()):
            torch.testing.assert_close(new[row, :length], old[row, :length])
    assert (num_old - num_new).abs().max() <= 1, "the tail is longer by as much as they wait"
    after = Trainer(trainer.config, ahead, trainer.tokenizer, trainer.augmenter, None, tmp_path / "ahead")
    for _ in range(3):
        after.train_step(batch)
    assert all(layer.later.weight.abs().max() > 0 for layer in ahead.encoder.look_ahead)
    for frames in (0, 1):
        with pytest.raises(ValueError, match="can only be grown"):
            grown(ahead, ahead.config.with_look_ahead(frames))


def test_networks_are_grown_in_the_widths_of_lstm_layers_alone():
    model = SpeechModel(tiny(30))
    encoder, resized = model.config.encoder, tiny(30).model_copy
    for changes in ({"lstm_sizes": (16, 12)}, {"projection_size": 8}, {"lstm_sizes": (16, 16, 16)}):
        with pytest.raises(ValueError, match="can only be grown"):
            grown(model, resized(update={"encoder": encoder.model_copy(update=changes)}))
    for changed in (tiny(30).with_attention(chunk_width=3), resized(update={"vocab_size": 31})):
        with pytest.raises(ValueError, match="can only be grown"):
            grown(model, changed)


@pytest.mark.parametrize(("more", "size", "ahead"), [((), "6.79", 0), (("--set", "look_ahead=2"), "7.20", 2)])
def test_train_grows_a_checkpoint(
    more: tuple[str, ...], size: str, ahead: int, manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    tokenizer, first = load_checkpoint().tokenizer, tmp_path / "small.safetensors"
    save_checkpoint(first, SpeechModel(small(tokenizer.vocab_size)), tokenizer, {"steps": 7})
    options = ("--recipe", "plain", "--steps", 1, "--device", "cpu", "--init", first, "--preset", "medium")
    status, output = said("train", *options, *more, "--data", manifest.parent, "--out", tmp_path / "run")
    assert status == 0 and f"{size} M parameters" in output
    last = load_checkpoint(tmp_path / "run" / "final.safetensors")
    assert last.config.encoder.look_ahead == ahead
    assert last.config.encoder.lstm_sizes == (448, 448, 448) and last.provenance["started_from"]["steps"] == 7


def test_train_changes_dropout_and_hop_of_a_checkpoint_and_splices(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(splicing, "_divide", lambda *arguments: [1] * len(arguments[-1]))
    texts: list[str] = []
    make = Augmenter.make
    monkeypatch.setattr(Augmenter, "make", lambda *a: (example := make(*a), texts.append(example[1]))[0])
    settings = ("hop_samples=128", "dropout=0.5", "bf16=false", "augment.splice_probability=1")
    options = ["--recipe", "spliced", "--steps", 1, "--device", "cpu", "--init", BUNDLED]
    options += [part for setting in settings for part in ("--set", setting)]
    status, _ = said("train", *options, "--data", manifest.parent, "--out", tmp_path / "run")
    last, before = load_checkpoint(tmp_path / "run" / "final.safetensors"), load_checkpoint(BUNDLED).config
    assert status == 0 and last.config.encoder.dropout == 0.5 != before.encoder.dropout
    assert last.config.features.hop_samples == 128 != before.features.hop_samples
    assert last.config.frame_samples == 4 * 128 and last.provenance["recipe"]["hop_samples"] == 128
    assert last.config.encoder.lstm_sizes == before.encoder.lstm_sizes
    average_checkpoints([BUNDLED, tmp_path / "run" / "final.safetensors"], tmp_path / "mean.safetensors")
    assert load_checkpoint(tmp_path / "mean.safetensors").config == last.config
    assert set(texts) - {u.text for u in load_corpus(manifest).utterances}  # made of two
