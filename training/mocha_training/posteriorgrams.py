"""Posteriorgrams of recordings, and of sentences that nobody has said, put together of pieces of recorded ones.

A piece is what the CTC heads said of some characters of a recording; it is taken where the same characters stand next
to it there as in the sentence. Knows nothing of decoders.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray

from mocha_model.model import SpeechModel
from mocha_model.posteriorgram import posteriorgram
from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import Augmenter
from mocha_training.data import collate
from mocha_training.losses import ctc_boundaries
from mocha_training.spectral import spec_augment, warp_vocal_tract

BATCH = 16  # recordings heard together
KEPT_TAIL = 30  # frames of silence that are kept after the last character of a recording
KEPT_HEAD = 15  # frames before the first characters of a made-up sentence, silence and all
LONGEST = 9  # characters of a piece
CONTEXT = 14  # characters that the index is sorted by: more than a piece with a neighbour on each side
BEGIN, END = "^", "$"  # of a recording's text; no vocabulary of characters has them (`normalize_text`)
LAST = b"\x7f"  # sorts after all characters of ASCII


@dataclass(frozen=True)
class Spoken:
    """A text and the posteriorgram of it.

    Attributes:
        text: N characters.
        frames: [T, L] float16, see `posteriorgram`.
        ends: [N] int64, the last frame of each character, rising.

    """

    text: str
    frames: NDArray[np.float16]
    ends: NDArray[np.int64]


def hear(
    model: SpeechModel,
    tokenizer: Tokenizer,
    augmenter: Augmenter,
    dropout: float,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Spoken]:
    """What `model` makes of each utterance of `augmenter`'s corpus, augmented; those that it cannot align are left out.

    With a `dropout` it is made to hear worse, so that it does not know by heart what it was trained on: units of its
    encoder are dropped and features masked. Its characters are aligned by what it hears without.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    device = next(model.parameters()).device
    examples = [augmenter.draw(index, rng) for index in range(len(augmenter.corpus.utterances))]
    order = sorted(range(len(examples)), key=lambda index: examples[index].seconds)
    found: list[Spoken] = []
    for start in range(0, len(order), BATCH):
        pairs = [augmenter.make(examples[index], rng) for index in order[start : start + BATCH]]
        texts = [text for _, text in pairs]
        batch = collate([audio for audio, _ in pairs], texts, tokenizer).to(device)
        with torch.no_grad():
            frames, num_frames = model.features(batch.samples, batch.num_samples)
            spread = augmenter.config.vocal_tract_range
            frames = warp_vocal_tract(frames, model.config.features, spread, generator) if spread else frames
            heard = model.eval().hear(frames, num_frames)
            log_probs = heard.labels.float().log_softmax(-1)
            ends = ctc_boundaries(log_probs, heard.num_frames, batch.tokens, batch.num_tokens)
            if dropout:
                _drop(model, dropout)
                heard = model.hear(spec_augment(frames, augmenter.config, generator), num_frames)
                model.eval()
            said = posteriorgram(heard.labels, heard.phones).half().cpu().numpy()
        for row, (text, length) in enumerate(zip(texts, heard.num_frames.tolist(), strict=True)):
            own = ends[row, : len(text)].cpu().numpy()
            if len(own) and own.min() >= 0:
                found.append(Spoken(text, said[row, : min(length, int(own[-1]) + 1 + KEPT_TAIL)], own))
        progress(len(texts))
    return found


def _drop(model: SpeechModel, dropout: float) -> None:
    """Have the encoder, and nothing else, drop units."""
    for module in model.encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
            module.train()


class Bank:
    """Posteriorgrams that sentences are put together of."""

    def __init__(self, spoken: Sequence[Spoken]) -> None:
        """Raises ValueError for none, or for characters beyond ASCII."""
        if not spoken:
            raise ValueError("no recording could be aligned with its text, so there are no posteriorgrams")
        if not all(each.text.isascii() for each in spoken):
            raise ValueError("posteriorgrams are put together of texts in ASCII")
        self.spoken = spoken
        lengths = np.array([len(each.frames) for each in spoken])
        self.frames = np.concatenate([each.frames for each in spoken])
        starts, ends = [], []
        for first, each, length in zip(np.cumsum(lengths) - lengths, spoken, lengths, strict=True):
            after = first + each.ends + 1
            starts += [first, first, *after]  # BEGIN has no frames, END what follows the last character
            ends += [first, *after, first + length]
        self.starts, self.ends = np.array(starts), np.array(ends)
        text = "".join(f"{BEGIN}{each.text}{END}" for each in spoken).encode("ascii")
        padded = np.frombuffer(text + LAST * CONTEXT, dtype=np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(padded, CONTEXT)[: len(text)]
        keys = np.ascontiguousarray(windows).view(f"S{CONTEXT}")[:, 0]
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def say(self, text: str, rng: np.random.Generator) -> Spoken | None:
        """`text` in pieces of up to `LONGEST` characters; None if it has a character that no recording has."""
        marked = f"{BEGIN}{text}{END}".encode("ascii", "replace")
        pieces, ends, at, now = [], list[int](), 0, 0
        while at < len(marked):
            found = self._piece(marked, at, int(rng.integers(3, LONGEST + 1)), rng)
            if found is None:
                return None
            first, count = found
            begin, end = int(self.starts[first]), int(self.ends[first + count - 1])
            if at == 0 and count > 1:  # not all the silence before somebody spoke
                begin = max(begin, int(self.ends[first + 1]) - KEPT_HEAD)
            pieces.append(self.frames[begin:end])
            inside = range(max(at, 1), min(at + count, len(marked) - 1))
            ends += [now + int(self.ends[first + i - at]) - 1 - begin for i in inside]
            at, now = at + count, now + end - begin
        return Spoken(text, np.concatenate(pieces), np.array(ends, dtype=np.int64))

    def _piece(self, text: bytes, at: int, count: int, rng: np.random.Generator) -> tuple[int, int] | None:
        """Where, among all characters, some say what `text` says from `at` on, and how many: at most `count`."""
        for number in range(min(count, len(text) - at), 0, -1):
            around = max(0, at - 1), min(len(text), at + number + 1)
            for start, stop in (around, *([(at, at + 1)] if number == 1 else [])):  # in the end, whatever stands around
                low, high = self._keys.searchsorted([text[start:stop], text[start:stop] + LAST])
                if high > low:
                    return int(self._order[rng.integers(low, high)]) + at - start, number
        return None


def after_one_another(first: Spoken, second: Spoken, pause_frames: int) -> Spoken:
    """Both with a space between them, and at most `pause_frames` of the first one's silence."""
    kept = min(len(first.frames), int(first.ends[-1]) + 1 + pause_frames)
    ends = np.concatenate([first.ends, [first.ends[-1] + 1], second.ends + kept])
    return Spoken(f"{first.text} {second.text}", np.concatenate([first.frames[:kept], second.frames]), ends)


def kept_posteriorgrams(path: Path, make: Callable[[], list[Spoken]]) -> list[Spoken]:
    """What `make` makes, written to the .npz file `path`; or what was written there before. One process makes them."""
    with FileLock(path.with_suffix(".lock")):
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, make())
    with np.load(path) as kept:
        texts = re.split("\n", kept["texts"].tobytes().decode())
        frames = np.split(kept["frames"], kept["num_frames"].cumsum()[:-1])
        ends = np.split(kept["ends"], np.cumsum([len(text) for text in texts])[:-1])
    return [Spoken(*each) for each in zip(texts, frames, ends, strict=True)]


def _write(path: Path, spoken: list[Spoken]) -> None:
    Bank(spoken)  # which says what is wrong with them
    partial = path.with_suffix(".partial.npz")
    np.savez(
        partial,
        texts=np.frombuffer("\n".join(each.text for each in spoken).encode(), dtype=np.uint8),
        frames=np.concatenate([each.frames for each in spoken]),
        num_frames=np.array([len(each.frames) for each in spoken]),
        ends=np.concatenate([each.ends for each in spoken]),
    )
    partial.replace(path)
