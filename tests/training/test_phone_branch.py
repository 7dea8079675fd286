"""The branch of phones: what words sound like, what is learned from it, and that it stays with the model."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from mocha_model.checkpoint import load_checkpoint, save_checkpoint
from mocha_model.config import SearchConfig, small, tiny
from mocha_model.encoder import LSTMLayer, MaskedBatchNorm
from mocha_model.language import WordLanguageModel
from mocha_model.model import SpeechModel
from mocha_model.pronunciation import pronounce
from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import Augmenter
from mocha_training.average import average_checkpoints
from mocha_training.beginnings import BESIDE_PHONES, started
from mocha_training.config import TrainConfig
from mocha_training.data import Corpus, collate
from mocha_training.language import count_words, said
from mocha_training.manifests import Utterance
from mocha_training.phone_branch import ALONE_STEPS, PhoneBranch
from mocha_training.recipes import accented, discriminative, plain, sounds
from mocha_training.trainer import Trainer
from tests.training.made_up import needs_voice

Recipe = Callable[[], TrainConfig]
TEXTS = ["the cat sees a knight", "nobody sees the sea"]


def branch_and_model(texts: list[str] = TEXTS) -> tuple[PhoneBranch, SpeechModel, Tokenizer]:
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_texts(texts)
    model = SpeechModel(tiny(tokenizer.vocab_size))
    return PhoneBranch(model, tokenizer, texts), model, tokenizer


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
def test_the_encoder_learns_nothing_from_a_branch_that_has_just_begun(tmp_path: Path):
    samples = (8000 * np.random.default_rng(0).normal(0, 0.3, 64_000)).astype(np.int16)
    corpus = Corpus(tuple(Utterance(f"{n}", t, "s", "c", 32_000 * n, 32_000) for n, t in enumerate(TEXTS)), (samples,))

    def directions(weight: float, step: int, head: bool) -> dict[str, torch.Tensor]:
        """Of the encoder's gradients in step `step`, the branch's weights being no longer 0."""
        _, model, tokenizer = branch_and_model()
        if not head:
            model.give_phones((), None)
        config = plain().model_copy(update={"phone_weight": weight, "batch_seconds": 8.0})
        trainer = Trainer(config, model, tokenizer, Augmenter(config.augment, corpus), None, tmp_path)
        if trainer.phones:
            torch.nn.init.normal_(trainer.phones.output.weight, generator=torch.Generator().manual_seed(0))
        trainer.step = step
        trainer.train_step(next(iter(trainer._loader())))
        if trainer.phones:
            assert trainer.phones.output.weight.grad is not None
            assert trainer.phones.output.weight.grad.norm() > 0
        grads = {name: p.grad for name, p in model.encoder.named_parameters() if p.grad is not None}
        return {name: grad / grad.norm() for name, grad in grads.items() if grad.norm() > 0}

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)

    without, later = directions(0.0, 0, False), directions(0.0, ALONE_STEPS, False)
    assert same(directions(1.0, 0, False), without)
    assert not same(directions(1.0, ALONE_STEPS, False), later)
    assert not same(directions(1.0, 0, True), without)  # one that has learned before is heeded at once


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
    with pytest.raises(ValueError, match=r"other phones: .*phone_weight 0.0, not 1.0"):
        trainer(TEXTS, 1.0).resume()


@needs_voice
def test_it_learns_beside_the_encoder_and_stays_with_the_model(tmp_path: Path):
    samples = (8000 * np.random.default_rng(0).normal(0, 0.3, 64_000)).astype(np.int16)
    rows = tuple(Utterance(f"{n}", text, "s", "c", 32_000 * n, 32_000) for n, text in enumerate(TEXTS))
    corpus = Corpus(rows, (samples,))
    losses, kept = {}, {}
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
        trainer.save()
        kept[weight] = load_checkpoint(tmp_path / f"{weight}" / "step-000060.safetensors").model
    assert set(losses[0.0]) == {None}
    assert losses[1.0][-1] < 0.5 * losses[1.0][0]
    assert kept[0.0].phones is None
    assert kept[1.0].phones is not None and trainer.phones is not None
    assert kept[1.0].config.phones == tuple(trainer.phones.phones)
    assert torch.equal(kept[1.0].phones.weight, trainer.phones.output.weight)


def test_phones_are_of_words_that_are_spelled():
    with pytest.raises(ValueError, match="phone_weight is of characters"):
        TrainConfig(phone_weight=1.0, units="words")


def kept_branch(directory: Path) -> tuple[Trainer, SpeechModel]:
    """A run that trains a head of phones alone."""
    samples = (8000 * np.random.default_rng(0).normal(0, 0.3, 64_000)).astype(np.int16)
    rows = tuple(Utterance(f"{n}", text, "s", "c", 32_000 * n, 32_000) for n, text in enumerate(TEXTS))
    tokenizer = Tokenizer.from_texts(TEXTS)
    torch.manual_seed(0)
    changes = {"batch_seconds": 8.0, "warmup_steps": 5, "learning_rate": 1e-2, "spec_augment_from": 1.0}
    config = sounds().model_copy(update=changes | {"augment": plain().augment})
    model = SpeechModel(tiny(tokenizer.vocab_size))
    return Trainer(
        config, model, tokenizer, Augmenter(config.augment, Corpus(rows, (samples,))), None, directory
    ), model


@needs_voice
def test_a_head_of_phones_is_trained_alone_and_kept(tmp_path: Path):
    trainer, model = kept_branch(tmp_path)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    batch = next(iter(trainer._loader()))
    figures = [trainer.train_step(batch) for _ in range(60)]
    losses = [step["phones"] for step in figures]
    assert trainer._shown(figures[-1]).startswith(f"step 60  phones {losses[-1]:.2f}  x"), "what alone is trained"
    assert losses[-1] < losses[0] - 0.5
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {"phones.weight", "phones.bias"}
    trainer.save()
    trainer.finish()
    kept = load_checkpoint(tmp_path / "final.safetensors")
    assert kept.config.phones == tuple(trainer.phones.phones if trainer.phones else ())
    samples = torch.randn(1, 16_000)
    parts = (*kept.model.features(samples, torch.tensor([16_000])), kept.model.encoder.init_state(1))
    _, below, _, _ = kept.model.encoder.step_both(*parts)
    heard = kept.model.phone_log_probs(below)
    assert heard is not None and heard.shape[2] == len(kept.config.phones) + 1
    torch.testing.assert_close(heard.exp().sum(2), torch.ones(heard.shape[:2]))
    assert kept_branch(tmp_path)[0].resume(), "and goes on where it was"


@needs_voice
def test_a_head_of_phones_is_of_the_encoder_that_it_was_trained_with(tmp_path: Path):
    trainer, model = kept_branch(tmp_path / "run")
    model.config = model.config.model_copy(update={"search": SearchConfig(**BESIDE_PHONES)})
    trainer.save()
    trainer.finish()
    with_head = tmp_path / "run" / "final.safetensors"
    phones = load_checkpoint(with_head).config.phones
    assert started(with_head, plain(), None).config.phones == ()
    assert started(with_head, plain(), None).model.phones is None
    weights = [
        started(with_head, run, None).config.search.language_weight for run in (plain(), discriminative(), sounds())
    ]
    assert weights == [1.0, 1.5, 1.5]
    assert started(with_head, discriminative(), None).config.phones == phones
    without = tmp_path / "without.safetensors"
    model.give_phones((), None)
    save_checkpoint(without, model, trainer.tokenizer, {})
    for paths, expected in (([with_head, with_head], phones), ([with_head, without], ()), ([without, with_head], ())):
        average_checkpoints(paths, tmp_path / "mean.safetensors")
        mean = load_checkpoint(tmp_path / "mean.safetensors").config
        assert mean.phones == expected
        assert mean.search.language_weight == (1.5 if expected else 1.0), "it stands against phones, or does not"


def test_a_mean_has_the_phones_of_the_model_with_most(tmp_path: Path):
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_texts(TEXTS)
    model, paths = SpeechModel(tiny(tokenizer.vocab_size)), []
    phones = ("a", "b", "c", "d")
    head = torch.nn.Linear(model.config.encoder.size_below, 1 + len(phones))
    for kept in (phones, ("d", "a", "c"), ("a", "z")):
        own = torch.nn.Linear(head.in_features, 1 + len(kept))
        rows = [0, *(1 + phones.index(phone) if phone in phones else 1 for phone in kept)]
        with torch.no_grad():
            own.weight[:], own.bias[:] = head.weight[rows] + len(paths), head.bias[rows] + len(paths)
        model.give_phones(kept, own)
        paths.append(tmp_path / f"{len(paths)}.safetensors")
        save_checkpoint(paths[-1], model, tokenizer, {})
    for both in (paths[:2], paths[1::-1]):
        average_checkpoints(both, tmp_path / "mean.safetensors")
        mean = load_checkpoint(tmp_path / "mean.safetensors").model
        assert mean.config.phones == phones and mean.phones is not None
        more = torch.tensor([0.5, 0.5, 0.0, 0.5, 0.5])  # "b" is in one alone
        torch.testing.assert_close(mean.phones.bias, head.bias + more, atol=2e-3, rtol=0)
        torch.testing.assert_close(mean.phones.weight, head.weight + more[:, None], atol=2e-3, rtol=0)
    average_checkpoints([paths[0], paths[2]], tmp_path / "mean.safetensors")
    assert load_checkpoint(tmp_path / "mean.safetensors").config.phones == (), "each has phones that the other lacks"


def test_a_branch_of_a_grown_network_begins_with_the_head_of_the_small_one(tmp_path: Path):
    torch.manual_seed(0)
    tokenizer, path = Tokenizer.from_texts(TEXTS), tmp_path / "small.safetensors"
    model = SpeechModel(small(tokenizer.vocab_size))
    head = torch.nn.Linear(model.config.encoder.size_below, 3)
    model.give_phones(("a", "b"), head)
    save_checkpoint(path, model, tokenizer, {})
    wide = started(path, accented(), "medium")
    assert wide.config.phones == ("a", "b") and wide.model.phones is not None
    of_old, of_new = wide.model.phones.weight.split((320, 128), dim=1)
    assert torch.equal(of_old, head.weight) and not of_new.any()
    assert torch.equal(wide.model.phones.bias, head.bias)
    assert started(path, plain(), "medium").config.phones == ()


@needs_voice
def test_a_branch_begins_with_the_head_that_the_model_has(tmp_path: Path):
    trainer, _ = kept_branch(tmp_path / "run")
    trainer.save()
    trainer.finish()
    start = started(tmp_path / "run" / "final.safetensors", accented(), None)
    assert start.model.phones is not None and start.config.search.language_weight == 1.5
    head, phones = start.model.phones, start.config.phones
    branch = PhoneBranch(start.model, start.tokenizer, ["the azure sea"])
    assert start.model.phones is branch.output and start.model.config.phones == tuple(branch.phones)
    known = [0, *(1 + branch.phones.index(p) for p in phones)]  # also those that the new texts do not have
    new = [n for n, p in enumerate(branch.phones, 1) if p not in phones]
    assert new and torch.equal(branch.output.weight[known], head.weight)
    assert torch.equal(branch.output.bias[known], head.bias)
    assert not branch.output.weight[new].any() and (branch.output.bias[new] == head.bias.min()).all()


@pytest.mark.parametrize("recipe", [discriminative, sounds])
def test_what_is_left_out_of_an_encoder_for_heads_is_not_left_out_for_good(tmp_path: Path, recipe: Recipe):
    tokenizer = Tokenizer.from_texts(TEXTS)
    before = tiny(tokenizer.vocab_size).with_dropout(0.1)
    save_checkpoint(tmp_path / "before.safetensors", SpeechModel(before), tokenizer, {})

    def left_out(config: TrainConfig) -> tuple[float, float]:
        """By the layers of a run, and by what begins with what it saves."""
        start = started(tmp_path / "before.safetensors", config, None)
        save_checkpoint(tmp_path / "after.safetensors", start.model, tokenizer, {})
        of_layers = {layer.dropout.p for layer in start.model.encoder.stack if isinstance(layer, LSTMLayer)}
        return of_layers.pop(), load_checkpoint(tmp_path / "after.safetensors").config.encoder.dropout

    assert left_out(recipe()) == (0.4, 0.1)
    assert left_out(accented()) == (0.2, 0.2)


def test_phones_that_alone_are_trained_are_no_decoder_s():
    with pytest.raises(ValueError, match="phones alone are trained"):
        TrainConfig(phone_weight=1.0, train_encoder=False, ctc_only=0.0)


@needs_voice
def test_a_language_model_knows_how_its_words_sound(tmp_path: Path):
    tokenizer = Tokenizer.from_texts(TEXTS)
    counts = count_words(TEXTS * 2, tokenizer, 1, ["ii"])
    phones = tuple(sorted({phone for sounds in pronounce(counts.words).values() for phone in sounds}))
    told = said(counts.words)
    by_word = dict(zip(counts.words, told, strict=True))
    assert by_word["sees"] == pronounce(["sees"])["sees"] and by_word["ii"] == ()
    WordLanguageModel(counts, tokenizer, said=told).save(tmp_path / "lm.safetensors", tokenizer, {})
    read = WordLanguageModel.load(tmp_path / "lm.safetensors", tokenizer)
    assert read.said == told
    lexicon = read.lexicon(phones)
    assert lexicon is not None
    at = counts.words.index("sees")
    labels = lexicon.labels[at, : lexicon.lengths[at]].tolist()
    assert tuple(lexicon.phones[n - 1] for n in labels) == by_word["sees"]
