"""Where recordings can be spliced: in a pause, when it is known which words of the transcript stand before it.

That is asked of a CTC branch: it reads the recording up to the pause and from there on, and says how likely each
division of the transcript is. A pause inside a word, or a transcript that is wrong, it does not notice. Knows nothing
of augmentation.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from mocha_model.checkpoint import write_whole
from mocha_model.config import SAMPLE_RATE
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training.data import Corpus, collate
from mocha_training.manifests import Samples

HOP = SAMPLE_RATE // 100
LEAST_PAUSE = 12  # hops
QUIET_DB = 22.0  # below the loudest speech
MARGIN = 4.0  # nats by which a division must be likelier than all others
BATCH = 32  # halves that are read together


@dataclass(frozen=True)
class SplicePoint:
    """Between samples `at` - 1 and `at`, after `words` words of the transcript."""

    at: int
    words: int


@dataclass(frozen=True)
class _Pause:
    utterance: int
    at: int


def kept_splice_points(
    path: Path, model: SpeechModel, tokenizer: Tokenizer, corpus: Corpus
) -> list[tuple[SplicePoint, ...]]:
    """`find_splice_points`, kept in the file `path`: one process finds them, others and later runs read them.

    Raises:
        ValueError: the file is of another corpus, or `tokenizer` writes no characters.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            found = find_splice_points(model, tokenizer, corpus)
            points = [[(point.at, point.words) for point in each] for each in found]
            write_whole(path, json.dumps({"corpus": corpus.digest, "points": points}).encode())
    kept = json.loads(path.read_text())
    if kept["corpus"] != corpus.digest:
        raise ValueError(f"{path}: found in another corpus; without this file they are found anew")
    return [tuple(SplicePoint(at, words) for at, words in each) for each in kept["points"]]


def find_splice_points(model: SpeechModel, tokenizer: Tokenizer, corpus: Corpus) -> list[tuple[SplicePoint, ...]]:
    """Those of each utterance of `corpus`, in order; none where `model` is not sure which words stand where.

    Raises:
        ValueError: `tokenizer` writes no characters.

    """
    if tokenizer.units != "characters":
        raise ValueError(f"recordings are spliced between words that are spelled, not among {tokenizer.units}")
    model = model.eval()
    utterances = track(corpus.utterances, "pauses", transient=True)
    pauses = [_Pause(i, at) for i, u in enumerate(utterances) if " " in u.text for at in middles(corpus.pcm(i))]
    pauses.sort(key=lambda pause: corpus.utterances[pause.utterance].num_samples)
    found: list[list[SplicePoint]] = [[] for _ in corpus.utterances]
    batches = [pauses[start : start + BATCH // 2] for start in range(0, len(pauses), BATCH // 2)]
    for batch in track(batches, "words before each pause", transient=True):
        for pause, words in zip(batch, _divide(model, tokenizer, corpus, batch), strict=True):
            if words:
                found[pause.utterance].append(SplicePoint(pause.at, words))
    return [_in_order(points) for points in found]


def middles(samples: Samples) -> list[int]:
    """The middle of each pause of 120 ms and more in a recording [N] int16; not of the silence around the speech."""
    power = np.mean(samples[: len(samples) // HOP * HOP].reshape(-1, HOP).astype(np.float64) ** 2, axis=1)
    if len(power) < LEAST_PAUSE:
        return []
    level = np.convolve(10 * np.log10(power + 0.1), np.full(3, 1 / 3), "same")
    low, high = np.percentile(level, (5, 95))
    quiet = level < min(low + 0.3 * (high - low), high - QUIET_DB)
    edges = np.flatnonzero(np.diff(quiet.astype(int))) + 1
    if quiet[0]:
        edges = edges[1:]
    begins, ends = edges[: len(edges) // 2 * 2].reshape(-1, 2).T  # of quiet stretches with speech on both sides
    return [int((a + b) // 2 * HOP) for a, b in zip(begins, ends, strict=True) if b - a >= LEAST_PAUSE]


@torch.inference_mode()
def _divide(model: SpeechModel, tokenizer: Tokenizer, corpus: Corpus, pauses: Sequence[_Pause]) -> list[int]:
    """How many words each pause stands after; 0 where that is not certain, or there are none on one side."""
    texts = [corpus.utterances[pause.utterance].text for pause in pauses]
    audio = [corpus.audio(pause.utterance) for pause in pauses]
    halves = [a[: pause.at] for a, pause in zip(audio, pauses, strict=True)]
    halves += [a[pause.at :] for a, pause in zip(audio, pauses, strict=True)]
    batch = collate(halves, [*texts, *texts], tokenizer, SAMPLE_RATE).to(next(model.parameters()).device)
    memory, num_frames = model.encode(*model.features(batch.samples, batch.num_samples))
    log_probs, num_frames = model.ctc_log_probs(memory).float().cpu(), num_frames.cpu()
    for row, num in enumerate(num_frames.tolist()):  # the second halves are read from behind
        if row >= len(pauses):
            log_probs[row, :num] = log_probs[row, :num].flip(0)
    targets = [torch.tensor(tokenizer.encode(text)) for text in texts]
    targets += [target.flip(0) for target in targets]
    scores = ctc_forward(log_probs, num_frames, pad_sequence(targets, batch_first=True))
    divided = []
    for row, text in enumerate(texts):
        spaces = [i for i, c in enumerate(text) if c == " "]
        before, after = [0, *spaces, len(text)], [len(text), *(len(text) - i - 1 for i in spaces), 0]
        likely = scores[row, before] + scores[len(pauses) + row, after]
        (first, second), (best, _) = likely.topk(2)
        divided.append(int(best) if first - second >= MARGIN and best <= len(spaces) else 0)
    return divided


def ctc_forward(log_probs: Tensor, num_frames: Tensor, tokens: Tensor) -> Tensor:
    """Log-likelihood that the frames [B, T, V] are read as the first n of `tokens` [B, U], for every n; [B, U + 1].

    The forward variables of CTC after the last frame (Graves et al. 2006, section 4.1).
    """
    num_rows, num_tokens = tokens.shape
    blanks = log_probs.new_full((num_rows, num_tokens + 1), -torch.inf)  # alignments that end in a blank after n
    labels = blanks.clone()  # and in the n-th symbol
    blanks[:, 0] = 0.0
    again = functional.pad(tokens[:, 1:] == tokens[:, :-1], (1, 0))  # the same symbol twice needs a blank between
    never = log_probs.new_full((num_rows, 1), -torch.inf)
    for t in range(int(num_frames.max())):
        told = torch.cat([never, log_probs[:, t].gather(1, tokens)], dim=1)
        either = torch.logaddexp(blanks, labels)
        before = torch.cat([never, torch.where(again, blanks[:, :-1], either[:, :-1])], dim=1)
        on = (t < num_frames)[:, None]
        labels = torch.where(on, told + torch.logaddexp(labels, before), labels)
        blanks = torch.where(on, log_probs[:, t, :1] + either, blanks)
    return torch.logaddexp(blanks, labels)


def _in_order(points: Sequence[SplicePoint]) -> tuple[SplicePoint, ...]:
    """One between two words, the first found in time; those whose words go back are dropped."""
    kept: list[SplicePoint] = []
    for point in sorted(points, key=lambda point: point.at):
        if not kept or point.words > kept[-1].words:
            kept.append(point)
    return tuple(kept)
