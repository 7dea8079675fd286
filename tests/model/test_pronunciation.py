"""What espeak-ng says of words."""

import subprocess
from pathlib import Path

import pytest
from tests.training.made_up import needs_voice

from mocha_model import pronunciation
from mocha_model.pronunciation import PronunciationError, pronounce


@needs_voice
def test_words_are_spelled_by_their_sounds():
    said = pronounce(["night", "knight", "see", "sea", "a", "cat", "o'clock", "the", "night"])
    assert said["night"] == said["knight"] and len(said["night"]) == 3
    assert said["see"] == said["sea"] and said["cat"][-1] == said["night"][-1]
    assert len(said["a"]) == 1 and said["a"] != pronounce(["ay"])["ay"]  # the word, not the letter
    assert set(said) == {"night", "knight", "see", "sea", "a", "cat", "o'clock", "the"} and all(said.values())
    assert pronounce(["iv", "xx"]) == {"iv": (), "xx": ()}, "espeak-ng says a Roman number in several words"
    many = pronounce(f"{a}{b}{c}" for a in "bdkmpst" for b in "aeiou" for c in "bdkmpst")
    assert len(many) == 245 and len({phone for phones in many.values() for phone in phones}) < 40


def test_without_espeak_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PronunciationError, match="Debian package espeak-ng"):
        pronounce(["cat"])


def test_what_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "espeak-ng").touch(mode=0o600)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PronunciationError, match=r"cannot be started \(Permission denied\)"):
        pronounce(["cat"])


def test_time_is_limited_for_each_thousand_words(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def says(*_: object, input: str, timeout: float, **__: object) -> subprocess.CompletedProcess[str]:
        calls.append((len(input.split(".")) - 1, timeout))
        return subprocess.CompletedProcess((), 0, "k_a#_t s_oU\n" * calls[-1][0])

    monkeypatch.setattr(subprocess, "run", says)
    words = [f"w{n}" for n in range(2500)]
    assert pronounce(words) == dict.fromkeys(words, ("k", "@", "t"))
    assert calls == [(count, pronunciation.TIMEOUT_S) for count in (1000, 1000, 500)]
