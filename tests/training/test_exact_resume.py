"""A run that is resumed is the same run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from mocha_training.batches import Epoch
from mocha_training.data import Batch, Corpus
from tests.training.made_up import make_trainer, needs_voice


@pytest.mark.parametrize("changes", [{}, {"muon": True}, pytest.param({"phone_weight": 1.0}, marks=needs_voice)])
def test_resumed_run_is_the_same_run(changes: dict[str, Any], corpus: Corpus, tmp_path: Path):
    whole = make_trainer(corpus, tmp_path / "whole", steps=7, **changes)
    whole.run()
    part = make_trainer(corpus, tmp_path / "part", steps=7, save_every=4, **changes)
    for batch in part._loader():
        part.train_step(batch)
        if part.step == 2:
            part.save()
            break
    resumed = make_trainer(corpus, tmp_path / "part", steps=7, **changes)
    assert resumed.resume() and resumed.step == 2
    resumed.run()
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(tensor, resumed.model.state_dict()[name], rtol=0, atol=0, msg=name)


def test_batches_of_the_next_epoch_follow_those_of_one(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, batch_seconds=4.0)
    epochs = [Epoch(trainer.augmenter, trainer.tokenizer, trainer.config, number, 0, 1) for number in range(3)]
    trainer.batch_in_epoch = 1
    expected = [epochs[0].make(at) for at in epochs[0].starts(1)]
    expected += [epoch.make(at) for epoch in epochs[1:] for at in epoch.starts()]
    loader = DataLoader(trainer.batches, sampler=trainer.batches.places(0, 1), batch_size=None, num_workers=2)
    for batches in (trainer._loader(), loader):  # the second as on a GPU
        for batch, other in zip(batches, expected, strict=False):
            assert torch.equal(batch.samples, other.samples) and torch.equal(batch.tokens, other.tokens)
    assert len(epochs[0].starts(1)) > 1


def test_a_run_is_resumed_in_the_epoch_and_after_the_audio_where_it_was(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole, part, resumed = (
        make_trainer(corpus, tmp_path / name, steps=7, save_every=5) for name in ("whole", "part", "part")
    )
    assert len(whole.batches.epoch(0).starts()) < 5, "the run is to be saved in a later epoch"
    whole.run()
    train_step = part.train_step

    def interrupted(batch: Batch) -> dict[str, float]:
        if part.step == 5:
            raise KeyboardInterrupt
        return train_step(batch)

    monkeypatch.setattr(part, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        part.run()
    assert resumed.resume() and resumed.step == 5 and resumed.epoch > 0
    resumed.run()
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(tensor, resumed.model.state_dict()[name], rtol=0, atol=0, msg=name)
    for name in ("steps", "epochs", "hours_heard"):
        assert resumed.provenance()[name] == whole.provenance()[name] > 0


def test_a_run_is_not_resumed_with_other_chance(corpus: Corpus, tmp_path: Path):
    make_trainer(corpus, tmp_path, steps=4, seed=3).save()
    assert make_trainer(corpus, tmp_path, steps=4, seed=3).resume()
    with pytest.raises(ValueError, match="begun with seed 3, not 4"):
        make_trainer(corpus, tmp_path, steps=4, seed=4).resume()


def test_a_resumed_run_knows_its_best(corpus: Corpus, tmp_path: Path):
    runs = []
    for name in ("whole", "part", "part"):
        runs.append(make_trainer(corpus, tmp_path / name, steps=4, save_every=2, evaluate_every=2))
        runs[-1].dev = corpus.subset([0, 1])
    whole, part, resumed = runs
    whole.run()
    for batch in part._loader():
        part._after_step(part.train_step(batch))
        if part.step == 2:
            break
    assert resumed.resume() and resumed.fewest_errors == part.fewest_errors < math.inf
    best = (tmp_path / "part" / "best.safetensors").read_bytes()
    resumed._keep_best(part.fewest_errors + 0.1)
    assert (tmp_path / "part" / "best.safetensors").read_bytes() == best
    resumed.run()
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(tensor, resumed.model.state_dict()[name], rtol=0, atol=0, msg=name)


def test_a_resumed_run_has_what_was_left_of_its_time(corpus: Corpus, tmp_path: Path):
    part = make_trainer(corpus, tmp_path, steps=1000, max_minutes=1.0)
    part.step, part.elapsed_s, part.seconds = 3, 29.5, 0.5  # the last step's seconds are counted with the next one
    part.save()
    resumed = make_trainer(corpus, tmp_path, steps=1000, max_minutes=1.0)
    assert resumed.resume()
    assert resumed.progress == part.progress > 0.49 and resumed.learning_rate() == part.learning_rate()
    resumed.train_step(next(iter(resumed._loader())))
    assert resumed.elapsed_s == 30.0
