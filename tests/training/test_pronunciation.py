"""The branch of phones: what words sound like, what is learned from it, and that the model is saved without it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from mocha_model.checkpoint import load_checkpoint
from mocha_model.config import tiny
from mocha_model.encoder import LSTMLayer, MaskedBatchNorm
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import Augmenter
from mocha_training.config import TrainConfig
from mocha_training.data import Corpus, Utterance, collate
from mocha_training.pronunciation import PhoneBranch, PronunciationError, pronounce
from mocha_training.recipes import plain
from mocha_training.trainer import Trainer
from tests.training.made_up import needs_voice

TEXTS = ["the cat sees a knight", "nobody sees the sea"]


def branch_and_model(texts: list[str] = TEXTS) -> tuple[PhoneBranch, SpeechModel, Tokenizer]:
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_texts(texts)
    model = SpeechModel(tiny(tokenizer.vocab_size))
    return PhoneBranch(model, tokenizer, texts), model, tokenizer


@needs_voice
def test_words_are_spelled_by_their_sounds():
    said = pronounce(["night", "knight", "see", "sea", "a", "cat", "o'clock", "the", "night"])
    assert said["night"] == said["knight"] and len(said["night"]) == 3
    assert said["see"] == said["sea"] and said["cat"][-1] == said["night"][-1]
    assert len(said["a"]) == 1 and said["a"] != pronounce(["ay"])["ay"]  # the word, not the letter
    assert set(said) == {"night", "knight", "see", "sea", "a", "cat", "o'clock", "the"} and all(said.values())
    assert pronounce(["iv", "xx"]) == {"iv": (), "xx": ()}, "espeak-ng says a Roman number in several words"
    many = pronounce(f"{a}{b}{c}" for a in "bdkmpst" for b in "aeiou" for c in "bdkmpst")
    assert len(many) == 245 and len({phone for phones in many.values() for phone in phones}) < 40


def test_without_espeak_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PronunciationError, match="Debian package espeak-ng"):
        pronounce(["cat"])


@needs_voice
def test_its_loss_is_ctc_over_the_phones_of_the_layer_below_the_last():
    branch, model, tokenizer = branch_and_model()
    torch.nn.init.normal_(branch.output.weight)
    batch = collate(
        [np.random.default_rng(n).normal(0, 0.1, 40_000).astype(np.float32) for n in range(2)], TEXTS, tokenizer
    )
    layers = [layer for layer in model.encoder.stack if isinstance(layer, LSTMLayer)]
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
    layers[-2].register_forward_hook(lambda layer, given, output: outputs.append(output))
    memory, _ = model.encode(*model.features(batch.samples, batch.num_samples))
    found = branch.loss(batch.tokens, batch.num_tokens)
    log_probs = branch.output(outputs[0][0]).log_softmax(2)
    said, total, count = pronounce(" ".join(TEXTS).split()), 0.0, 0
    for row, text in enumerate(TEXTS):
        target = [1 + branch.phones.index(phone) for word in text.split() for phone in said[word]]
        frames = int(outputs[0][1][row])
        total += functional.ctc_loss(
            log_probs[row, :frames], torch.tensor(target), [frames], [len(target)], reduction="sum"
        ).item()
        count += len(target)
    assert found.item() == pytest.approx(total / count, rel=1e-5)
    found.backward()
    assert all(p.grad is not None for p in layers[-2].parameters())
    assert all(p.grad is None for p in layers[-1].parameters()) and memory.requires_grad


@needs_voice
def test_a_text_whose_phones_are_not_known_counts_for_nothing():
    branch, model, tokenizer = branch_and_model()
    torch.nn.init.normal_(branch.output.weight)
    audio = [np.random.default_rng(n).normal(0, 0.1, 40_000).astype(np.float32) for n in range(2)]

    def loss(*texts: str) -> float:
        batch = collate(audio[: len(texts)], list(texts), tokenizer)
        model.encode(*model.features(batch.samples, batch.num_samples))
        return branch.loss(batch.tokens, batch.num_tokens).item()

    for layer in model.encoder.modules():
        layer.training = not isinstance(layer, MaskedBatchNorm)  # one row does not change another's statistics
    alone = loss(TEXTS[0])
    assert alone > 0 and loss("the dog", "iv") == 0
    for unknown in ("the bee", "the cats", "nobody sees the c\u00e4t"):
        assert loss(TEXTS[0], unknown) == pytest.approx(alone, rel=1e-5)


@needs_voice
def test_a_run_of_other_phones_is_not_resumed(tmp_path: Path):
    def trainer(texts: list[str], weight: float) -> Trainer:
        samples = np.zeros(64_000, np.int16)
        rows = tuple(Utterance(f"{n}", text, "s", "c", 32_000 * n, 32_000) for n, text in enumerate(texts))
        config = plain().model_copy(update={"phone_weight": weight, "batch_seconds": 8.0})
        tokenizer = Tokenizer.from_texts(TEXTS)
        augmenter = Augmenter(config.augment, Corpus(rows, (samples,)))
        return Trainer(config, SpeechModel(tiny(tokenizer.vocab_size)), tokenizer, augmenter, None, tmp_path)

    trainer(TEXTS, 1.0).save()
    assert trainer(TEXTS, 1.0).resume()
    with pytest.raises(ValueError, match="begun with other phones"):
        trainer(["the boy", "a sea"], 1.0).resume()
    trainer(TEXTS, 0.0).save()
    with pytest.raises(ValueError, match="begun without a branch of phones"):
        trainer(TEXTS, 1.0).resume()


@needs_voice
def test_it_learns_beside_the_model_and_is_not_saved_with_it(tmp_path: Path):
    samples = (8000 * np.random.default_rng(0).normal(0, 0.3, 64_000)).astype(np.int16)
    rows = tuple(Utterance(f"{n}", text, "s", "c", 32_000 * n, 32_000) for n, text in enumerate(TEXTS))
    corpus = Corpus(rows, (samples,))
    losses = {}
    for weight in (0.0, 1.0):
        tokenizer = Tokenizer.from_texts(TEXTS)
        torch.manual_seed(0)
        changes = {"phone_weight": weight, "batch_seconds": 8.0, "steps": 60, "learning_rate": 1e-2, "warmup_steps": 5}
        config = plain().model_copy(update=changes)
        model = SpeechModel(tiny(tokenizer.vocab_size))
        augmenter = Augmenter(config.augment, corpus)
        trainer = Trainer(config, model, tokenizer, augmenter, None, tmp_path / f"{weight}")
        batch = next(iter(trainer._loader()))
        losses[weight] = [trainer.train_step(batch).get("phones") for _ in range(60)]
    assert set(losses[0.0]) == {None}
    assert losses[1.0][-1] < 0.5 * losses[1.0][0]
    trainer.save()
    kept = load_checkpoint(tmp_path / "1.0" / "step-000060.safetensors").model.state_dict()
    assert kept.keys() == model.state_dict().keys()


def test_phones_are_of_words_that_are_spelled():
    with pytest.raises(ValueError, match="phone_weight is of characters"):
        TrainConfig(phone_weight=1.0, units="words")
