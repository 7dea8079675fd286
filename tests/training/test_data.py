"""Corpora from shards and manifests, decoded once, and the batches that are made of them."""

import gzip
import io
import json
import math
import os
import shutil
import tarfile
import time
import wave
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mocha_model.tokenizer import Tokenizer
from mocha_training import data, manifests
from mocha_training.data import Corpus, load_corpus, make_batches, trainable, writable
from mocha_training.manifests import CorpusError
from tests.training.made_up import FIXTURES, said


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


def spoiled_recordings(directory: Path, num: int, num_bad: int) -> Path:
    """A corpus of which the first `num_bad` recordings are none."""
    directory.mkdir()
    rows, good = [], (FIXTURES / "suit.wav").read_bytes()[:4044]
    with tarfile.open(directory / "train-000.tar", "w") as tar:
        for n in range(num):
            content = b"no recording" if n < num_bad else good
            member = tarfile.TarInfo(f"k{n}.wav")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            rows.append({"key": f"k{n}", "shard": "train-000.tar", "text": f"text {n}", "corpus": "c"})
    manifest = directory / "train.jsonl"
    manifest.write_text("\n".join(map(json.dumps, rows)))
    return manifest


def test_a_few_recordings_that_cannot_be_read_are_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    manifest = spoiled_recordings(tmp_path / "few", 5, 3)
    for _ in ("decoded", "kept"):
        found = load_corpus(manifest)
        assert [u.key for u in found.utterances] == ["k3", "k4"]
        named = ", ".join(f"train-000.tar/k{n}.wav" for n in range(3))
        assert found.left_out == f"{manifest}: 3 of 5 recordings cannot be read ({named}) and are left out"
    status, output = said("evaluate", "--manifest", manifest)
    assert status == 0 and "warning: " in output and "3 of 5 recordings cannot be read" in output


@pytest.mark.parametrize(("num", "num_bad"), [(2, 2), (5, 4), (399, 4)])
def test_many_recordings_that_cannot_be_read_are_no_corpus(num: int, num_bad: int, tmp_path: Path):
    manifest = spoiled_recordings(tmp_path / "many", num, num_bad)
    with pytest.raises(CorpusError, match=rf"{num_bad} of {num} recordings cannot be read \(train-000.tar/k0.wav"):
        load_corpus(manifest, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def test_a_hundredth_of_recordings_may_be_unreadable(tmp_path: Path):
    assert len(load_corpus(spoiled_recordings(tmp_path / "few", 400, 4), tmp_path / "cache").utterances) == 396


def test_malformed_manifests_are_named(tmp_path: Path):
    for name, content in (("a.jsonl", "{"), ("b.jsonl", '{"key": "k"}'), ("c.jsonl.gz", "{"), ("d.jsonl", "[1]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(CorpusError, match=name):
            load_corpus(tmp_path / name, tmp_path)


ROW = {"key": "k", "shard": "s.tar", "text": "x", "speaker": "s", "corpus": "c"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting"),
        ("[1]", "not a JSON object"),
        (json.dumps({n: v for n, v in ROW.items() if n != "text"}), "lacks 'text'"),
        *((json.dumps(ROW | {name: 5}), f"'{name}' is not a string") for name in ("key", "shard", "corpus")),
        *((json.dumps(ROW | {name: [5]}), f"'{name}' is neither a string nor null") for name in ("text", "speaker")),
    ],
)
def test_lines_of_manifests_are_named(line: str, message: str, tmp_path: Path):
    manifest = tmp_path / "train.jsonl"
    manifest.write_text(json.dumps(ROW | {"text": None, "speaker": None}) + "\n\n" + line)
    with pytest.raises(CorpusError, match=rf"train\.jsonl: line 3: .*{message}"):
        load_corpus(manifest, tmp_path)


def test_recordings_of_nothing_are_no_corpus(tmp_path: Path):
    with wave.open(str(tmp_path / "k.wav"), "wb") as empty:
        empty.setparams((1, 2, 16_000, 0, "NONE", ""))
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        tar.add(tmp_path / "k.wav", "k.wav")
    (tmp_path / "train.jsonl").write_text(json.dumps(ROW))
    with pytest.raises(CorpusError, match=r"train\.jsonl: its recordings are empty"):
        load_corpus(tmp_path / "train.jsonl", tmp_path / "cache")


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
    killed = tmp_path / f"{data._fingerprint(manifest)}left"
    killed.mkdir()
    (killed / "part.i16").write_bytes(bytes(100))
    assert load_corpus(manifest, tmp_path).utterances == corpus.utterances and not killed.exists()


@pytest.mark.parametrize("suffix", [".i16", ".json"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_what_is_torn_in_the_cache_is_decoded_again(
    share: float, suffix: str, manifest: Path, corpus: Corpus, tmp_path: Path
):
    load_corpus(manifest, tmp_path)
    (torn,) = tmp_path.glob(f"*{suffix}")
    os.truncate(torn, int(share * torn.stat().st_size))
    found = load_corpus(manifest, tmp_path)
    assert found.utterances == corpus.utterances
    assert all(np.array_equal(found.pcm(i), corpus.pcm(i)) for i in range(6))


def test_who_asks_at_the_same_time_waits_for_one_decoding(
    manifest: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As the processes of torchrun do: the lock is a file's, so threads stand for processes."""
    decoded, decode = [], manifests.decode_audio

    def slowly(content: bytes, name: str) -> manifests.Samples:
        decoded.append(name)
        time.sleep(0.05)
        return decode(content, name)

    monkeypatch.setattr(manifests, "decode_audio", slowly)
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
