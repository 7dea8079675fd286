"""Which runs go on from what a directory has, and what is said of those that do not."""

import errno
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from mocha_model.checkpoint import BUNDLED
from mocha_model.config import tiny
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import optimizers
from mocha_training.augment import Augmenter
from mocha_training.data import Corpus
from mocha_training.manifests import Utterance
from mocha_training.recipes import plain
from mocha_training.run_directory import numbered
from mocha_training.trainer import Trainer, TrainingError
from tests.training.made_up import said, tones

FIXTURES = Path(__file__).parents[1] / "fixtures"


def make_trainer(
    directory: Path,
    letters: str = "abc",
    text: str = "abc",
    sizes: dict[str, object] | None = None,
    phones: tuple[str, ...] = (),
    started_from: dict[str, Any] | None = None,
    **changes: object,
) -> Trainer:
    corpus = Corpus((Utterance("1", text, "s", "c", 0, 12_000),), (tones(list("abc"), 4000),))
    tokenizer = Tokenizer.from_texts([letters])
    torch.manual_seed(0)
    config = tiny(tokenizer.vocab_size)
    model = SpeechModel(config.model_copy(update={"encoder": config.encoder.model_copy(update=sizes or {})}))
    if phones:
        model.give_phones(phones, torch.nn.Linear(config.encoder.size_below, 1 + len(phones)))
    recipe = plain().changed([f"{name}={json.dumps(value)}" for name, value in changes.items()])
    augmenter = Augmenter(recipe.augment, corpus)
    return Trainer(recipe, model, tokenizer, augmenter, None, directory, started_from=started_from)


def as_before(directory: Path) -> None:
    """Leave in ``last.pt`` what versions before wrote: of all that a run was begun with, its seed."""
    state = torch.load(directory / "last.pt", weights_only=True)
    state["seed"] = state.pop("begun_with")["seed"]
    torch.save(state, directory / "last.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e-4}, r"begun with learning_rate 0\.001, not 0\.0001"),
        ({"augment.gain_db": [-8, 8]}, r"augment\.gain_db \[0.*\], not \[-8.*, 8.*\]"),
        ({"batch_seconds": 9.0, "seed": 4}, r"seed 0, not 4; batch_seconds 160\.0, not 9\.0\. Another run"),
        ({"letters": "abd"}, "begun with other symbols: 'c', 'd'"),
        ({"letters": "abcd"}, "begun with other symbols: 'd'"),
        ({"letters": "abcdefghijkl"}, "begun with other symbols: 'd', 'e', 'f', 'g', 'h', 'i' and 3 more"),
        ({"sizes": {"lstm_sizes": (20, 16)}}, r"begun with network\.encoder\.lstm_sizes \[16, 16\], not \[20, 16\]"),
        ({"sizes": {"dropout": 0.3}}, r"begun with network\.encoder\.dropout 0\.0, not 0\.3"),
        ({"text": "acb"}, r"begun with corpus of 1 utterances \(.*\), not of 1 utterances \("),
        ({"phones": ("a", "b")}, "begun with other phones: 'a', 'b'"),
        (
            {"phones": ("a",), "letters": "abd", "learning_rate": 1, "clip": 1, "muon": True, "weight_decay": 1}
            | {"path_weight": 1, "label_smoothing": 0},
            "; clip .* and 2 more",
        ),
    ],
)
def test_a_run_is_not_resumed_as_another(changes: dict[str, Any], message: str, tmp_path: Path):
    make_trainer(tmp_path).save()
    other = make_trainer(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        other.resume()
    assert make_trainer(tmp_path).resume()
    more = make_trainer(tmp_path)
    more.world = 8
    with pytest.raises(ValueError, match="begun with processes 1, not 8"):
        more.resume()


def test_a_resumed_run_may_be_longer_and_keep_more(tmp_path: Path):
    make_trainer(tmp_path).save()
    changes = {"steps": 7, "max_minutes": 3, "epochs": 2, "save_every": 3, "evaluate_every": 4, "final": "best"}
    assert make_trainer(tmp_path, **changes, average_last=2, fold_phones=True, preset="large").resume()


def test_a_run_goes_on_from_the_checkpoint_that_it_was_begun_with(tmp_path: Path):
    first, second = ({"name": "mocha-asr", "steps": steps} for steps in (7, 8))
    make_trainer(tmp_path, started_from=first).save()
    assert make_trainer(tmp_path, started_from=first).resume()
    assert make_trainer(tmp_path).resume(), "that checkpoint need not be given again"
    with pytest.raises(ValueError, match="begun from another checkpoint"):
        make_trainer(tmp_path, started_from=second).resume()
    make_trainer(tmp_path).save()
    with pytest.raises(ValueError, match="begun from another checkpoint"):
        make_trainer(tmp_path, started_from=first).resume()


def test_a_state_that_is_damaged_is_told(tmp_path: Path):
    make_trainer(tmp_path).save()
    path = tmp_path / "last.pt"
    whole = path.read_bytes()
    other = io.BytesIO()
    torch.save({"weights": torch.zeros(1)}, other)
    for damaged in (whole[: len(whole) // 2], b"not a state", b"", other.getvalue()):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"last\.pt: not a run's state.* in another directory"):
            make_trainer(tmp_path).resume()


@pytest.mark.parametrize("name", ["step-000001", "best", "final"])
def test_checkpoints_of_another_run_are_not_taken_for_ones_own(name: str, tmp_path: Path):
    (tmp_path / "other.safetensors").touch()
    assert not make_trainer(tmp_path).resume()
    (tmp_path / f"{name}.safetensors").touch()
    with pytest.raises(ValueError, match=f"{tmp_path.name}: has {name}.safetensors of a run, and no last.pt"):
        make_trainer(tmp_path).resume()


def test_runs_of_versions_before_are_resumed(tmp_path: Path):
    before = make_trainer(tmp_path, phones=("a", "b"), seed=3)
    before.step = 5
    before.save()
    as_before(tmp_path)
    resumed = make_trainer(tmp_path, phones=("a", "b"), seed=3, learning_rate=1e-4)
    assert resumed.resume() and resumed.step == 5
    with pytest.raises(ValueError, match="begun with seed 3, not 4"):
        make_trainer(tmp_path, phones=("a", "b"), seed=4).resume()
    for changes in ({"phones": ("a",)}, {"phones": ("a", "b"), "letters": "ab"}):
        with pytest.raises(ValueError, match="begun with another network"):
            make_trainer(tmp_path, **changes, seed=3).resume()


def test_optimizers_of_versions_before_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:  # Muon once had v of the energies too
        today = optimizers._matrices
        patch.setattr(optimizers, "_matrices", lambda m: [*today(m), m.decoder.attention.energies.direction])
        make_trainer(tmp_path, muon=True).save()
    as_before(tmp_path)
    for muon in (True, False):
        with pytest.raises(ValueError, match=r"last\.pt: its optimizers are of other parameters"):
            make_trainer(tmp_path, muon=muon).resume()


def corpus_directory(directory: Path, text: str) -> Path:
    """A corpus of one recording that is read as `text`."""
    directory.mkdir()
    recording = (FIXTURES / "suit.wav").read_bytes()
    with tarfile.open(directory / "train-000.tar", "w") as tar:
        member = tarfile.TarInfo("k.wav")
        member.size = len(recording)
        tar.addfile(member, io.BytesIO(recording))
    row = {"key": "k", "shard": "train-000.tar", "text": text, "speaker": "s", "corpus": "c"}
    (directory / "train.jsonl").write_text(json.dumps(row))
    return directory


def test_two_runs_in_one_directory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mocha_training.trainer.LOCK_TIMEOUT_S", 0)
    with FileLock(tmp_path / "run.lock"):
        second = make_trainer(tmp_path, steps=1)
        with pytest.raises(TrainingError, match="another run goes on here"):
            second.run()
        assert not (tmp_path / "last.pt").exists()
    second.run()
    assert second.step == 1 and (tmp_path / "final.safetensors").is_file()


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """There is no more space when the file `name` is written."""
    write_bytes = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        if not path.name.startswith(name):
            return write_bytes(path, data)
        write_bytes(path, data[:9])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)


def test_a_run_that_ends_before_its_state_is_written_lacks_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before, later = (make_trainer(tmp_path, average_last=1) for _ in range(2))
    before.save()
    before.step = 7
    with monkeypatch.context() as patch:
        fill_the_disk(patch, "last.pt")
        with pytest.raises(OSError, match=r"last\.pt"):
            before.save()
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-000000.safetensors", "step-000007.safetensors"}
    assert later.resume() and later.step == 0
    later.step = 3
    later.save()
    assert [path.name for path in numbered(later.directory, later.step)] == ["step-000003.safetensors"], (
        "no later one stands for this run"
    )


@pytest.mark.parametrize("name", ["last.pt", "final.safetensors"])
def test_a_full_disk_is_told_in_a_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    data, run = corpus_directory(tmp_path / "data", "had a suit"), tmp_path / "run"
    fill_the_disk(monkeypatch, name)
    begun = ("train", "--out", run, "--device", "cpu", "--steps", 1, "--recipe", "warm_start", "--preset", "tiny")
    status, output = said(*begun, "--data", data)
    assert status == 1 and output.endswith(f"error: [Errno 28] No space left on device: '{run / name}'")
    assert not list(run.glob("*.partial")) and not (run / name).exists()


def test_the_command_says_why_a_run_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    data, other = corpus_directory(tmp_path / "data", "had a suit"), corpus_directory(tmp_path / "other", "had a quit")
    run = tmp_path / "run"
    begun = ("train", "--out", run, "--device", "cpu", "--steps", 1, "--recipe", "warm_start", "--preset", "tiny")
    assert said(*begun, "--data", data)[0] == 0
    first = (run / "last.pt").read_bytes()
    further = (*begun[:-3], "encoder", "--init", run / "final.safetensors", "--data", data)
    for command, message in (
        (further, "run was begun with spec_augment_from 0.15, not 0.3; max_seconds 6.0, not 10.0;"),
        ((*begun, "--init", run / "final.safetensors", "--data", data), "run was begun from another checkpoint"),
        ((*begun, "--data", other), "run was begun with other symbols: 'q', 's'"),
        ((*begun[:-1], "small", "--data", data), "run was begun with network."),
    ):
        status, output = said(*command)
        assert status == 1 and message in output, output
    assert (run / "last.pt").read_bytes() == first
    status, output = said(*begun, "--data", data)
    assert status == 0 and "resumed at step 1" in output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("preset=wide", "--init brings a network, which --preset grows, and --set preset would not"),
        ("units=words", "its units are characters, the recipe's words"),
    ],
)
def test_a_checkpoint_brings_its_network_and_units(
    setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    data = corpus_directory(tmp_path / "data", "had a suit")
    options = ("--recipe", "plain", "--steps", 1, "--device", "cpu", "--init", BUNDLED, "--set", setting)
    status, output = said("train", *options, "--data", data, "--out", tmp_path / "run")
    assert status == 1 and message in output
    assert not (tmp_path / "run" / "last.pt").exists()
