"""Where a recording can be cut: in a pause, between two words of its transcript that are known.

Which words stand before a pause is asked of a CTC branch: it reads the recording up to the pause and from there on, and
says how likely each division of the transcript is. Knows nothing of augmentation.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from rich.progress import track
from torch.nn.utils.rnn import pad_sequence

from mocha_model.config import SAMPLE_RATE
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training.data import Corpus, Samples, collate
from mocha_training.losses import ctc_prefixes

HOP = SAMPLE_RATE // 100
LEAST_PAUSE = 12  # hops
QUIET_DB = 22.0  # below the loudest speech
MARGIN = 4.0  # nats by which a division must be likelier than all others
BATCH = 32  # halves that are read together


@dataclass(frozen=True)
class Cut:
    """Between samples `at` - 1 and `at`, after `words` words of the transcript."""

    at: int
    words: int


@dataclass(frozen=True)
class _Pause:
    utterance: int
    at: int


def kept_cuts(path: Path, model: SpeechModel, tokenizer: Tokenizer, corpus: Corpus) -> list[tuple[Cut, ...]]:
    """`find_cuts`, kept in the file `path`: one process finds them, others and later runs read what it found.

    Raises:
        ValueError: the file is of another corpus.

    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            found = find_cuts(model, tokenizer, corpus)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps([[(cut.at, cut.words) for cut in cuts] for cuts in found]))
            partial.replace(path)
    kept = [tuple(Cut(at, words) for at, words in cuts) for cuts in json.loads(path.read_text())]
    if len(kept) != len(corpus.utterances):
        raise ValueError(f"{path}: cuts of {len(kept)} utterances, where the corpus has {len(corpus.utterances)}")
    return kept


def find_cuts(model: SpeechModel, tokenizer: Tokenizer, corpus: Corpus) -> list[tuple[Cut, ...]]:
    """The cuts of each utterance of `corpus`, in order; none where `model` is not sure which words stand where.

    Raises:
        ValueError: `tokenizer` writes no characters.

    """
    if tokenizer.units != "characters":
        raise ValueError(f"recordings are cut between words that are spelled, not among {tokenizer.units}")
    model = model.eval()
    pauses = [_Pause(i, at) for i, u in enumerate(corpus.utterances) for at in middles(corpus.pcm(i)) if " " in u.text]
    pauses.sort(key=lambda pause: corpus.utterances[pause.utterance].num_samples)
    found: list[list[Cut]] = [[] for _ in corpus.utterances]
    batches = [pauses[start : start + BATCH // 2] for start in range(0, len(pauses), BATCH // 2)]
    for batch in track(batches, "pauses between words", transient=True):
        for pause, words in zip(batch, _divide(model, tokenizer, corpus, batch), strict=True):
            if words:
                found[pause.utterance].append(Cut(pause.at, words))
    return [_in_order(cuts) for cuts in found]


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
    divided = []
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
    scores = ctc_prefixes(log_probs, num_frames, pad_sequence(targets, batch_first=True))
    for row, text in enumerate(texts):
        spaces = [i for i, c in enumerate(text) if c == " "]
        before, after = [0, *spaces, len(text)], [len(text), *(len(text) - i - 1 for i in spaces), 0]
        likely = scores[row, before] + scores[len(pauses) + row, after]
        (first, second), (best, _) = likely.topk(2)
        divided.append(int(best) if first - second >= MARGIN and best <= len(spaces) else 0)
    return divided


def _in_order(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """One cut between two words, the first found in time; cuts whose words go back are dropped."""
    kept: list[Cut] = []
    for cut in sorted(cuts, key=lambda cut: cut.at):
        if not kept or cut.words > kept[-1].words:
            kept.append(cut)
    return tuple(kept)
