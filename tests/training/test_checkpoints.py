"""What a run leaves: checkpoints, where they come from, their means."""

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from mocha_model.checkpoint import BUNDLED, CheckpointError, calibrate_checkpoint, load_checkpoint
from mocha_model.confidence import Calibration
from mocha_model.recognizer import Recognizer
from mocha_training import cli
from mocha_training.average import average_checkpoints
from mocha_training.data import Corpus
from mocha_training.recipes import plain
from mocha_training.trainer import Trainer
from tests.training.made_up import make_trainer


def test_provenance_says_what_a_run_started_from(
    manifest: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    first = make_trainer(corpus, tmp_path / "first", steps=2)
    first.run()
    assert "started_from" not in first.provenance()
    second = tmp_path / "second"
    app = typer.Typer()
    app.command()(cli.train)
    options = ["--data", str(manifest.parent), "--out", str(second), "--recipe", "plain", "--device", "cpu"]
    options += ["--seed", "7"]
    again = ["--init", str(tmp_path / "first" / "final.safetensors"), "--steps", "1"]
    for command in ([*options, *again], [*options, "--preset", "tiny", "--steps", "2"]):  # resumed without --init
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    found = Recognizer.load(second / "final.safetensors").provenance
    origin = found["started_from"]
    assert found["steps"] == 2 and origin["steps"] == 2 and origin["recipe"]["batch_seconds"] == 8.0
    assert found["recipe"]["seed"] == 7 != origin["recipe"]["seed"]
    assert origin["hours_heard"] > 0 and "started_from" not in origin and str(tmp_path) not in json.dumps(found)
    parts = (plain(), first.model, first.tokenizer, first.augmenter, None, tmp_path / "third")
    third = Trainer(*parts, started_from=found)
    assert third.provenance()["started_from"]["started_from"] == origin


def test_run_leaves_what_a_user_needs(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=10, evaluate_every=10)
    trainer.dev = corpus.subset([0, 1])
    trainer.run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("dev_wer" in row for row in rows) and any("x_real_time" in row for row in rows)
    loaded = Recognizer.load(tmp_path / "final.safetensors")
    assert loaded.provenance["steps"] == 10 and list(tmp_path.glob("tensorboard/events*"))


def test_average(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=9)
    trainer.save()
    first = trainer.model.ctc.bias.detach().clone()
    with torch.no_grad():
        trainer.model.ctc.bias += 2
    trainer.step = 1
    trainer.save()
    both = sorted(tmp_path.glob("step-*.safetensors"))
    average_checkpoints(both, tmp_path / "mean.safetensors")
    mean = Recognizer.load(tmp_path / "mean.safetensors").model.ctc.bias.detach()
    torch.testing.assert_close(mean, (first + 1).half().float())
    assert (tmp_path / "mean.safetensors").stat().st_size < 0.75 * both[0].stat().st_size


def test_checkpoints_are_in_the_order_of_their_steps(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, average_last=2)
    for step in (999_000, 999_500, 1_000_000, 1_000_500):
        trainer.step = step
        trainer.save()
    assert {path.stem for path in tmp_path.glob("step-*")} == {"step-1000000", "step-1000500"}
    trainer.finish()
    assert load_checkpoint(tmp_path / "final.safetensors").provenance["steps"] == 1_000_500


def test_what_float16_cannot_hold_is_not_written(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=9)
    with torch.no_grad():
        trainer.model.ctc.bias += 1e5
    trainer.save()
    with pytest.raises(CheckpointError, match="has values that float16 does not"):
        trainer.finish()
    assert not (tmp_path / "final.safetensors").exists()


def test_the_command_averages_what_fits_together(corpus: Corpus, tmp_path: Path):
    app, runner = typer.Typer(), CliRunner()
    app.command()(cli.average)
    trainer = make_trainer(corpus, tmp_path, steps=9)
    trainer.save()
    (first,) = tmp_path.glob("step-*.safetensors")
    mean = tmp_path / "mean.safetensors"
    assert runner.invoke(app, [str(first), str(first), "--out", str(mean)]).exit_code == 0
    torch.testing.assert_close(Recognizer.load(mean).model.ctc.bias, trainer.model.ctc.bias.half().float())
    fitted = Calibration(bias=1.0, slope=1.0)
    calibrate_checkpoint(first, fitted, fitted)
    told = runner.invoke(app, [str(first), "--out", str(mean)])
    assert "`mocha-asr calibrate` fits another" in " ".join(told.output.split())
    assert load_checkpoint(mean).calibration is None
    refused = runner.invoke(app, [str(first), str(BUNDLED), "--out", str(mean)])
    assert refused.exit_code == 1 and "of one configuration" in " ".join(refused.output.split())
