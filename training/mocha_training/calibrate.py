"""Fits and draws how far the confidence of words can be believed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jiwer
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.stats import rankdata

from mocha_model.checkpoint import Checkpoint
from mocha_model.confidence import Calibration
from mocha_model.joint import JointConfig
from mocha_model.recognizer import joint_search
from mocha_training.data import Corpus
from mocha_training.evaluate import Beam, Decoding, Result, transcribe_corpus

Numbers = NDArray[np.float64]
BINS = 10


@dataclass(frozen=True)
class HeardWord:
    """A word of a hypothesis: its evidence (see `mocha_model.confidence`), and whether the reference has it there."""

    evidence: float
    right: bool


def judge(reference: str, hypothesis: str) -> list[bool]:
    """For each word of the hypothesis, whether the alignment of fewest errors finds it in the reference."""
    if not reference.split():
        return [False] * len(hypothesis.split())
    right = [False] * len(hypothesis.split())
    for chunk in jiwer.process_words(reference, hypothesis).alignments[0]:
        if chunk.type == "equal":
            right[chunk.hyp_start_idx : chunk.hyp_end_idx] = [True] * (chunk.hyp_end_idx - chunk.hyp_start_idx)
    return right


def heard_words(results: Sequence[Result]) -> list[list[HeardWord]]:
    """The words of each utterance that was decoded online."""
    return [
        [HeardWord(e, right) for e, right in zip(r.evidence, judge(r.reference, r.hypothesis), strict=True)]
        for r in results
    ]


def fit(words: Sequence[HeardWord]) -> Calibration:
    """Maximum likelihood by Newton's method, with Platt's (1999) targets, which keep it finite; raises ValueError.

    Targets are ``(R + 1) / (R + 2)`` for the R right words and ``1 / (W + 2)`` for the W wrong ones.
    """
    x = np.array([w.evidence for w in words])
    right = np.array([w.right for w in words])
    if not len(words):
        raise ValueError("no words to calibrate on")
    target = np.where(right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2))
    design = np.stack([np.ones_like(x), x], 1)
    weights = np.zeros(2)
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(design @ weights, -50, 50)))
        hessian = design.T @ (design * (p * (1 - p))[:, None]) + 1e-9 * np.eye(2)
        step = np.linalg.solve(hessian, design.T @ (target - p))
        weights += step / max(1.0, float(np.abs(step).max()))
        if np.abs(step).max() < 1e-10:
            break
    return Calibration(bias=float(weights[0]), slope=float(weights[1]))


def held_out(utterances: Sequence[Sequence[HeardWord]]) -> "Reliability":
    """How a calibration does on utterances that it was not fitted on: each half by the other's.

    Raises ValueError where one half has no word.
    """
    halves = [[word for words in utterances[start::2] for word in words] for start in (0, 1)]
    judged = [(fit(other), words) for words, other in (halves, halves[::-1])]
    return reliability([(c(w.evidence), w.right) for c, words in judged for w in words])


@dataclass(frozen=True)
class Reliability:
    """Words sorted by confidence and cut into bins of equal count.

    Attributes:
        confidence, accuracy: mean confidence and share of right words of each bin.
        error: expected calibration error (Naeini et al. 2015), the mean distance of the two.
        separation: probability that a right word has more confidence than a wrong one (area under the ROC curve).
        count: of the words.

    """

    confidence: Numbers
    accuracy: Numbers
    error: float
    separation: float
    count: int


def reliability(words: Sequence[tuple[float, bool]]) -> Reliability:
    """How confidences do, each with whether the word was right."""
    confidence = np.array([c for c, _ in words])
    right = np.array([r for _, r in words], float)
    order = np.argsort(confidence, kind="stable")
    bins = [b for b in np.array_split(order, BINS) if len(b)]
    mean, share = (np.array([values[b].mean() for b in bins]) for values in (confidence, right))
    sizes = np.array([len(b) for b in bins])
    error = float((np.abs(mean - share) * sizes).sum() / sizes.sum())
    num_right, num_wrong = int(right.sum()), int((1 - right).sum())
    above = rankdata(confidence)[right == 1].sum() - num_right * (num_right + 1) / 2  # pairs that are in order
    separation = float(above / (num_right * num_wrong)) if num_right and num_wrong else float("nan")
    return Reliability(mean, share, error, separation, len(words))


def calibrated(
    checkpoint: Checkpoint, corpus: Corpus, progress: Callable[[float], None] = lambda share: None
) -> tuple[tuple[Calibration, Calibration], dict[str, Reliability]]:
    """Fitted on what is read of `corpus`, for live text and for files, and by these names how each does.

    Where there is no language model for files they are read as live text. `progress` is told the share of the work
    that is done with each batch. Raises ValueError where nothing is read.
    """
    ways: dict[str, Decoding | Beam] = {"live": "online"}
    if files := joint_search(checkpoint.config, checkpoint.tokenizer, JointConfig().width):
        ways["files"] = Beam(*files)
    total = len(ways) * len(corpus.utterances)
    fitted, found = [], {}
    for name, how in ways.items():
        parts = (checkpoint.model, checkpoint.tokenizer, corpus, how)
        results, _ = transcribe_corpus(*parts, lambda done: progress(done / total))
        utterances = heard_words(results)
        fitted.append(fit([word for heard in utterances for word in heard]))
        found[name] = held_out(utterances)
    return (fitted[0], fitted[-1]), found


def draw(found: dict[str, Reliability]) -> Figure:
    """Reliability curves by name: share of right words against confidence."""
    figure = Figure(figsize=(4.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color="gray", linestyle=":", label="perfect")
    for name, r in found.items():
        axes.plot(r.confidence, r.accuracy, marker="o", label=f"{name}: {r.count} words, error {r.error:.3f}")
    axes.set(xlabel="confidence", ylabel="share of right words", xlim=(0, 1), ylim=(0, 1), title="Reliability of words")
    axes.legend()
    return figure
