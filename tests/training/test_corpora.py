"""LibriSpeech, TED-LIUM and Common Voice in miniature: the published layouts with made-up recordings, to a WER."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from lhotse.recipes import commonvoice
from numpy.typing import NDArray

from mocha_model.checkpoint import load_checkpoint
from mocha_training import recipes
from mocha_training.corpora import prepare
from mocha_training.data import load_corpus
from mocha_training.manifests import CorpusError
from tests.training.made_up import run, said, tones, write_sphere


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def utterances(manifest: Path) -> dict[str, tuple[str, str, str, float]]:
    """Of each: its text, speaker, corpus and seconds."""
    found = load_corpus(manifest).utterances
    return {u.key: (u.text, u.speaker, u.corpus, round(u.num_samples / 16_000, 2)) for u in found}


def trained_and_evaluated(recipe: str, data: Path, directory: Path) -> dict[str, Any]:
    """The recipe with a tiny network and few steps: the first with CTC alone, the others along its path."""
    options = ("--preset", "tiny", "--steps", 10, "--device", "cpu")
    run("train", "--recipe", recipe, "--data", data, "--out", directory, *options)
    (last,) = (json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines())
    assert last["step"] == 10 and {"ctc", "ce", "path"} <= set(last)
    model = directory / "final.safetensors"
    assert load_checkpoint(model).provenance["recipe"]["epochs"] == 0
    output = run("evaluate", "--model", model, "--manifest", data / "test.jsonl.gz", "--json")
    report: dict[str, Any] = json.loads(output)
    assert report["wer"] > 0 and report["ctc_wer"] > 0
    return report


def write_librispeech(root: Path, parts: tuple[str, ...]) -> None:
    for number, part in enumerate(parts):
        speaker, chapter = 103 + number, 1240
        directory = root / part / str(speaker) / str(chapter)
        directory.mkdir(parents=True)
        lines = []
        for place, sentence in enumerate(("CHAPTER ONE", "MISSUS RACHEL LYNDE'S SURPRISED")):
            key = f"{speaker}-{chapter}-{place:04d}"
            soundfile.write(directory / f"{key}.flac", tones(list(sentence), 1600), 16_000)
            lines.append(f"{key} {sentence}")
        (directory / f"{speaker}-{chapter}.trans.txt").write_text("\n".join(lines) + "\n")
    (root / "SPEAKERS.TXT").write_text("; made up\n")


def test_librispeech_from_its_own_layout_to_a_word_error_rate(tmp_path: Path):
    source, data = tmp_path / "LibriSpeech", tmp_path / "data"
    parts = ("train-clean-100", "train-other-500", "dev-clean", "dev-other", "test-clean", "test-other")
    write_librispeech(source, parts)
    assert "train 4, dev 4, test 4" in run("prepare", "librispeech", source, "--out", data)
    found = utterances(data / "train.jsonl.gz")
    assert found["103-1240-0001"] == ("missus rachel lynde's surprised", "103", "librispeech train-clean-100", 3.1)
    assert {corpus for _, _, corpus, _ in found.values()} == {
        "librispeech train-clean-100",
        "librispeech train-other-500",
    }
    report = trained_and_evaluated("librispeech", data, tmp_path / "run")
    assert set(report["by_corpus"]) == {"librispeech test-clean", "librispeech test-other"}


def test_librispeech_may_lack_its_test_parts_but_not_those_to_train_on(tmp_path: Path):
    write_librispeech(tmp_path / "mini", ("train-clean-5", "dev-clean-2"))
    (tmp_path / "mini" / "test-clean.tar.gz").touch()
    assert prepare("librispeech", tmp_path / "mini", tmp_path / "data") == {"train": 2, "dev": 2}
    write_librispeech(tmp_path / "rest", ("dev-clean",))
    with pytest.raises(CorpusError, match="no utterances for train"):
        prepare("librispeech", tmp_path / "rest", tmp_path / "other")


STM = """Maker_2010X 1 Maker_2010X 0.50 2.50 <o,f0,male> i 'm here and they 're not <unk> rock 'n roll
Maker_2010X 1 Maker_2010X 2.50 3.00 <o,,unknown> ignore_time_segment_in_scoring
Maker_2010X 1 Maker_2010X 3.00 4.25 <o,f0,male> a(2) {SMACK} chart that doesn 't lie
"""


def write_tedlium(root: Path) -> NDArray[np.int16]:
    talk = tones(list("abcdefghijklmnopqrst"), 4000)
    for split in ("train", "dev", "test"):
        for kind in ("sph", "stm"):
            (root / "legacy" / split / kind).mkdir(parents=True)
        write_sphere(root / "legacy" / split / "sph" / "Maker_2010X.sph", talk)
        (root / "legacy" / split / "stm" / "Maker_2010X.stm").write_text(STM)
    return talk


def test_tedlium_from_its_own_layout_to_a_word_error_rate(tmp_path: Path):
    source, data = tmp_path / "TEDLIUM_release-3", tmp_path / "data"
    talk = write_tedlium(source)
    assert "train 2, dev 2, test 2" in run("prepare", "tedlium", source, "--out", data)
    assert utterances(data / "train.jsonl.gz") == {
        "Maker_2010X-0": ("i'm here and they're not rock'n roll", "Maker_2010X", "tedlium", 2.0),
        "Maker_2010X-2": ("a chart that doesn't lie", "Maker_2010X", "tedlium", 1.25),
    }
    corpus = load_corpus(data / "train.jsonl.gz")
    assert np.array_equal(corpus.pcm(0), talk[8_000:40_000]) and np.array_equal(corpus.pcm(1), talk[48_000:68_000])
    assert set(trained_and_evaluated("tedlium", data, tmp_path / "run")["by_corpus"]) == {"tedlium"}


COLUMNS = (
    "client_id path sentence_id sentence sentence_domain up_votes down_votes age gender accents variant locale segment"
)


def write_commonvoice(language: Path) -> None:
    (language / "clips").mkdir(parents=True)
    sentences = ["“It’s a well-known Café,” she said.", "He's 42", '"Why [not]?', "Oui!"]
    for split in ("train", "dev", "test"):
        rows = [COLUMNS.split()]
        for number, sentence in enumerate(sentences):
            name = f"common_voice_en_{split}{number}.mp3"
            sound = np.repeat(tones(list(sentence), 1600), 2)
            soundfile.write(language / "clips" / name, sound, 32_000, format="MP3")
            rows.append([f"{number:02x}" * 64, name, "id", sentence, "", "2", "0", "", "", "", "", "en", ""])
        (language / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    for other in ("validated", "invalidated", "other"):
        (language / f"{other}.tsv").write_text(COLUMNS.replace(" ", "\t") + "\n")


def test_commonvoice_from_its_own_layout_to_a_word_error_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lhotse starts processes to look at the clips, which takes seconds for each split; here they are threads."""
    monkeypatch.setattr(commonvoice, "ProcessPoolExecutor", lambda max_workers, **_: ThreadPoolExecutor(max_workers))
    language, data = tmp_path / "cv-corpus-17.0-2024-03-15" / "en", tmp_path / "data"
    write_commonvoice(language)
    assert "train 4, dev 4, test 4" in run("prepare", "commonvoice", language, "--out", data)
    found = utterances(data / "train.jsonl.gz")
    assert [text for text, *_ in found.values()] == ["it's a well known café she said", "he's 42", "why not", "oui"]
    _, speaker, corpus, seconds = found["common_voice_en_train0"]
    assert (speaker, corpus) == ("00" * 64, "commonvoice en") and seconds == pytest.approx(3.5, abs=0.1)
    report = trained_and_evaluated("commonvoice", data, tmp_path / "run")
    assert report["utterances"] == 4
    symbols = load_checkpoint(tmp_path / "run" / "final.safetensors").tokenizer.symbols
    assert "é" in symbols and "4" not in symbols  # what is written in digits is not trained on


def test_corpora_in_other_layouts_are_refused(tmp_path: Path):
    for corpus, reason in (
        ("timit", "data/TRAIN"),
        ("wsj", r"train_si284.*no wav\.scp"),
        ("kaldi", r"train:.*no wav\.scp"),
        ("librispeech", "train-clean-100"),
        ("commonvoice", r"no train\.tsv"),
        ("tedlium", "legacy/train/stm"),
    ):
        with pytest.raises(CorpusError, match=reason):
            prepare(corpus, tmp_path, tmp_path / "out")  # type: ignore[arg-type]
    (tmp_path / "train").mkdir()
    for name in ("wav.scp", "text", "utt2spk"):
        (tmp_path / "train" / name).write_text("one\n")
    status, output = said("prepare", "kaldi", tmp_path, "--out", tmp_path / "out")
    assert status == 1 and "not a usable corpus of this kind, kaldi" in output


def test_recordings_that_went_away_are_named(tmp_path: Path):
    write_librispeech(tmp_path / "mini", ("train-clean-5", "dev-clean-2"))
    prepare("librispeech", tmp_path / "mini", tmp_path / "data")
    next((tmp_path / "mini" / "train-clean-5").rglob("*0001.flac")).unlink()
    left_out = load_corpus(tmp_path / "data" / "train.jsonl.gz").left_out
    assert "recordings cannot be read (103-1240-0001" in left_out


def test_recipes_for_these_corpora_are_long_and_large():
    for name in ("librispeech", "tedlium", "commonvoice"):
        config = recipes.RECIPES[name]()
        assert (config.preset, config.attention) == ("large", "path")
        assert config.epochs >= 20 and 0 < config.ctc_only < 0.5 and config.augment.join_probability == 0
