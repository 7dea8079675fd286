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
    sampling_from: float = Field(0.6, ge=0, le=1, description="progress from which it is given draws of its own too")


@dataclass(frozen=True)
class InjectedBatch:
    """Padded tensors of some texts.

    Attributes:
        frames: [B, T, L] float32, posteriorgrams. num_frames: [B] int64.
        tokens: [B, U] int64, ended by eos, padded with 0. num_tokens: [B] int64, eos counted.
        given: [B, U] int64, what the decoder is given as what it has read.
        selected: [B, U] int64, the frame that each is selected at, rising; -1 for never.
        recorded_frames: of recordings among them, without padding.
        frame_samples: samples of a frame.

    """

    frames: Tensor
    num_frames: Tensor
    tokens: Tensor
    num_tokens: Tensor
    given: Tensor
    selected: Tensor
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
        lengths = np.array([len(sentence) for sentence in injection.sentences])
        self.sentences = _like_lengths(rng.permutation(len(lengths)), lengths, rows - recorded, rng)
        lengths = np.array([len(each.frames) for each in injection.bank.spoken])
        drawn = rng.integers(0, len(lengths), recorded * len(self.sentences))
        self.recorded = _like_lengths(drawn, lengths, recorded, rng)

    def __len__(self) -> int:
        """Batches left in the epoch for this process; the same number for each."""
        return max(0, (len(self.sentences) - self.first) // self.world)

    def __getitem__(self, index: int) -> InjectedBatch:
        """Make this process's batch number `index`."""
        own, at = self.injection, self.first + index * self.world + self.rank
        rng = np.random.default_rng((own.seed, self.epoch, at))
        said = [self._said(own.sentences[n], rng) for n in self.sentences[at]]
        recorded = [own.bank.spoken[n] for n in self.recorded[at]]
        spoken = [*(each for each in said if each is not None), *recorded]
        tokens, given, selected = map(list, zip(*(self._tokens(each, rng) for each in spoken), strict=True))
        return InjectedBatch(
            pad_sequence([torch.from_numpy(each.frames).float() for each in spoken], batch_first=True),
            torch.tensor([len(each.frames) for each in spoken]),
            pad_sequence(tokens, batch_first=True),
            torch.tensor([len(each) for each in tokens]),
            pad_sequence(given, batch_first=True),
            pad_sequence(selected, batch_first=True, padding_value=-1),
            sum(len(each.frames) for each in recorded),
            own.frame_samples,
        )

    def _said(self, sentence: str, rng: np.random.Generator) -> Spoken | None:
        own, longest = self.injection, self.injection.config.longest_characters
        said = own.bank.say(sentence, rng)
        if said is None or len(sentence) > SHORT or rng.random() >= own.config.joined_probability:
            return said
        more = own.sentences[int(rng.integers(len(own.sentences)))]
        second = own.bank.say(more, rng) if len(sentence) + 1 + len(more) <= longest else None
        return said if second is None else after_one_another(said, second, int(rng.integers(*PAUSES)))

    def _tokens(self, spoken: Spoken, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """What is to be written, what is given as what was, and the frames it is selected at."""
        own = self.injection
        ids = np.array([*own.tokenizer.encode(spoken.text), own.tokenizer.eos_id])
        given, replaced = ids.copy(), rng.random(len(ids) - 1) < own.config.replaced_probability
        given[:-1][replaced] = rng.choice(ids[:-1], int(replaced.sum()))
        at = np.minimum(spoken.ends + own.config.decoder.delay_frames, len(spoken.frames) - 1)
        selected = np.where(np.diff(at, prepend=-1) > 0, at, -1)  # what would be selected after the end never is
        ended = np.append(selected, -1)
        return torch.from_numpy(ids), torch.from_numpy(given), torch.from_numpy(ended)


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


def _like_lengths(
    drawn: NDArray[np.int64], lengths: NDArray[np.int64], count: int, rng: np.random.Generator
) -> list[list[int]]:
    """`drawn` in batches of `count`, of like `lengths` each, in any order; what is left over is left out."""
    batches: list[list[int]] = []
    for start in range(0, len(drawn), SORTED * count):
        pool = drawn[start : start + SORTED * count]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        cut = [pool[at : at + count].tolist() for at in range(0, len(pool) - count + 1, count)]
        batches += [cut[n] for n in rng.permutation(len(cut))]
    return batches
