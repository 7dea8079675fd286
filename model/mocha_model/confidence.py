"""How likely a word is right, from how sure the recogniser was of its characters. Imports no torch.

A character's evidence is ``log(p q)``: the logarithms of the selection probability p of its frame and of the softmax
probability q of the character. A word's evidence is the mean over its characters, and its confidence a logistic
function of that (Platt 1999), fitted on recordings with transcripts by `mocha-asr calibrate`.
"""

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

LEAST_PROBABILITY = 1e-6  # of p q, so that one impossible character does not make a word's evidence infinite


class Calibration(BaseModel):
    """``P(word is right) = 1 / (1 + exp(-(bias + slope * evidence)))``; travels in the checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bias: float
    slope: float

    def __call__(self, evidence: float) -> float:
        """Probability that a word of this evidence is right."""
        return 1 / (1 + math.exp(-max(-700.0, min(700.0, self.bias + self.slope * evidence))))


def evidence(p: Sequence[float], q: Sequence[float]) -> float:
    """Mean ``log(p q)`` of a word's characters; where no frame was selected (p = 0) only q counts."""
    products = [(selected or 1.0) * chosen for selected, chosen in zip(p, q, strict=True)]
    return sum(math.log(max(LEAST_PROBABILITY, x)) for x in products) / len(products)


def word_confidence(p: Sequence[float], q: Sequence[float], calibration: Calibration | None) -> float:
    """Confidence of a word; uncalibrated, the geometric mean of its characters' p q."""
    found = evidence(p, q)
    return calibration(found) if calibration else math.exp(found)
