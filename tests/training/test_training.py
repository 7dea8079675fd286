"""Training in miniature: losses, a falling loss, what learns, several processes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from torchaudio.functional import forced_align
from typer.testing import CliRunner

from mocha_model.checkpoint import BUNDLED, load_checkpoint
from mocha_model.config import SearchConfig, tiny
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import cli, losses
from mocha_training.augment import AugmentConfig, Augmenter
from mocha_training.batches import Epoch
from mocha_training.beginnings import BESIDE_PHONES, TOLD_APART, started
from mocha_training.config import TrainConfig
from mocha_training.data import Corpus, load_corpus
from mocha_training.denominator import character_trigrams, denominator
from mocha_training.evaluate import evaluate_corpus
from mocha_training.recipes import accented, plain
from mocha_training.trainer import Trainer
from tests.training.made_up import FIXTURES, make_trainer, path_parts, said


def test_losses_are_their_definitions():
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 3, 5), torch.tensor([[4, 1, 2], [3, 2, 0]])
    lengths = torch.tensor([3, 2])
    log_probs = logits.log_softmax(-1)
    real = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    expected = -sum(0.9 * log_probs[b, u, tokens[b, u]] + 0.1 * log_probs[b, u].mean() for b, u in real) / 5
    torch.testing.assert_close(losses.label_smoothed_cross_entropy(logits, tokens, lengths, 0.1), expected)
    terms = [
        0.7 * log_probs[0, 0, 4] + 0.3 * log_probs[0, 0, 1],
        0.2 * log_probs[0, 1, 4] + 0.5 * log_probs[0, 1, 1] + 0.3 * log_probs[0, 1, 2],
        0.2 * log_probs[0, 2, 1] + 0.8 * log_probs[0, 2, 2],
        0.7 * log_probs[1, 0, 3] + 0.3 * log_probs[1, 0, 2],
        0.2 * log_probs[1, 1, 3] + 0.8 * log_probs[1, 1, 2],
    ]
    smoothed = losses.localized_label_smoothing(logits, tokens, lengths, (0.4, 1.0, 0.6))
    torch.testing.assert_close(smoothed, -torch.stack(terms).sum() / 5)
    alpha = torch.tensor([[[0.5, 0.5], [0.25, 0.25], [0.0, 1.0]], [[1.0, 0.0], [0.0, 0.5], [9.0, 9.0]]])
    torch.testing.assert_close(losses.quantity(alpha, lengths), torch.tensor((0.5 + 0.5) / 5))
    ends = torch.tensor([[0, 1, -1], [1, 1, 1]])
    late = losses.boundary_latency(alpha, ends, lengths)
    torch.testing.assert_close(late, torch.tensor((0.5 + 0.75 + 1.0 + 0.5) / 4))


def test_consistency_is_the_mean_divergence_of_each_view_from_the_other():
    torch.manual_seed(0)
    logits = torch.randn(4, 7, 5, requires_grad=True)  # two utterances, then their second views
    log_probs, frames, num_tokens = logits.log_softmax(2), torch.tensor([7, 4, 7, 4]), torch.tensor([5, 3, 5, 3])
    views = [torch.distributions.Categorical(logits=row[:n]) for row, n in zip(log_probs, frames.tolist(), strict=True)]
    pairs = [(0, 2), (2, 0), (1, 3), (3, 1)]
    divergences = [torch.distributions.kl_divergence(views[given], views[own]).sum() for own, given in pairs]
    found = losses.consistency(log_probs, frames, num_tokens)
    torch.testing.assert_close(found, torch.stack(divergences).sum() / (4 + 2 + 4 + 2))
    found.backward()
    towards = (log_probs.exp() - log_probs.exp()[[2, 3, 0, 1]]) / 12  # as of a cross-entropy: the other is given
    towards[[1, 3], 4:] = 0
    torch.testing.assert_close(logits.grad, towards.detach())
    assert losses.consistency(log_probs[[0, 1, 0, 1]], frames, num_tokens) == 0


def test_ctc_boundaries_are_the_last_frames_of_each_character():
    path = [0, 4, 4, 0, 5, 0, 5, 5, 0]
    log_probs = torch.full((1, 9, 6), -20.0)
    for frame, label in enumerate(path):
        log_probs[0, frame, label] = 0
    tokens = torch.tensor([[4, 5, 5, 2]])
    assert losses.ctc_boundaries(log_probs, torch.tensor([9]), tokens, torch.tensor([4])).tolist() == [[2, 4, 7, -1]]


def test_ctc_boundaries_of_a_batch_are_those_of_each_row_as_torchaudio_aligns_it():
    generator = torch.Generator().manual_seed(3)
    log_probs = (3 * torch.randn(12, 40, 7, generator=generator)).log_softmax(2)
    num_frames = torch.randint(12, 41, (12,), generator=generator)
    num_tokens = torch.randint(1, 12, (12,), generator=generator)  # some rows cannot be aligned: too many, or none
    tokens = torch.randint(4, 7, (12, 11), generator=generator)  # few symbols, so that many come twice
    tokens[torch.arange(11) >= num_tokens[:, None]] = 0
    tokens[torch.arange(12), num_tokens - 1] = 2
    num_frames[0] = 3
    found = losses.ctc_boundaries(log_probs, num_frames, tokens, num_tokens)
    possible = losses.has_ctc_path(num_frames, tokens, num_tokens) & (num_tokens > 1)
    assert possible.sum() > 6 and not possible[0]
    for row, ends in enumerate(found.tolist()):
        target = tokens[None, row, : int(num_tokens[row]) - 1]
        wanted = []
        if possible[row]:
            [path], _ = forced_align(log_probs[row : row + 1, : int(num_frames[row])], target.int(), blank=0)
            after = [*path.tolist()[1:], 0]
            wanted = [n for n, label in enumerate(path.tolist()) if label and after[n] != label]
        assert ends == wanted + [-1] * (11 - len(wanted))


def test_loss_falls(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=40, learning_rate=5e-3)
    batch = next(iter(trainer._loader()))
    history = [trainer.train_step(batch)["loss"] for _ in range(40)]
    assert history[-1] < 0.85 * history[0]


@pytest.mark.parametrize("mechanism", ["softmax", "monotonic", "mocha", "matcha"])
def test_every_mechanism_trains_decodes_and_is_drawn(mechanism: str, corpus: Corpus, tmp_path: Path):
    tokenizer = Tokenizer.from_texts(u.text for u in corpus.utterances)
    torch.manual_seed(0)
    model = SpeechModel(tiny(tokenizer.vocab_size).with_attention(mechanism=mechanism))
    config = plain().model_copy(update={"batch_seconds": 8.0, "steps": 20, "learning_rate": 1e-2, "warmup_steps": 2})
    trainer = Trainer(config, model, tokenizer, Augmenter(config.augment, corpus), corpus.subset([0, 1]), tmp_path)
    batch = next(iter(trainer._loader()))
    history = [trainer.train_step(batch) for _ in range(12)]
    assert history[-1]["ce"] < history[0]["ce"]
    assert ("quantity" in history[0]) == (mechanism != "softmax")
    trainer.save()
    runner, picture = CliRunner(), tmp_path / "align.svg"
    app = typer.Typer()
    app.command()(cli.align)
    checkpoint = str(next(tmp_path.glob("step-*.safetensors")))
    options = ["--out", str(picture), "--model", checkpoint]
    said = runner.invoke(app, [str(FIXTURES / "suit.wav"), *options, "--text", "ab"])
    assert said.exit_code == 0, said.output
    assert picture.read_text().count("<image") == (2 if mechanism == "softmax" else 4)
    said = runner.invoke(app, [str(FIXTURES / "make.sh"), *options])
    assert said.exit_code == 1 and "not a readable recording" in said.output
    report, _ = evaluate_corpus(model, tokenizer, corpus, "soft")
    assert report["decoding"] == "soft" and evaluate_corpus(model, tokenizer, corpus)[0]["decoding"] == (
        "soft" if mechanism == "softmax" else "online"
    )


def test_consistency_takes_two_views_of_each_utterance(corpus: Corpus, tmp_path: Path):
    changes = {"attention": "path", "consistency_weight": 0.2, "batch_seconds": 16.0}
    changes["augment"] = AugmentConfig(freq_masks=2, time_masks=2, noise_probability=0, room_probability=0)
    trainer = make_trainer(corpus, tmp_path, **changes, spec_augment_from=0.0)
    batch, heard = next(iter(trainer._loader())), []
    trainer.model.encoder.register_forward_pre_hook(lambda _, given: heard.append(given[0].detach().clone()))
    assert batch.samples.shape[0] * batch.samples.shape[1] <= 8 * 16_000  # both views are the 16 seconds
    figures = trainer.train_step(batch)
    first, second = heard[0].chunk(2)
    same = (first == second).float().mean()
    assert len(first) == len(batch.samples) and 0.3 < same < 0.99  # but for what the masks hide in one of them
    assert figures["consistency"] > 0 and trainer.heard_s == 2 * batch.seconds
    assert "consistency" not in make_trainer(corpus, tmp_path / "without", attention="path").train_step(batch)


def test_transcripts_are_told_from_all_texts_of_such_characters(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, attention="path", denominator_weight=0.9)
    trainer.model.eval()
    batch = next(iter(trainer._loader()))
    _, num_memory, log_probs, _ = path_parts(trainer, batch)
    trigrams = character_trigrams((u.text for u in corpus.utterances), trainer.tokenizer)
    rows = (num_memory, batch.tokens, batch.num_tokens)
    with torch.no_grad():
        weight, found = trainer.losses(batch)["denominator"]
    torch.testing.assert_close(found, denominator(log_probs, *rows, trigrams, trainer.tokenizer.space_id))
    assert weight == pytest.approx(0.9 * trainer.config.ctc_weight), "a part of what the CTC branch has to do"
    assert "denominator" not in make_trainer(corpus, tmp_path / "without", attention="path").losses(batch)


def test_fields_of_a_recipe_are_set_by_name():
    settings = ["batch_seconds=600", "augment.gain_db=[-8, 8]", "augment.time_masks=0", "rate_drops=[[10, 0.5]]"]
    config = accented().changed([*settings, "attention=expected", "slip_probability=0", "sampling_probability=0"])
    assert (config.batch_seconds, config.attention, config.rate_drops) == (600, "expected", ((10, 0.5),))
    assert (config.augment.gain_db, config.augment.time_masks) == ((-8, 8), 0)
    assert config.augment.microphone_probability == accented().augment.microphone_probability  # as it was
    assert accented().changed([]) == accented()
    for wrong in ("batch_seconds", "no_such=1", "augment.no_such=1", "seed.seed=1", "batch_seconds=-1", "seed=x"):
        with pytest.raises(ValueError, match=wrong.partition("=")[0].rpartition(".")[2]):
            accented().changed([wrong])


def test_the_last_recipe_changes_what_the_ctc_head_says_and_nothing_else(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    options = ("--recipe", "discriminative", "--steps", 2, "--device", "cpu", "--init", BUNDLED)
    status, output = said("train", *options, "--data", manifest.parent, "--out", tmp_path / "run")
    assert status == 0, output
    after = load_checkpoint(tmp_path / "run" / "final.safetensors")
    last, before = after.model.state_dict(), load_checkpoint(BUNDLED).model.state_dict()
    assert {name for name in last if not torch.equal(last[name], before[name])} == {"ctc.weight", "ctc.bias"}
    assert after.config.phones  # and of the head beside them the search knows too
    assert after.config.search == TOLD_APART.model_copy(update=BESIDE_PHONES) != TOLD_APART


def test_a_model_says_how_its_ctc_head_wants_to_be_searched():
    recipes = [TrainConfig(dropout=0.2, denominator_weight=weight) for weight in (0.0, 0.5)]
    assert [started(BUNDLED, recipe, None).config.search for recipe in recipes] == [SearchConfig(), TOLD_APART]


def test_rows_without_a_ctc_path_count_for_nothing(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, attention="path")
    good = next(iter(trainer._loader()))
    hopeless = replace(good, num_samples=good.num_samples.clone())
    hopeless.num_samples[0] = 2000  # too short for its text
    figures = trainer.train_step(hopeless)
    assert all(np.isfinite(value) for value in figures.values())
    hopeless.num_samples[:] = 2000
    before = [p.detach().clone() for p in trainer.model.decoder.parameters()]
    assert trainer.losses(hopeless)["path"][1] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.decoder.parameters(), strict=True))


def test_a_batch_without_a_ctc_path_has_figures(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, attention="path")
    batch = next(iter(trainer._loader()))
    figures = trainer.train_step(replace(batch, num_samples=torch.full_like(batch.num_samples, 2000)))
    assert figures["fired"] == 0 and all(np.isfinite(value) for value in figures.values())


def _one_step(rank: int, manifest: Path, directory: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{directory}/meet", rank=rank, world_size=2)
    trainer = make_trainer(load_corpus(manifest, directory), directory / "run", noise_std=0.0, attention="path")
    trainer.model.apply(lambda m: setattr(m, "p", 0.0) if isinstance(m, torch.nn.Dropout) else None)
    trainer.train_step(next(iter(trainer._loader())))
    torch.save([p.grad for p in trainer.model.parameters()], directory / f"grads-{rank}.pt")
    torch.distributed.destroy_process_group()


def test_processes_average_their_gradients(manifest: Path, tmp_path: Path):
    corpus = load_corpus(manifest, tmp_path)
    alone = []
    for rank in range(2):
        trainer = make_trainer(corpus, tmp_path / "alone", noise_std=0.0, attention="path", clip=1e9)
        epoch = Epoch(trainer.augmenter, trainer.tokenizer, trainer.config, 0, rank, 2)
        assert len(epoch.starts()) == len(epoch.batches) // 2
        assert sorted(i for batch in epoch.batches for i in batch) == list(range(6))
        trainer.train_step(epoch.make(0))
        alone.append([p.grad for p in trainer.model.parameters()])
    torch.multiprocessing.spawn(_one_step, (manifest, tmp_path), nprocs=2)
    first, second = (torch.load(tmp_path / f"grads-{rank}.pt") for rank in range(2))
    for a, b, x, y in zip(first, second, *alone, strict=True):
        assert torch.equal(a, b)
        scale = 5.0 / max(5.0, float(torch.stack([(g + h).norm() / 2 for g, h in zip(*alone, strict=True)]).norm()))
        torch.testing.assert_close(a, scale * (x + y) / 2, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("ctc_only", "trained"), [(0.0, "decoder"), (1.0, "ctc")])
def test_an_encoder_that_is_not_trained_stays(ctc_only: float, trained: str, corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=3, train_encoder=False, ctc_only=ctc_only)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.run()
    moved = {name.split(".")[0] for name, t in trainer.model.state_dict().items() if not torch.equal(t, before[name])}
    assert moved == {trained}


def test_the_learning_rate_follows_a_cosine_to_a_hundredth(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=100, warmup_steps=1, learning_rate=0.004)
    rates = []
    for trainer.step in (0, 25, 50, 100):
        rates.append(trainer.learning_rate() / 0.004)
    assert rates == pytest.approx([1, 0.01 + 0.99 * (2 + 2**0.5) / 4, 0.505, 0.01])


@pytest.mark.parametrize("muon", [False, True])
def test_each_parameter_is_learned_once(muon: bool, corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, muon=muon)
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    learned = [id(p) for group in groups for p in group["params"]]
    assert sorted(learned) == sorted(id(p) for p in trainer.model.parameters())
    assert not any(group["weight_decay"] for group in groups for p in group["params"] if p.dim() < 2)


def test_muon_turns_matrices_in_all_directions_alike(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, muon=True, weight_decay=0.0, warmup_steps=1)
    matrix = trainer.model.decoder.cell.weight_hh  # [64, 16]
    before = matrix.detach().clone()
    trainer.train_step(next(iter(trainer._loader())))
    moved = torch.linalg.svdvals(matrix.detach() - before) / (trainer.config.learning_rate * 0.2 * 64**0.5)
    assert moved.min() > 0.5 and moved.max() < 1.4, "Liu et al. 2025, eq. 4: 0.2 sqrt(max(A, B)) of an orthogonal one"


def test_the_length_of_a_run_may_be_counted_in_epochs(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=1000, epochs=2.0, batch_seconds=4.0)
    trainer.run()
    assert (trainer.step, trainer.epoch) == (sum(len(trainer.batches.epoch(n).starts()) for n in (0, 1)), 1)
    with pytest.raises(ValueError, match="fewer batches"):
        make_trainer(corpus.subset([]), tmp_path)


def test_config_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="learnin_rate"):
        TrainConfig(learnin_rate=1)  # type: ignore[call-arg]
