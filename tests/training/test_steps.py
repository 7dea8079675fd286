"""What a step of training computes in bfloat16, what it does not take, and which parameters learn how."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mocha_model.config import FeatureConfig, tiny
from mocha_model.features import LogMel
from mocha_model.model import SpeechModel
from mocha_training import losses
from mocha_training import trainer as trainer_module
from mocha_training.config import TrainConfig
from mocha_training.optimizers import make_optimizers
from mocha_training.recipes import plain
from mocha_training.trainer import TrainingError
from tests.conftest import sound
from tests.training.test_resume import make_trainer


def test_late_frames_are_told_apart_in_bfloat16():
    """As numbers of that kind they are not: 301 would be 300."""
    alpha, ends = torch.zeros(1, 1, 400), torch.tensor([[300]])
    alpha[0, 0, 301] = 1.0
    with torch.autocast("cpu", torch.bfloat16):
        assert losses.boundary_latency(alpha, ends, torch.tensor([1])) == 1


def test_features_of_training_are_those_of_serving():
    features, samples = LogMel(FeatureConfig()), sound(16_000)[None]
    with torch.autocast("cpu", torch.bfloat16):
        trained, _ = features(samples, torch.tensor([16_000]))
    served, _ = features(samples, torch.tensor([16_000]))
    assert trained.dtype == torch.float32 and torch.equal(trained, served)


def test_a_ctc_head_that_listens_is_spared_a_bad_batch(tmp_path: Path):
    trainer = make_trainer(tmp_path, ctc_weight=0, quantity_weight=0, latency_weight=0)
    batch = next(iter(trainer._loader()))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    spoiled = trainer.model.ctc.bias.register_hook(lambda gradient: gradient * math.nan)
    assert not math.isfinite(trainer.train_step(batch)["norm"])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    spoiled.remove()
    assert math.isfinite(trainer.train_step(batch)["norm"])
    assert not torch.equal(before[-1], list(trainer.model.parameters())[-1])


def test_a_bad_batch_leaves_nothing_and_a_hundred_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_module, "MOST_SPOILED", 2)
    trainer = make_trainer(tmp_path)
    batch = next(iter(trainer._loader()))
    bad = replace(batch, samples=torch.full_like(batch.samples, math.nan))
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train_step(bad)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())
    trainer.train_step(batch)
    trainer.train_step(bad)
    with pytest.raises(TrainingError, match="gradients of the last 2 steps were not finite"):
        trainer.train_step(bad)


def test_vectors_of_energy_functions_are_no_matrix_to_muon():
    model = SpeechModel(tiny(9))
    adam, muon = make_optimizers(model, plain().changed(["muon=true"]))
    learned = [{id(p) for group in o.param_groups for p in group["params"]} for o in (adam, muon)]
    energies = model.decoder.attention.energies
    assert energies.direction.dim() == 2 and id(energies.direction) in learned[0] - learned[1]
    assert id(energies.memory_projection.weight) in learned[1] - learned[0]


def test_an_encoder_that_stays_leaves_no_part_of_a_run_to_the_ctc_head():
    with pytest.raises(ValueError, match="without train_encoder ctc_only is 0 or 1"):
        TrainConfig(train_encoder=False, ctc_only=0.5)
    for whole in (0.0, 1.0):
        assert TrainConfig(train_encoder=False, ctc_only=whole).ctc_only == whole
