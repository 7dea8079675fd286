"""Batches of posteriorgrams for a decoder that learns from text beside recordings: text injection.

Thomas et al. 2022 ("textograms") and Sainath et al. 2022 (JOIST) give a recogniser text as if it had been heard. Here
it is put together of what was heard of recordings (`posteriorgrams`). Knows nothing of losses.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from rich.progress import Progress
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from mocha_model.checkpoint import Checkpoint
from mocha_model.config import SAMPLE_RATE, DecoderConfig, PosteriorgramConfig
from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import Augmenter
from mocha_training.posteriorgrams import Bank, Spoken, after_one_another, hear, kept_posteriorgrams

SORTED = 20  # batches of text that are sorted by length together
SHORT = 70  # characters; what is not longer may be followed by another sentence
PAUSES = (2, 20)  # frames between two sentences, which is less than what ends a segment
SLIPS = {-3: 0.01, -2: 0.02, -1: 0.05, 1: 0.05, 2: 0.03}  # frames too late, and how often


class InjectionConfig(BaseModel):
    """The decoder that is trained, and what from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    posteriorgram: PosteriorgramConfig = PosteriorgramConfig()
    decoder: DecoderConfig = DecoderConfig(lstm_size=480, dropout=0.2, delay_frames=8)
    chunk_width: int = Field(8, gt=0, description="w, in encoder frames")
    dropouts: tuple[float, ...] = Field(
        (0.0, 0.2, 0.25), description="of the encoder, in each hearing of the recordings; none and no masks with 0"
    )
    batch_texts: int = Field(128, gt=0, description="in all processes together")
    recorded_share: float = Field(0.3, gt=0, lt=1, description="of the texts of a batch: recordings, not sentences")
    joined_probability: float = Field(0.2, ge=0, le=1, description="that a short sentence is followed by another")
    longest_characters: int = Field(140, gt=0, description="sentences that are longer are left out")
    replaced_probability: float = Field(
        0.06, ge=0, le=1, description="that the decoder is given another character as what it has read"
    )
    slips: float = Field(
        1.0, ge=0, le=1, description="share of characters that may be selected too early or too late (`SLIPS`)"
    )
    sampling_from: float = Field(0.7, ge=0, le=1, description="progress from which it is given draws of its own too")


@dataclass(frozen=True)
class InjectedBatch:
    """Padded tensors of some texts.

    Attributes:
        frames: [B, T, L] float32, posteriorgrams. num_frames: [B] int64.
        tokens: [B, U] int64, ended by eos, padded with 0. num_tokens: [B] int64, eos counted.
        given: [B, U] int64, what the decoder is given as what it has read.
        selected: [B, U] int64, the frame that each is selected at, rising; -1 for never.
        excused: [B, T] bool, frames whose decision is a mistake on this path, and not to be learned.
        recorded_frames: of recordings among them, without padding.
        frame_samples: samples of a frame.

    """

    frames: Tensor
    num_frames: Tensor
    tokens: Tensor
    num_tokens: Tensor
    given: Tensor
    selected: Tensor
    excused: Tensor
    recorded_frames: int
    frame_samples: int

    @property
    def seconds(self) -> float:
        """Recorded speech in the batch."""
        return self.recorded_frames * self.frame_samples / SAMPLE_RATE

    def to(self, device: torch.device) -> "InjectedBatch":
        """A copy on `device`."""
        names = [name for name in self.__dataclass_fields__ if isinstance(getattr(self, name), Tensor)]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class Injection:
    """What batches are made of: recordings' posteriorgrams and, put together of them, `sentences`."""

    config: InjectionConfig
    bank: Bank
    sentences: list[str]
    tokenizer: Tokenizer
    frame_samples: int
    seed: int

    def epoch(self, number: int, first: int, rank: int, world: int) -> "InjectedBatches":
        """One pass over the sentences, from batch `first` on, for process `rank` of `world`."""
        return InjectedBatches(self, number, first, rank, world)


class InjectedBatches(Dataset[InjectedBatch]):
    """The batches of one epoch, of like lengths; batch n depends only on (seed, epoch, n)."""

    def __init__(self, injection: Injection, epoch: int, first: int, rank: int, world: int) -> None:
        self.injection, self.epoch, self.first, self.rank, self.world = injection, epoch, first, rank, world
        config, rng = injection.config, np.random.default_rng((injection.seed, epoch))
        rows = max(2, config.batch_texts // world)
        recorded = min(max(1, round(rows * config.recorded_share)), rows - 1)
        examples = [self._drawn(n, rng) for n in rng.permutation(len(injection.sentences)).tolist()]
        texts = np.array([sum(len(injection.sentences[n]) for n in example) for example in examples])
        frames = np.array([len(each.frames) for each in injection.bank.spoken])
        self.batches: list[tuple[list[tuple[int, ...]], list[int]]] = []
        for start in range(0, len(examples), SORTED * (rows - recorded)):
            ordered = start + np.argsort(texts[start : start + SORTED * (rows - recorded)], kind="stable")
            count = len(ordered) // (rows - recorded)
            beside = rng.integers(0, len(frames), count * recorded)
            beside = beside[np.argsort(frames[beside], kind="stable")].reshape(count, recorded)
            for n in rng.permutation(count):  # short sentences beside short recordings
                own = ordered[n * (rows - recorded) : (n + 1) * (rows - recorded)]
                self.batches.append(([examples[at] for at in own], beside[n].tolist()))

    def __len__(self) -> int:
        """Batches left in the epoch for this process; the same number for each."""
        return max(0, (len(self.batches) - self.first) // self.world)

    def __getitem__(self, index: int) -> InjectedBatch:
        """Make this process's batch number `index`."""
        own, at = self.injection, self.first + index * self.world + self.rank
        rng = np.random.default_rng((own.seed, self.epoch, at))
        examples, beside = self.batches[at]
        said = [self._said(example, rng) for example in examples]
        recorded = [own.bank.spoken[n] for n in beside]
        spoken = [*(each for each in said if each is not None), *recorded]
        parts = zip(*(self._tokens(each, rng) for each in spoken), strict=True)
        tokens, given, selected, excused = map(list, parts)
        return InjectedBatch(
            pad_sequence([torch.from_numpy(each.frames).float() for each in spoken], batch_first=True),
            torch.tensor([len(each.frames) for each in spoken]),
            pad_sequence(tokens, batch_first=True),
            torch.tensor([len(each) for each in tokens]),
            pad_sequence(given, batch_first=True),
            pad_sequence(selected, batch_first=True, padding_value=-1),
            pad_sequence(excused, batch_first=True),
            sum(len(each.frames) for each in recorded),
            own.frame_samples,
        )

    def _drawn(self, sentence: int, rng: np.random.Generator) -> tuple[int, ...]:
        """`sentence`, and at times another after it."""
        own, longest = self.injection, self.injection.config.longest_characters
        first, other = own.sentences[sentence], int(rng.integers(len(own.sentences)))
        short = len(first) <= SHORT and len(first) + len(own.sentences[other]) < longest
        return (sentence, other) if short and rng.random() < own.config.joined_probability else (sentence,)

    def _said(self, example: tuple[int, ...], rng: np.random.Generator) -> Spoken | None:
        own = self.injection
        said = [own.bank.say(own.sentences[n], rng) for n in example]
        if said[0] is None or len(said) == 1 or said[1] is None:
            return said[0]
        return after_one_another(said[0], said[1], int(rng.integers(*PAUSES)))

    def _tokens(self, spoken: Spoken, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What is to be written, what is given as what was, the frames it is selected at, and what is excused."""
        own, num_frames = self.injection, len(spoken.frames)
        ids = np.array([*own.tokenizer.encode(spoken.text), own.tokenizer.eos_id])
        given, replaced = ids.copy(), rng.random(len(ids) - 1) < own.config.replaced_probability
        given[:-1][replaced] = rng.choice(ids[:-1], int(replaced.sum()))
        places = spoken.ends + own.config.decoder.delay_frames
        slips = rng.choice([0, *SLIPS], len(places), p=[1 - sum(SLIPS.values()), *SLIPS.values()])
        slips[rng.random(len(places)) >= own.config.slips] = 0
        selected, excused = slipped(places, slips, num_frames)
        ended = np.append(selected, -1)
        return torch.from_numpy(ids), torch.from_numpy(given), torch.from_numpy(ended), torch.from_numpy(excused)


def slipped(
    places: NDArray[np.int64], slips: NDArray[np.int64], num_frames: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A path that does not always select where it should, as decoding's does not: it has to learn to go on from there.

    Args:
        places: [N] where each character should be selected, rising.
        slips: [N] by how many frames it is too late.
        num_frames: T.

    Returns:
        The frames where they are selected [N], rising, -1 where the audio has ended; and which of T decisions are
        mistakes of the path [T]: not to select where a character should be, or to select too early.

    """
    selected, excused, last = np.full(len(places), -1), np.zeros(num_frames, dtype=np.bool_), -1
    for n, (place, slip) in enumerate(zip(places.tolist(), slips.tolist(), strict=True)):
        at = max(place + slip, last + 1)
        if at >= num_frames:
            excused[max(place, last + 1) :] = True
            break
        if at > place:
            excused[max(place, last + 1) : at] = True
        elif at < place:
            excused[at] = True
        selected[n] = last = at
    return selected, excused


def make_injection(
    config: InjectionConfig, seed: int, start: Checkpoint, augmenter: Augmenter, sentences: list[str], kept: Path
) -> Injection:
    """What `start` hears of the recordings, once for each dropout, and `sentences` that are short enough.

    What is heard is written to the file `kept`, or read from it. Raises ValueError where nothing can be learned from.
    """

    def hear_all() -> list[Spoken]:
        total = len(config.dropouts) * len(augmenter.corpus.utterances)
        with Progress(transient=True) as bar:
            task = bar.add_task("hearing", total=total)
            parts = [
                hear(start.model, start.tokenizer, augmenter, dropout, seed + n, lambda done: bar.advance(task, done))
                for n, dropout in enumerate(config.dropouts)
            ]
        return [spoken for part in parts for spoken in part]

    short = [sentence for sentence in sentences if len(sentence) <= config.longest_characters]
    bank = Bank(kept_posteriorgrams(kept, hear_all))
    injection = Injection(config, bank, short, start.tokenizer, start.config.frame_samples, seed)
    if not len(injection.epoch(0, 0, 0, 1)):
        raise ValueError(f"{len(short)} sentences that are short enough are less than a batch")
    return injection
