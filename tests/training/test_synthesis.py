"""Synthesis: spoken forms, the plan, and real voices reading real text into shards that training takes."""

import itertools
import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest

from mocha_model.tokenizer import normalize_text
from mocha_training import cli, synthesis
from mocha_training.data import Corpus, load_corpus
from mocha_training.distortion import Audio
from mocha_training.manifests import Utterance
from mocha_training.synthesis import Speller
from mocha_training.voices import PACKAGES, Program, ProgramVoice, SynthesisError
from tests.training.made_up import run

needs_voices = pytest.mark.skipif(
    not any(map(shutil.which, ("espeak-ng", "flite", "text2wave"))), reason=f"needs a voice: {PACKAGES}"
)
SENTENCES = ["The wind turned north.", "She left at dawn, alone.", "Nobody had seen the boat.", "It rained all day."]


def test_plain_sentences_are_left_alone():
    for text in ("Well, well!", "\u201cCome in,\u201d she said.", "It's half-past two; go."):
        assert Speller()(text) == text


def test_what_is_written_is_spelled_out():
    speller = Speller()
    spoken = speller("Dr. Smith paid $5.20 on 3/4/2020.")
    assert spoken == "doctor Smith paid five dollars twenty cents on march fourth twenty twenty."
    assert speller("He ran in 21'30\u2033.") is None  # not read aloud as it would be said, so not used


def test_the_plan_is_repeatable_and_goes_round():
    voices = [ProgramVoice(Program.ESPEAK, f"v{i}") for i in range(50)] + [ProgramVoice(Program.FLITE, "slt")]
    first, again = (list(itertools.islice(synthesis.plan(SENTENCES, voices, 7), 400)) for _ in range(2))
    assert first == again and first != list(itertools.islice(synthesis.plan(SENTENCES, voices, 8), 400))
    for start in range(0, 400, len(SENTENCES)):
        assert {r.written for r in first[start : start + len(SENTENCES)]} == set(SENTENCES)
    assert 150 < sum(r.voice.program is Program.FLITE for r in first) < 250  # programs are drawn evenly, not voices
    with pytest.raises(SynthesisError, match="no sentence"):
        next(synthesis.plan(["...", ""], voices, 0))


class Hum:
    program, name = Program.FLITE, "hum"

    def speak(self, text: str, rate: float) -> Audio:
        return np.full(int(800 * len(text) / rate), 0.1, np.float32)


def test_what_is_spoken_as_a_held_out_transcript_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text, held_out = tmp_path / "text.txt", Utterance("k", "mister smith paid five dollars", "", "", 0, 0)
    text.write_text("Mr. Smith paid 5 dollars.\nMr. Smith paid 6 dollars.\nMister Smith paid five dollars!\n")
    monkeypatch.setattr(synthesis, "find_voices", lambda *_: [Hum()])
    monkeypatch.setattr(cli, "load_corpus", lambda *_, **__: Corpus((held_out,), ()))
    run("synthesize", "--text", text, "--held-out", "dev.jsonl", "--hours", "0.002", "--out", tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert {row["written"] for row in rows} == {"Mr. Smith paid 6 dollars."} and len(rows) > 1


def test_any_number_of_the_first_sentences_bring_the_most_words():
    """Each sentence adds most to the sum of sqrt(n) log(1 + times said) over words, for its length, of those left."""
    rng = np.random.default_rng(5)
    words = ["a", "be", "sea", "dune", "eight", "foxes"]
    often = [0.4, 0.3, 0.15, 0.1, 0.03, 0.02]
    sentences = [" ".join(rng.choice(words, rng.integers(1, 7), p=often)) for _ in range(60)]
    ordered = list(synthesis.covering(sentences))
    assert sorted(ordered) == sorted(sentences)
    sets = [set(s.split()) for s in ordered]
    standing = {w: sum(w in some for some in sets) for w in words}

    def worth(chosen: list[set[str]]) -> float:
        return sum(np.sqrt(standing[w]) * np.log1p(sum(w in some for some in chosen)) for w in words)

    for count in range(len(sets)):
        before = worth(sets[:count])
        gains = [
            (worth([*sets[:count], some]) - before) / (len(ordered[count + i]) + synthesis.SENTENCE_COST)
            for i, some in enumerate(sets[count:])
        ]
        assert gains[0] == pytest.approx(max(gains))
    assert {w for some in sets[:6] for w in some} == set(words)  # what is rare comes early


def test_without_voices_the_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(synthesis, "hibari_voices", list)  # the package is installed here
    with pytest.raises(SynthesisError, match="espeak-ng, flite, festival"):
        synthesis.find_voices()


def test_a_voice_that_never_speaks_is_an_error(tmp_path: Path):
    with pytest.raises(SynthesisError, match="festival nobody"):
        synthesis.synthesize(SENTENCES, [ProgramVoice(Program.FESTIVAL, "nobody")], 0.01, tmp_path)
    assert not list(tmp_path.iterdir())


@needs_voices
def test_what_was_spoken_before_an_interruption_stays(tmp_path: Path):
    heard: list[float] = []

    def interrupt(seconds: float) -> None:
        heard.append(seconds)
        if len(heard) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesis.synthesize(SENTENCES, synthesis.find_voices()[:1], 1.0, tmp_path / "out", progress=interrupt)
    corpus = load_corpus(tmp_path / "out" / "train.jsonl", tmp_path / "cache")
    assert len(corpus.utterances) == 3 and corpus.seconds == pytest.approx(sum(heard), rel=0.02)


@needs_voices
def test_what_was_spoken_before_the_program_is_killed_stays(tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(SENTENCES))
    manifest, command = tmp_path / "out" / "train.jsonl", Path(sys.executable).with_name("mocha-asr")
    options = ("--hours", "9", "--text", text, "--out", manifest.parent)
    speaking = subprocess.Popen([command, "synthesize", *options], stderr=subprocess.DEVNULL)
    try:
        while speaking.poll() is None and (not manifest.exists() or manifest.read_bytes().count(b"\n") < 5):
            time.sleep(0.02)
    finally:
        speaking.kill()
        speaking.wait()
    *_, shard = sorted(manifest.parent.glob("*.tar"))
    with shard.open("ab") as torn:
        torn.write(shard.read_bytes()[:700])  # as if it had been killed while it wrote what was spoken next
    corpus = load_corpus(manifest, tmp_path / "cache")
    assert len(corpus.utterances) == manifest.read_bytes().count(b"\n") >= 5


@needs_voices
def test_rate_and_pitch():
    voice = synthesis.find_voices()[0]
    length = {
        (rate, pitch): len(synthesis.Reading("", "one two three four five", voice, rate, pitch).speak())
        for rate in (0.8, 1.2)
        for pitch in (0.9, 1.1)
    }
    assert length[0.8, 0.9] > 1.2 * length[1.2, 0.9] and length[0.8, 1.1] > 1.2 * length[1.2, 1.1]
    assert abs(length[0.8, 0.9] / length[0.8, 1.1] - 1) < 0.15  # pitch is not rate


@needs_voices
def test_every_program_writes_shards_that_training_reads(tmp_path: Path):
    voices = {v.program: v for v in synthesis.find_voices()}
    heard = 0.0

    def progress(seconds: float) -> None:
        nonlocal heard
        heard += seconds

    count = synthesis.synthesize(SENTENCES, list(voices.values()), 0.01, tmp_path / "a", progress=progress)
    corpus = load_corpus(tmp_path / "a" / "train.jsonl", tmp_path / "cache")
    assert len(corpus.utterances) == count and {u.corpus.split()[1] for u in corpus.utterances} == set(voices)
    assert heard >= 36 and corpus.seconds == pytest.approx(heard, rel=0.02)
    assert {u.text for u in corpus.utterances} <= set(map(normalize_text, SENTENCES))
    for index in range(count):
        audio = corpus.audio(index)
        assert 0.02 < np.abs(audio).max() <= 1 and 0.5 < len(audio) / 16_000 < 6
    again = synthesis.synthesize(SENTENCES, list(voices.values()), 0.01, tmp_path / "b")
    rows = [(tmp_path / run / "train.jsonl").read_text().splitlines() for run in "ab"]
    assert again == count and rows[0] == rows[1]
    with tarfile.open(tmp_path / "a" / json.loads(rows[0][0])["shard"]) as shard:
        assert len(shard.getnames()) == 2 * count
    with pytest.raises(FileExistsError):
        synthesis.synthesize(SENTENCES, list(voices.values()), 0.01, tmp_path / "a")
    both = Corpus.joined([corpus, load_corpus(tmp_path / "b" / "train.jsonl", tmp_path / "cache")])
    assert np.array_equal(both.audio(count), corpus.audio(0)) and len(both.utterances) == 2 * count
