"""What a process hears in an epoch: examples drawn, put into batches of like lengths, and made when asked for."""

import numpy as np
from torch.utils.data import Dataset

from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import Augmenter
from mocha_training.config import TrainConfig
from mocha_training.data import Batch, collate, make_batches

LENGTH_MULTIPLE = 16_000  # samples; with the buckets of `make_batches` this leaves few distinct shapes


class EpochBatches(Dataset[Batch]):
    """The augmented batches of one epoch from `first` on, for one of `world` processes.

    Batch n of an epoch depends only on (seed, epoch, n).
    """

    def __init__(
        self,
        augmenter: Augmenter,
        tokenizer: Tokenizer,
        config: TrainConfig,
        epoch: int,
        first: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.augmenter, self.tokenizer, self.config, self.epoch, self.first = augmenter, tokenizer, config, epoch, first
        self.rank, self.world = rank, world
        rng = np.random.default_rng((config.seed, epoch))
        self.examples = [augmenter.draw(index, rng) for index in range(len(augmenter.corpus.utterances))]
        seconds = [example.seconds for example in self.examples]
        views = 2 if config.consistency_weight else 1
        self.batches = make_batches(seconds, config.batch_seconds / views, rng, world, config.batch_utterances)

    def __len__(self) -> int:
        """Batches left in the epoch for this process; the same number for each."""
        return max(0, (len(self.batches) - self.first) // self.world)

    def __getitem__(self, index: int) -> Batch:
        """Make this process's batch number `index`."""
        at = self.first + index * self.world + self.rank
        rng = np.random.default_rng((self.config.seed, self.epoch, at))
        pairs = [self.augmenter.make(self.examples[i], rng) for i in self.batches[at]]
        return collate([audio for audio, _ in pairs], [text for _, text in pairs], self.tokenizer, LENGTH_MULTIPLE)
