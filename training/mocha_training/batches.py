"""What a process hears: examples drawn epoch by epoch, put into batches of like lengths, and made when asked for."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Dataset

from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import Augmenter
from mocha_training.config import TrainConfig
from mocha_training.data import Batch, collate, make_batches

LENGTH_MULTIPLE = 16_000  # samples; with the buckets of `make_batches` this leaves few distinct shapes
Place = tuple[int, int]  # an epoch, and how many of its batches all processes together have had


class Epoch:
    """The augmented batches of one epoch, for one of `world` processes.

    Batch n of an epoch depends only on (seed, epoch, n).
    """

    def __init__(
        self, augmenter: Augmenter, tokenizer: Tokenizer, config: TrainConfig, number: int, rank: int, world: int
    ) -> None:
        self.augmenter, self.tokenizer, self.config, self.number = augmenter, tokenizer, config, number
        self.rank, self.world = rank, world
        rng = np.random.default_rng((config.seed, number))
        self.examples = [augmenter.draw(index, rng) for index in range(len(augmenter.corpus.utterances))]
        seconds = [example.seconds for example in self.examples]
        views = 2 if config.consistency_weight else 1
        self.batches = make_batches(seconds, config.batch_seconds / views, rng, world, config.batch_utterances)

    def starts(self, first: int = 0) -> range:
        """Where each of its steps begins, from batch `first` on; in each, every process has a batch."""
        return range(first, len(self.batches) - self.world + 1, self.world)

    def make(self, start: int) -> Batch:
        """The batch of this process in the step that begins at `start`."""
        at = start + self.rank
        rng = np.random.default_rng((self.config.seed, self.number, at))
        pairs = [self.augmenter.make(self.examples[i], rng) for i in self.batches[at]]
        return collate([audio for audio, _ in pairs], [text for _, text in pairs], self.tokenizer, LENGTH_MULTIPLE)


class RunBatches(Dataset[Batch]):
    """The batches of all epochs, so that those of the next are made while the last of one are learned from."""

    def __init__(
        self, augmenter: Augmenter, tokenizer: Tokenizer, config: TrainConfig, rank: int = 0, world: int = 1
    ) -> None:
        self._drawn_from, self._processes = (augmenter, tokenizer, config), (rank, world)
        self._epochs: dict[int, Epoch] = {}  # the last two that were asked for

    def epoch(self, number: int) -> Epoch:
        """Draw epoch `number`, unless it is at hand."""
        if number not in self._epochs:
            kept = list(self._epochs.items())[-1:]
            self._epochs = dict(kept) | {number: Epoch(*self._drawn_from, number, *self._processes)}
        return self._epochs[number]

    def places(self, epoch: int, first: int) -> Iterator[Place]:
        """Those of all steps from this one on, without end."""
        while True:
            for start in self.epoch(epoch).starts(first):
                yield epoch, start
            epoch, first = epoch + 1, 0

    def __getitem__(self, place: Place) -> Batch:
        """The batch of this process in a step."""
        epoch, start = place
        return self.epoch(epoch).make(start)
