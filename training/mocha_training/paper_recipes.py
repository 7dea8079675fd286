"""The papers' training configurations, figure by figure; docs/recipes.md says what is theirs and what is ours."""

import math
from typing import Any

from mocha_training.augment import AugmentConfig
from mocha_training.config import Preset, TrainConfig
from mocha_training.weights import Draw, InitConfig, WeightNoise


def timit() -> TrainConfig:
    """Phones of TIMIT with hard monotonic attention (Raffel 2017, appendix D.1.1); the length of the run is ours."""
    weights = Draw(distribution="uniform", scale=0.075)
    return _as_published(
        preset="timit",
        init=InitConfig(
            encoder=weights, decoder=weights, embedding=Draw(distribution="uniform", scale=math.sqrt(3 / 30))
        ),
        learning_rate=1e-4,
        rate_drops=((40_000, 0.5),),
        steps=100_000,
        batch_utterances=4,
        clip=2.0,
        weight_noise=WeightNoise(std=0.5, from_step=2_000),
        units="words",
        fold_phones=True,
    )


def wsj_monotonic() -> TrainConfig:
    """WSJ with hard monotonic attention (Raffel 2017, appendix D.1.2); the length of the run is ours."""
    return _wsj("wsj_monotonic", 2e-4, (700_000, 1_000_000, 1_300_000))


def wsj_mocha() -> TrainConfig:
    """WSJ with MoChA (Chiu & Raffel 2018, appendix A.1); the length of the run is ours."""
    return _wsj("wsj_mocha", 1e-3, (600_000, 800_000, 1_000_000))


def _wsj(preset: Preset, learning_rate: float, drops: tuple[int, ...]) -> TrainConfig:
    return _as_published(
        preset=preset,
        init=InitConfig(
            encoder=Draw(distribution="normal", scale=0.1),
            decoder=Draw(distribution="uniform", scale=0.1),
            embedding=Draw(distribution="uniform", scale=1.0),
        ),
        learning_rate=learning_rate,
        rate_drops=tuple((after, 0.1) for after in drops),
        steps=drops[-1] + 100_000,
        batch_utterances=8,
        clip=1.0,
        weight_noise=WeightNoise(std=0.075, from_step=20_000, where="lstm"),
        neighbour_smoothing=(0.015, 0.035, 1.0, 0.035, 0.015),
    )


def _as_published(**own: Any) -> TrainConfig:
    """A recipe's `own` fields, and what the papers' recipes share.

    Adam and L2; cross-entropy alone; full noise before the sigmoid from the start; the checkpoint that does best on dev
    (Chiu & Raffel 2018, section 3).
    """
    return TrainConfig(
        bf16=False,
        warmup_steps=1,
        scalar_rate=1.0,
        betas=(0.9, 0.999),
        epsilon=1e-6,
        weight_decay=1e-6,
        decoupled_decay=False,
        ctc_only=0.0,
        ctc_weight=0.0,
        quantity_weight=0.0,
        latency_weight=0.0,
        label_smoothing=0.0,
        noise_std=1.0,
        noise_full_at=0.0,
        max_seconds=40.0,
        evaluate_every=2_000,
        save_every=1_000,
        final="best",
        augment=AugmentConfig.nothing(),
        **own,
    )
