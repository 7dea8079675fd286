"""Named training configurations: one typed function each."""

from collections.abc import Callable

from mocha_training.augment import AugmentConfig
from mocha_training.config import TrainConfig


def warm_start() -> TrainConfig:
    """The CTC branch alone on short, barely augmented utterances: the fastest way off the all-blank plateau.

    Give its checkpoint to `bundled` with --init.
    """
    gentle = AugmentConfig(
        speed_range=0.06,
        gain_db=6,
        noise_probability=0.1,
        room_probability=0,
        join_probability=0,
        freq_masks=0,
        time_masks=0,
    )
    return TrainConfig(
        ctc_only=0.999, batch_seconds=60, max_seconds=6.0, learning_rate=1e-3, evaluate_every=100_000, augment=gentle
    )


def _moderate() -> AugmentConfig:
    return AugmentConfig(
        speed_range=0.1,
        gain_db=8,
        noise_probability=0.2,
        room_probability=0.1,
        join_probability=0.05,
        freq_mask_bins=10,
        time_mask_frames=20,
    )


def encoder() -> TrainConfig:
    """More CTC alone, on utterances up to 10 s and with more augmentation, after `warm_start`."""
    return TrainConfig(
        ctc_only=0.999,
        batch_seconds=60,
        max_seconds=10.0,
        spec_augment_from=0.3,
        evaluate_every=100_000,
        augment=_moderate(),
    )


def bundled() -> TrainConfig:
    """The bundled model, after `encoder`: CTC + MoChA with CTC-synchronous boundaries and quantity loss."""
    return TrainConfig(
        ctc_only=0.0,
        batch_seconds=60,
        max_seconds=6.0,
        warmup_steps=100,
        quantity_weight=0.5,
        spec_augment_from=0.999,
        noise_full_at=0.9,
        save_every=150,
        evaluate_every=600,
        average_last=3,
        augment=_moderate(),
    )


def path() -> TrainConfig:
    """CTC + decoder and attention along the CTC path: as fast as CTC alone, and p is taught to fire."""
    return TrainConfig(
        ctc_only=0.0,
        attention="path",
        batch_seconds=60,
        max_seconds=16.0,
        learning_rate=1.4e-3,
        warmup_steps=300,
        spec_augment_from=0.3,
        save_every=250,
        evaluate_every=100_000,
        average_last=5,
        augment=_moderate(),
    )


def further() -> TrainConfig:
    """More of `path` from its checkpoint, with --init: masked from the first step, augmented more, more noise."""
    stronger = AugmentConfig(noise_probability=0.3, room_probability=0.15, join_probability=0.1, time_mask_frames=25)
    return path().model_copy(
        update={"learning_rate": 1e-3, "spec_augment_from": 0.0, "noise_full_at": 0.0, "augment": stronger, "seed": 1}
    )


def plain() -> TrainConfig:
    """No augmentation and no warm start: for small experiments and tests."""
    off = AugmentConfig(
        speed_range=0,
        gain_db=0,
        noise_probability=0,
        room_probability=0,
        join_probability=0,
        freq_masks=0,
        time_masks=0,
    )
    return TrainConfig(ctc_only=0.0, augment=off, bf16=False)


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "warm_start": warm_start,
    "encoder": encoder,
    "bundled": bundled,
    "path": path,
    "further": further,
    "plain": plain,
}
