"""Confidence: evidence against its definition, the fit against known probabilities, the figures on known words."""

import math

import numpy as np
import pytest

from mocha_model.confidence import LEAST, Calibration, evidence
from mocha_training.calibrate import HeardWord, draw, fit, judge, reliability


def drawn(number: int, bias: float, slope: float) -> list[HeardWord]:
    rng = np.random.default_rng(0)
    x = -rng.exponential(0.7, number)
    return [HeardWord(float(e), bool(rng.random() < 1 / (1 + math.exp(-(bias + slope * e))))) for e in x]


def test_evidence():
    assert evidence([0.5, 1.0], [0.5, 0.25]) == pytest.approx(math.log(0.25))
    assert evidence([0.0], [0.5]) == pytest.approx(math.log(0.5))  # emitted without a selection, at a flush
    assert evidence([1.0], [0.0]) == pytest.approx(math.log(LEAST))


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


def test_reliability():
    words = drawn(20_000, 1.0, 2.0)
    good, bad = (reliability(words, c) for c in (fit(words), Calibration(bias=3.0, slope=2.0)))
    assert good.error < 0.02 < 0.1 < bad.error  # two nats too sure
    assert good.separation == pytest.approx(bad.separation) and good.separation > 0.7  # the order is the same
    alike = reliability([HeardWord(-1.0, k % 2 == 0) for k in range(100)], Calibration(bias=0, slope=1))
    assert alike.separation == 0.5
    assert draw(good, len(words)).axes[0].lines[1].get_ydata() == pytest.approx(good.accuracy)
