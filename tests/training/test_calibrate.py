"""Confidence: evidence against its definition, the fit against known probabilities, the figures on known words."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mocha_model.checkpoint import calibrate_checkpoint, load_checkpoint, save_checkpoint
from mocha_model.confidence import LEAST_PROBABILITY, Calibration, evidence
from mocha_model.emissions import WordAssembler, text_of
from mocha_model.recognizer import Recognizer
from mocha_training import cli
from mocha_training.calibrate import HeardWord, draw, fit, heard_words, held_out, judge, reliability
from mocha_training.data import Corpus
from mocha_training.evaluate import transcribe_corpus
from mocha_training.manifests import Utterance
from tests.training.made_up import run


def drawn(number: int, bias: float, slope: float) -> list[HeardWord]:
    rng = np.random.default_rng(0)
    x = -rng.exponential(0.7, number)
    return [HeardWord(float(e), bool(rng.random() < 1 / (1 + math.exp(-(bias + slope * e))))) for e in x]


def test_evidence():
    assert evidence([0.5, 1.0], [0.5, 0.25]) == pytest.approx(math.log(0.25))
    assert evidence([0.0], [0.5]) == pytest.approx(math.log(0.5))  # emitted without a selection, at a flush
    assert evidence([1.0], [0.0]) == pytest.approx(math.log(LEAST_PROBABILITY))


def test_judge():
    assert judge("the cat sat on the mat", "the cat sad on mat") == [True, True, False, True, True]
    assert judge("", "um") == [False] and judge("a b", "") == []


def test_the_fit_finds_the_probabilities_that_made_the_words():
    found = fit(drawn(20_000, 1.5, 2.0))
    assert found.bias == pytest.approx(1.5, abs=0.1) and found.slope == pytest.approx(2.0, abs=0.1)


def test_the_fit_is_finite_where_evidence_says_everything_or_nothing():
    perfect = fit([HeardWord(-0.1, True)] * 50 + [HeardWord(-3.0, False)] * 50)
    assert math.isfinite(perfect.slope) and perfect(-0.1) > 0.9 and perfect(-3.0) < 0.1
    always = fit([HeardWord(-0.1 * k, True) for k in range(30)])
    assert 0.9 < always(-1.0) < 1
    with pytest.raises(ValueError, match="no words"):
        fit([])


def test_targets_of_the_fit_are_as_many_as_the_words_and_one_of_each():
    """Platt 1999: of evidence that says nothing, the mean of the targets; of one that says all, the targets."""
    words = [HeardWord(0.0, True)] * 6 + [HeardWord(-1.0, False)] * 2
    found = fit(words)
    assert (found(0.0), found(-1.0)) == pytest.approx((7 / 8, 1 / 4))
    found = fit([HeardWord(0.0, word.right) for word in words])
    assert found(0.0) == pytest.approx((6 * 7 / 8 + 2 * 1 / 4) / 8)


def test_half_of_the_utterances_is_judged_by_what_the_other_half_says():
    right, wrong = [HeardWord(0.0, True)] * 10, [HeardWord(0.0, False)] * 10
    found = held_out([right, wrong] * 5)
    assert found.confidence[0] == pytest.approx(1 / 52) and found.accuracy[0] == 1
    assert found.confidence[-1] == pytest.approx(51 / 52) and found.accuracy[-1] == 0


def test_reliability():
    words = drawn(20_000, 1.0, 2.0)
    good, bad = (
        reliability([(c(w.evidence), w.right) for w in words]) for c in (fit(words), Calibration(bias=3.0, slope=2.0))
    )
    assert good.error < 0.02 < 0.1 < bad.error  # two nats too sure
    assert good.separation == pytest.approx(bad.separation) and good.separation > 0.7  # the order is the same
    assert held_out([words[n : n + 5] for n in range(0, len(words), 5)]).error < 0.03
    some = words[:500]
    pairs = [
        (a.evidence > b.evidence) + 0.5 * (a.evidence == b.evidence)
        for a in some
        if a.right
        for b in some
        if not b.right
    ]
    assert reliability([(w.evidence, w.right) for w in some]).separation == pytest.approx(np.mean(pairs))
    alike = reliability([(0.3, k % 2 == 0) for k in range(100)])
    assert alike.separation == 0.5
    assert draw({"live": good}).axes[0].lines[1].get_ydata() == pytest.approx(good.accuracy)


def test_a_checkpoint_is_calibrated_from_recordings(lively: Recognizer, clip: NDArray[np.int16], tmp_path: Path):
    path = tmp_path / "a.safetensors"
    save_checkpoint(path, lively.model, lively.tokenizer, {"name": "x"}, compact=True)
    before, size = load_checkpoint(path), path.stat().st_size
    texts = [text_of(lively.transcribe(torch.from_numpy(clip[k * 9_000 :].astype(np.float32) / 32768))) for k in (0, 1)]
    rows = tuple(
        Utterance(str(k), text, "", "made", 0, len(clip) - k * 9_000, k) for k, text in enumerate([texts[0], "no no"])
    )
    corpus = Corpus(rows, (clip, clip[9_000:]))
    results, _ = transcribe_corpus(before.model, before.tokenizer, corpus)
    words = heard_words(results)
    assert [len(w) for w in words] == [len(r.hypothesis.split()) for r in results]
    fitted = fit([w for some in words for w in some])
    other = Calibration(bias=1.5, slope=0.5)
    calibrate_checkpoint(path, fitted, other)
    after = Recognizer.load(path)
    assert after.calibration == fitted and abs(path.stat().st_size - size) < 300
    assert after.searching(2).calibration == other
    assert torch.equal(after.model.ctc.weight, before.model.ctc.weight)
    assembler = WordAssembler(0.04, after.calibration)
    spoken = [w for e in after.transcribe(torch.from_numpy(corpus.audio(0))) for w in assembler.push(e)]
    by_key = {r.key: r for r in results}
    assert [w.confidence for w in spoken] == pytest.approx([fitted(e) for e in by_key["0"].evidence], rel=1e-3)


def test_the_command_calibrates_what_is_read_live_and_from_files(
    bundled: Recognizer, clip: NDArray[np.int16], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, curve = tmp_path / "a.safetensors", tmp_path / "new" / "curve.svg"
    save_checkpoint(path, bundled.model, bundled.tokenizer, {}, compact=True)
    texts = enumerate(["the weather is fine today"] * 2 + [""])
    rows = tuple(Utterance(str(k), text, "", "made", 0, len(clip) - k, 0) for k, text in texts)
    monkeypatch.setattr(cli, "load_corpus", lambda *_, **__: Corpus(rows, (clip,)))
    output = run("calibrate", "--manifest", "dev.jsonl", "--model", path, "--picture", curve)
    assert "live: " in output and "files: " in output and "<svg" in curve.read_text()
    loaded = load_checkpoint(path)
    results, _ = transcribe_corpus(loaded.model, loaded.tokenizer, Corpus(rows, (clip,)))
    assert loaded.calibration == fit([word for words in heard_words(results) for word in words])
    assert loaded.file_calibration not in (None, loaded.calibration)
