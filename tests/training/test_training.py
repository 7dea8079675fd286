"""Training in miniature: batches, losses, a falling loss, exact resume, evaluation."""

import gzip
import io
import json
import math
import os
import shutil
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from torch.utils.data import DataLoader
from torchaudio.functional import forced_align
from typer.testing import CliRunner

from mocha_model.attention import Memory
from mocha_model.checkpoint import BUNDLED, CheckpointError, load_checkpoint, save_checkpoint
from mocha_model.config import SearchConfig, small, tiny
from mocha_model.decoder import Decoder
from mocha_model.model import SpeechModel
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer
from mocha_training import cli, data, losses, path, policy, splicing
from mocha_training.augment import AugmentConfig, Augmenter
from mocha_training.average import average_checkpoints
from mocha_training.batches import Epoch
from mocha_training.beginnings import BESIDE_PHONES, TOLD_APART, started
from mocha_training.config import TrainConfig
from mocha_training.data import Batch, Corpus, CorpusError, load_corpus, make_batches, trainable, writable
from mocha_training.denominator import character_trigrams, denominator
from mocha_training.evaluate import Result, evaluate_corpus, summarize, symbol_latencies
from mocha_training.path import drawn_slips, path_losses, sampled, slipped
from mocha_training.policy import Drawn, drawn
from mocha_training.recipes import accented, plain
from mocha_training.trainer import Trainer
from mocha_training.weights import grown
from tests.training.made_up import needs_voice, said

FIXTURES = Path(__file__).parents[1] / "fixtures"
TEXTS = {"weather": "The weather is fine today.", "suit": "She had your dark suit"}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus directory in the layout that `train` reads."""
    directory = tmp_path_factory.mktemp("corpus")
    rows = []
    with tarfile.open(directory / "train-000.tar", "w") as tar:
        for number in range(6):
            name = list(TEXTS)[number % 2]
            data = (FIXTURES / f"{name}.wav").read_bytes()
            member = tarfile.TarInfo(f"k{number}.wav")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
            rows.append(
                {"key": f"k{number}", "shard": "train-000.tar", "text": TEXTS[name], "speaker": "s", "corpus": name}
            )
    path = directory / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture(scope="module")
def corpus(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return load_corpus(manifest, tmp_path_factory.mktemp("cache"))


def make_trainer(corpus: Corpus, directory: Path, **changes: object) -> Trainer:
    tokenizer = Tokenizer.from_texts(u.text for u in corpus.utterances)
    torch.manual_seed(0)
    config = plain().model_copy(update={"batch_seconds": 8.0, "save_every": 10_000, "warmup_steps": 5} | changes)
    augmenter = Augmenter(config.augment, corpus)
    return Trainer(config, SpeechModel(tiny(tokenizer.vocab_size)), tokenizer, augmenter, None, directory)


def test_corpus_is_decoded_once_and_normalised(corpus: Corpus):
    assert len(corpus.utterances) == 6 and corpus.utterances[0].text == "the weather is fine today"
    assert corpus.audio(0).dtype == np.float32 and 0.1 < abs(corpus.audio(0)).max() <= 1
    assert trainable(corpus, 0.1, 3.3).utterances[0].corpus == "suit"


def test_bad_corpora_are_named(tmp_path: Path, manifest: Path):
    with pytest.raises(CorpusError, match="no such manifest"):
        load_corpus(tmp_path / "none.jsonl", tmp_path)
    lacking = manifest.with_name("lacking.jsonl")
    row = {"key": "absent", "shard": "train-000.tar", "text": "x", "speaker": "s", "corpus": "c"}
    lacking.write_text(json.dumps(row))
    with pytest.raises(CorpusError, match="absent"):
        load_corpus(lacking, tmp_path)


def other_corpus(manifest: Path, directory: Path) -> Path:
    """A copy of the corpus that a test may spoil."""
    directory.mkdir()
    for name in (manifest.name, "train-000.tar"):
        shutil.copy(manifest.parent / name, directory / name)
    return directory / manifest.name


@pytest.mark.parametrize("length", [100, 30_000, 150_000, 400_000])
def test_truncated_shards_are_named(length: int, manifest: Path, tmp_path: Path):
    spoiled = other_corpus(manifest, tmp_path / "corpus")
    shard = spoiled.with_name("train-000.tar")
    assert shard.stat().st_size > length
    os.truncate(shard, length)
    with pytest.raises(CorpusError, match=r"train-000\.tar"):
        load_corpus(spoiled, tmp_path / "cache")
    packed = gzip.compress(manifest.with_name("train-000.tar").read_bytes())
    shard.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(CorpusError, match=r"train-000\.tar"):
        load_corpus(spoiled, tmp_path / "cache")
    shard.unlink()
    with pytest.raises(CorpusError, match=r"train-000\.tar"):
        load_corpus(spoiled, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.i16")) and not list((tmp_path / "cache").glob("*.json"))


def test_malformed_manifests_are_named(tmp_path: Path):
    for name, content in (("a.jsonl", "{"), ("b.jsonl", '{"key": "k"}'), ("c.jsonl.gz", "{"), ("d.jsonl", "[1]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(CorpusError, match=name):
            load_corpus(tmp_path / name, tmp_path)


def test_shards_and_manifests_as_others_write_them(tmp_path: Path, manifest: Path):
    rows = [json.loads(line) for line in manifest.read_text().splitlines()][:2]
    with tarfile.open(manifest.parent / rows[0]["shard"]) as tar, tarfile.open(tmp_path / "s.tar", "w") as out:
        for row in rows:
            member = next(m for m in tar if m.name.startswith(f"{row['key']}.") and not m.name.endswith(".json"))
            data, suffix = tar.extractfile(member).read(), member.name.rpartition(".")[2]  # type: ignore[union-attr]
            for name, content in ((f"./{row['key']}.txt", b"text"), (f"./{row['key']}.{suffix}", data)):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                out.addfile(info, io.BytesIO(content))
    texts = ["one\u2028two", "three"]
    lines = [
        json.dumps(r | {"shard": "s.tar", "text": t}, ensure_ascii=False) for r, t in zip(rows, texts, strict=True)
    ]
    (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = load_corpus(tmp_path / "train.jsonl", tmp_path / "cache")
    assert [u.text for u in found.utterances] == ["one two", "three"]
    for samples in (tmp_path / "cache").glob("*.i16"):
        samples.unlink()  # to make room
    assert load_corpus(tmp_path / "train.jsonl", tmp_path / "cache").utterances == found.utterances
    (tmp_path / "twice.jsonl").write_text("\n".join([lines[0], lines[0]]), encoding="utf-8")
    with pytest.raises(CorpusError, match=f"{rows[0]['key']} twice"):
        load_corpus(tmp_path / "twice.jsonl", tmp_path / "cache")


def test_what_a_model_cannot_write_is_left_out_and_told(corpus: Corpus):
    tokenizer = Tokenizer.from_texts(u.text for u in corpus.utterances)
    assert writable(corpus, tokenizer) == (corpus, "")
    first = replace(corpus.utterances[0], text=corpus.utterances[0].text.replace("e", "é", 1) + "ë")
    accented = Corpus((first, *corpus.utterances[1:]), corpus.files)
    kept, told = writable(accented, tokenizer)
    assert kept.utterances == corpus.utterances[1:]
    assert told == "; 1 have what the model cannot write ('é', 'ë') and are left out"
    with pytest.raises(ValueError, match="of 1 utterances 1 have what the model cannot write"):
        writable(accented.subset([0]), tokenizer)


def test_a_changed_shard_is_decoded_again(manifest: Path, tmp_path: Path):
    changed = other_corpus(manifest, tmp_path / "corpus")
    before = load_corpus(changed, tmp_path / "cache")
    louder = FIXTURES / "suit.wav"
    with tarfile.open(changed.with_name("train-000.tar"), "w") as tar:
        for number in range(6):
            tar.add(louder, f"k{number}.wav")
    after = load_corpus(changed, tmp_path / "cache")
    assert np.array_equal(after.audio(0), before.audio(1)) and not np.array_equal(after.audio(0), before.audio(0))


def test_an_interrupted_decoding_leaves_no_corpus(
    manifest: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(data.json, "dumps", full)
        with pytest.raises(CorpusError, match="no space left"):
            load_corpus(manifest, tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] in ([".lock"], [])
    assert load_corpus(manifest, tmp_path).utterances == corpus.utterances


def test_who_asks_at_the_same_time_waits_for_one_decoding(
    manifest: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As the processes of torchrun do: the lock is a file's, so threads stand for processes."""
    decoded, decode = [], data.decode_audio

    def slowly(content: bytes, name: str) -> data.Samples:
        decoded.append(name)
        time.sleep(0.05)
        return decode(content, name)

    monkeypatch.setattr(data, "decode_audio", slowly)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: load_corpus(manifest, tmp_path), range(3)))
    assert len(decoded) == 6
    for other in found:
        assert other.utterances == corpus.utterances
        assert all(np.array_equal(other.pcm(i), corpus.pcm(i)) for i in range(6))


def test_lhotse_cut_sets_are_read(tmp_path: Path):
    from lhotse import CutSet, Recording, SupervisionSegment
    from lhotse.cut import MonoCut

    recording = Recording.from_file(FIXTURES / "suit.wav", recording_id="suit")
    said = SupervisionSegment("s", "suit", 0.0, 2.0, text="She had.", speaker="slt")
    manifest = tmp_path / "cuts.jsonl.gz"
    CutSet.from_cuts([MonoCut("suit", 0.0, 2.0, 0, [said], recording=recording)]).to_file(manifest)
    corpus = load_corpus(manifest, tmp_path)
    (utterance,) = corpus.utterances
    assert (utterance.text, utterance.speaker, utterance.num_samples) == ("she had", "slt", 32_000)
    assert abs(corpus.audio(0)).max() > 0.1


def test_batches_hold_everything_once_and_are_reproducible():
    seconds = [1.5] * 3 + [3.2] * 3
    batches = make_batches(seconds, 8.0, np.random.default_rng(1))
    assert sorted(i for batch in batches for i in batch) == list(range(6))
    assert batches == make_batches(seconds, 8.0, np.random.default_rng(1))
    assert all(len(batch) * math.ceil(max(seconds[i] for i in batch)) <= 8 for batch in batches)


def test_batches_taken_together_have_one_shape():
    rng = np.random.default_rng(0)
    seconds = rng.uniform(0.5, 9.0, size=500)
    batches = make_batches(seconds, 30.0, rng, together=2)
    assert sorted(i for batch in batches for i in batch) == list(range(500))
    shapes = [(len(batch), math.ceil(max(seconds[i] for i in batch))) for batch in batches]
    pairs = list(zip(shapes[::2], shapes[1::2], strict=False))
    assert sum(a != b for a, b in pairs) <= 1, "only the last of the longest may differ"
    assert len(set(shapes)) <= 9 + 2, "a shape for each second, and what is left over"
    padded = sum(rows * length for rows, length in shapes)
    assert padded < 1.25 * seconds.sum()


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


def test_path_likelihood_is_the_probability_of_the_draws():
    energies = torch.tensor([[-1.0, 0.5, 2.0, 9.0]])
    selects, decides = torch.tensor([[False, False, True, True]]), torch.tensor([[True, True, True, False]])
    p = energies[0].sigmoid()
    expected = -((1 - p[0]) * (1 - p[1]) * p[2]).log() / 2
    torch.testing.assert_close(losses.path_likelihood(energies, selects, decides, torch.tensor([2])), expected)


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


def test_path_training_needs_chunks_that_follow_a_pointer(corpus: Corpus, tmp_path: Path):
    for changes in ({"mechanism": "softmax"}, {"energy": "dot"}):
        model = SpeechModel(tiny(30).with_attention(**changes))
        config = plain().model_copy(update={"attention": "path"})
        with pytest.raises(ValueError, match="path"):
            Trainer(config, model, Tokenizer.from_texts(["ab"]), Augmenter(config.augment, corpus), None, tmp_path)


def test_path_training_teaches_the_attention_to_fire(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=100, learning_rate=1e-2, attention="path")
    batch = next(iter(trainer._loader()))
    history = [trainer.train_step(batch) for _ in range(90)]
    assert history[0]["fired"] == 0 and history[-1]["fired"] > 0.2
    assert history[-1]["path"] < 0.5 * history[0]["path"] and history[-1]["ce"] < history[0]["ce"]


def path_parts(trainer: Trainer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory, its lengths, CTC log-probabilities and the frames of the tokens, as the trainer has them."""
    with torch.no_grad():
        memory, num_memory = trainer.model.encode(*trainer.model.features(batch.samples, batch.num_samples))
        log_probs = trainer.model.ctc_log_probs(memory)
    ends = losses.ctc_boundaries(log_probs, num_memory, batch.tokens, batch.num_tokens)
    return memory, num_memory, log_probs, ends


def test_scheduled_sampling_draws_from_the_distributions_of_the_decoder(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, attention="path")
    model, batch = trainer.model, next(iter(trainer._loader()))
    with torch.no_grad():
        model.decoder.output.weight *= 10  # so that distributions differ from place to place
        model.decoder.output.bias[trainer.tokenizer.eos_id] = 3.0
    memory, num_memory, _, ends = path_parts(trainer, batch)
    rows = (model, (memory, num_memory), batch.tokens, batch.num_tokens, ends)
    inputs = torch.stack([sampled(*rows, 0.4) for _ in range(400)])
    logits = model.along_path(memory, num_memory, batch.tokens, batch.num_tokens, ends).logits
    logits[..., [0, 1, 2, 3]] = -torch.inf  # blank, start, end and unknown have never been read
    drawn = 0.4 * logits.softmax(2)
    expected = drawn + 0.6 * torch.nn.functional.one_hot(batch.tokens, model.config.vocab_size)
    found = torch.stack([(inputs == symbol).float().mean(0) for symbol in range(model.config.vocab_size)], dim=2)
    assert (drawn[:, 1:] - drawn[:, :-1]).abs().max() > 0.25  # a shift by one place would be seen
    torch.testing.assert_close(found, expected, atol=0.12, rtol=0)


def test_scheduled_sampling_changes_inputs_and_not_targets(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, attention="path", sampling_probability=1.0)
    model, batch = trainer.model, next(iter(trainer._loader()))
    with torch.no_grad():
        model.decoder.output.bias[4] = 30.0  # it would always draw this one
        model.decoder.embedding.weight *= 10
    memory, num_memory, _, ends = path_parts(trainer, batch)
    rows = ((memory, num_memory), batch.tokens, batch.num_tokens, ends)

    def cross_entropy(inputs: torch.Tensor) -> float:
        logits = model.along_path(memory, num_memory, inputs, batch.num_tokens, ends).logits
        return losses.label_smoothed_cross_entropy(logits, batch.tokens, batch.num_tokens, 0.1).item()

    with torch.no_grad():
        found = path_losses(model, trainer.config, *rows)["ce"][1].item()
        drawn, transcript = cross_entropy(torch.full_like(batch.tokens, 4)), cross_entropy(batch.tokens)
    assert found == pytest.approx(drawn, abs=1e-5) and abs(drawn - transcript) > 1e-3


def slipped_by_hand(ends: list[int], late: list[int], length: int) -> tuple[list[int], set[int]]:
    """Where each is selected, and the decisions that are mistakes, one after the other."""
    selected, excused, last = [-1] * len(ends), set(), -1
    for n, (end, slip) in enumerate(zip(ends, late, strict=True)):
        at = max(end + slip, 0, last + 1)
        excused |= {at} if at < end else set(range(max(end, last + 1), min(at, length)))
        if at < length:
            selected[n] = last = at
        else:
            break
    return selected, excused


def test_slips_move_selections_and_excuse_mistakes():
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(200):
        length = int(torch.randint(8, 14, (), generator=generator))
        count = int(torch.randint(1, 8, (), generator=generator))
        places = torch.randperm(length, generator=generator)[:count].sort().values
        ends = torch.nn.functional.pad(places, (0, 9 - count), value=-1)[None]
        late = torch.randint(-1, 3, (1, 9), generator=generator)
        frames, excused = slipped(ends, late, torch.tensor([length]), 15)
        by_hand = slipped_by_hand(places.tolist(), late[0, :count].tolist(), length)
        found = set(excused[0, :length].nonzero()[:, 0].tolist())
        assert (frames[0, :count].tolist(), found) == by_hand and (frames[0, count:] == -1).all()
        seen |= {int(d) for d in (frames - ends)[frames >= 0]}
    assert seen == {-1, 0, 1, 2}
    never = torch.full((1, 4), -1)
    assert (slipped(never, torch.ones_like(never), torch.tensor([6]), 6)[0] == -1).all()


def test_slips_are_drawn_as_often_as_asked():
    late = drawn_slips(torch.zeros(300, 300, dtype=torch.int64), 0.18)
    shares = {slip: (late == slip).float().mean().item() for slip in (-1, 0, 1, 2)}
    assert shares == pytest.approx({-1: 0.04, 0: 0.82, 1: 0.1, 2: 0.04}, abs=0.01)


def test_mistakes_of_a_slipped_path_are_not_learned(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = make_trainer(corpus, tmp_path, attention="path", slip_probability=1.0)
    model, batch = trainer.model, next(iter(trainer._loader()))
    memory, num_memory, _, _ = path_parts(trainer, batch)
    ends = torch.full_like(batch.tokens, -1)
    ends[:, 0] = 3
    monkeypatch.setattr(path, "drawn_slips", lambda ends, probability: torch.full_like(ends, 2))
    out = model.along_path(memory, num_memory, batch.tokens, batch.num_tokens, torch.where(ends == 3, 5, ends))
    assert out.selects[:, 5].all() and not out.selects[:, 3:5].any()
    decides = out.decides.clone()
    decides[:, 3:5] = False  # to have waited there is the mistake; to select at 5 is right
    expected = losses.path_likelihood(out.energies, out.selects, decides, batch.num_tokens)
    found = path_losses(model, trainer.config, (memory, num_memory), batch.tokens, batch.num_tokens, ends)
    torch.testing.assert_close(found["path"][1], expected)
    with_mistakes = losses.path_likelihood(out.energies, out.selects, out.decides, batch.num_tokens)
    assert abs(with_mistakes - expected) > 1e-3


def test_texts_that_the_decoder_writes_are_of_one_view(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {"attention": "path", "policy_weight": 1.0, "policy_draws": 3, "augment": AugmentConfig.nothing()}
    for weight, views in ((0.0, 1), (0.2, 2)):
        trainer = make_trainer(corpus, tmp_path / str(views), **changes, consistency_weight=weight)
        batch, written = next(iter(trainer._loader())), []

        def counted(decoder: Decoder, memory: Memory, temperature: float, written: list[int] = written) -> Drawn:
            written.append(len(memory.values))
            return drawn(decoder, memory, temperature)

        monkeypatch.setattr(policy, "drawn", counted)
        figures = trainer.train_step(batch)
        assert written == [3 * len(batch.samples)] and figures["drawn_wer"] > 0 and np.isfinite(figures["policy"])
    assert "policy" not in make_trainer(corpus, tmp_path / "without", attention="path").train_step(batch)


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


def test_the_learning_rate_follows_a_cosine_to_a_hundredth(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=100, warmup_steps=1, learning_rate=0.004)
    rates = []
    for trainer.step in (0, 25, 50, 100):
        rates.append(trainer.learning_rate() / 0.004)
    assert rates == pytest.approx([1, 0.01 + 0.99 * (2 + 2**0.5) / 4, 0.505, 0.01])


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


def test_a_resumed_run_has_what_was_left_of_its_time(corpus: Corpus, tmp_path: Path):
    part = make_trainer(corpus, tmp_path, steps=1000, max_minutes=1.0)
    part.step, part.elapsed_s, part.seconds = 3, 29.5, 0.5  # the last step's seconds are counted with the next one
    part.save()
    resumed = make_trainer(corpus, tmp_path, steps=1000, max_minutes=1.0)
    assert resumed.resume()
    assert resumed.progress == part.progress > 0.49 and resumed.learning_rate() == part.learning_rate()
    resumed.train_step(next(iter(resumed._loader())))
    assert resumed.elapsed_s == 30.0


def test_the_length_of_a_run_may_be_counted_in_epochs(corpus: Corpus, tmp_path: Path):
    trainer = make_trainer(corpus, tmp_path, steps=1000, epochs=2.0, batch_seconds=4.0)
    trainer.run()
    assert (trainer.step, trainer.epoch) == (sum(len(trainer.batches.epoch(n).starts()) for n in (0, 1)), 1)
    with pytest.raises(ValueError, match="fewer batches"):
        make_trainer(corpus.subset([]), tmp_path)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_run_on_a_gpu_evaluates(corpus: Corpus, tmp_path: Path):
    config = plain().model_copy(update={"batch_seconds": 8.0, "steps": 2, "evaluate_every": 1, "attention": "path"})
    tokenizer, augmenter = Tokenizer.from_texts(u.text for u in corpus.utterances), Augmenter(config.augment, corpus)
    model, dev = SpeechModel(tiny(tokenizer.vocab_size)), corpus.subset([0, 1])
    Trainer(config, model, tokenizer, augmenter, dev, tmp_path, "cuda").run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum("dev_wer" in row for row in rows) == 2


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
    refused = runner.invoke(app, [str(first), str(BUNDLED), "--out", str(mean)])
    assert refused.exit_code == 1 and "of one configuration" in " ".join(refused.output.split())


def test_evaluation_reports_everything(lively: Recognizer, corpus: Corpus):
    report, results = evaluate_corpus(lively.model, lively.tokenizer, corpus)
    assert {"wer", "cer", "ctc_wer", "utterances", "rtf", "emission_latency_ms", "by_corpus"} <= set(report)
    assert set(report["by_corpus"]) == {"weather", "suit"} and report["utterances"] == 6
    assert set(report["emission_latency_ms"]) == {"p50", "p90", "p99"}
    assert len(results) == 6 and report["wer"] > 0


def test_settled_text_is_scored_and_live_text_timed(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path))
    app = typer.Typer()
    app.command()(cli.evaluate)
    reports, texts = [], []
    for number, options in enumerate(([], ["--joint", "2"], ["--joint", "2", "--settle"])):
        rows = tmp_path / f"{number}.jsonl"
        command = ["--manifest", str(manifest), "--json", "--hypotheses", str(rows), *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        reports.append(json.loads(done.stdout))
        texts.append([json.loads(line)["hypothesis"] for line in rows.read_text().splitlines()])
    assert texts[2] == texts[1] != texts[0]
    assert reports[2]["emission_latency_ms"] == reports[0]["emission_latency_ms"] != reports[1]["emission_latency_ms"]
    assert CliRunner().invoke(app, ["--manifest", str(manifest), "--settle"]).exit_code != 0


def test_error_rates_without_references_are_unknown_not_zero():
    summary = summarize([Result("k", "c", "", "heard", "heard", ())])
    assert [summary[name] for name in ("wer", "cer", "ctc_wer", "ctc_cer")] == [None] * 4


def test_latency_counts_only_matching_symbols():
    from mocha_model.emissions import Emission

    emissions = [Emission(c, f, 0.9, 0.9, False, ()) for c, f in (("a", 5), ("x", 6), ("c", 12))]
    assert symbol_latencies(emissions, ["a", "b", "c"], [3, 5, 9], 40.0) == (80.0, 120.0)
    assert symbol_latencies(emissions, ["a", "b", "c"], [3, 5, 9], 40.0, ahead=6) == (320.0, 360.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("evaluate", "--patience", 3), "--patience: not an option of greedy search"),
        (("evaluate", "--joint", 4, "--selection-weight", 1), "--selection-weight: not an option of joint search"),
        (("evaluate", "--beam", 4, "--joint", 4), "exclude each other"),
        (("evaluate", "--joint", 4, "--decoding", "soft"), "--decoding: not an option of joint search"),
        (("evaluate", "--joint", 4, "--lm-weight", 0.5), "--lm-weight: not an option of joint search"),
        (("evaluate", "--beam", 4, "--prior-weight", 0.5), "--prior-weight: not an option of beam search"),
        (("evaluate", "--settle"), "--settle needs --joint"),
        (("train", "--recipe", "nosuch"), "no recipe 'nosuch'; there are"),
        (("train", "--recipe", "plain", "--steps", 0), "greater than 0"),
        (("train", "--recipe", "plain", "--device", "tpu"), "--device tpu: there is cpu"),
        (("train", "--recipe", "plain", "--init", "any", "--chunk-width", 2), "--init brings an attention"),
        (("train", "--recipe", "plain", "--init", BUNDLED, "--preset", "tiny"), "can only be grown"),
        (
            ("train", "--recipe", "spliced", "--preset", "tiny"),
            "a model that reads finds pauses: it is given with --init",
        ),
        (
            ("train", "--recipe", "discriminative", "--preset", "tiny"),
            "is that of a model that reads: it is given with --init",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: tuple[str, ...], message: str, manifest: Path):
    places = ("--manifest", manifest) if options[0] == "evaluate" else ("--data", manifest.parent, "--out", "never")
    status, output = said(*options, *places)
    assert status == 1 and message in output


@pytest.mark.parametrize("option", ["sampling_probability", "slip_probability"])
def test_sampling_and_slips_are_of_the_path(option: str):
    with pytest.raises(ValueError, match=f"{option} is of training along the path"):
        TrainConfig.model_validate({"attention": "expected", option: 0.4})


def test_config_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="learnin_rate"):
        TrainConfig(learnin_rate=1)  # type: ignore[call-arg]
