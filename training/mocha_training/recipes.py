"""Named training configurations: one typed function each. docs/recipes.md sets those of the papers beside them."""

import math
from collections.abc import Callable

from mocha_model.tokenizer import Units
from mocha_training.augment import AugmentConfig
from mocha_training.config import Preset, TrainConfig
from mocha_training.weights import Draw, InitConfig, WeightNoise


def warm_start() -> TrainConfig:
    """The CTC branch alone on short, barely augmented utterances: the fastest way off the all-blank plateau.

    Give its checkpoint to `encoder` with --init.
    """
    barely = {"speed_range": 0.06, "gain_db": (-6.0, 6.0), "noise_probability": 0.1}
    gentle = _no_augmentation().model_copy(update=barely)
    return TrainConfig(
        ctc_only=0.999, batch_seconds=60, max_seconds=6.0, learning_rate=1e-3, evaluate_every=100_000, augment=gentle
    )


def _moderate() -> AugmentConfig:
    return AugmentConfig(
        speed_range=0.1,
        gain_db=(-8, 8),
        noise_probability=0.2,
        room_probability=0.1,
        join_probability=0.05,
        freq_mask_bins=10,
        time_mask_frames=20,
    )


def encoder() -> TrainConfig:
    """More CTC alone, on utterances up to 10 s and with more augmentation, after `warm_start`; then comes `path`."""
    return TrainConfig(
        ctc_only=0.999,
        batch_seconds=60,
        max_seconds=10.0,
        spec_augment_from=0.3,
        evaluate_every=100_000,
        augment=_moderate(),
    )


def expected() -> TrainConfig:
    """The model of 0.1.0, after `encoder`: CTC + MoChA in expectation, CTC-synchronous boundaries, quantity loss."""
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
    """More of `path` from its checkpoint, with --init: masked from the first step, augmented more."""
    stronger = AugmentConfig(noise_probability=0.3, room_probability=0.15, join_probability=0.1, time_mask_frames=25)
    return path().model_copy(update={"learning_rate": 1e-3, "spec_augment_from": 0.0, "augment": stronger, "seed": 1})


def settle() -> TrainConfig:
    """The last part after `further`, with --init: augmented as `path`, from a lower rate down to nothing."""
    return path().model_copy(update={"learning_rate": 8e-4, "warmup_steps": 100, "spec_augment_from": 0.0, "seed": 2})


def widen() -> TrainConfig:
    """After `settle`, with --init: synthetic speech beside the recorded, telephone lines and babble."""
    augment = _moderate().model_copy(update={"telephone_probability": 0.08, "babble_probability": 0.15})
    return settle().model_copy(update={"learning_rate": 1e-3, "save_every": 100, "augment": augment, "seed": 3})


def longer() -> TrainConfig:
    """More of `widen`, with --init: batches twice as long, which a CPU gets through faster."""
    return widen().model_copy(update={"batch_seconds": 120, "learning_rate": 1.2e-3, "seed": 4})


def onward() -> TrainConfig:
    """More of `longer`, with --init: Muon, longer batches, vocal tracts, codecs, longer joined speech."""
    augment = longer().augment.model_copy(
        update={
            "vocal_tract_range": 0.1,
            "join_probability": 0.1,
            "join_max_s": 20.0,
            "codec_probability": 0.05,
            "overload_probability": 0.03,
        }
    )
    return longer().model_copy(
        update={"muon": True, "batch_seconds": 240, "learning_rate": 2e-3, "augment": augment, "seed": 5}
    )


def broaden() -> TrainConfig:
    """More of `onward`, with --init: more rooms, codecs, vocal tracts, wider masks."""
    augment = onward().augment.model_copy(
        update={
            "vocal_tract_range": 0.15,
            "room_probability": 0.2,
            "codec_probability": 0.1,
            "freq_mask_bins": 13,
            "time_mask_frames": 25,
        }
    )
    return onward().model_copy(update={"augment": augment, "seed": 6})


def sampled() -> TrainConfig:
    """More of `broaden`, with --init: augmented as `onward`, and the decoder is given draws of its own."""
    return onward().model_copy(update={"sampling_probability": 0.4, "seed": 7})


def consistent() -> TrainConfig:
    """More of `sampled`, with --init and grown with --preset medium: two views of an utterance are to be read alike."""
    return sampled().model_copy(update={"preset": "medium", "consistency_weight": 0.2, "seed": 8})


def spliced() -> TrainConfig:
    """More of `consistent`, with --init: utterances with ends of others, more dropout, augmented as `broaden` and more.

    For a model that reads its own training speakers three times as well as others.
    """
    augment = broaden().augment.model_copy(
        update={"splice_probability": 0.6, "noise_probability": 0.3, "freq_mask_bins": 15, "time_mask_frames": 30}
    )
    return consistent().model_copy(update={"dropout": 0.25, "augment": augment, "seed": 9})


def restored() -> TrainConfig:
    """More of `spliced`, with --init: new voices, whose transcripts are longer and not all right; less of the rest.

    Beside the corpus, three times: recordings whose transcripts were restored (docs/experiments.md, "New voices").
    """
    augment = broaden().augment.model_copy(update={"splice_probability": 0.5})
    return spliced().model_copy(
        update={"learning_rate": 1.5e-3, "dropout": 0.2, "max_seconds": 17.5, "augment": augment, "seed": 10}
    )


def phonetic() -> TrainConfig:
    """More of `restored`, with --init: the layer below the last learns the phones of the words."""
    return restored().model_copy(update={"phone_weight": 1.0, "seed": 11})


def microphones() -> TrainConfig:
    """More of `phonetic`, with --init: levels down to those of distant speech, and microphones that colour it."""
    augment = phonetic().augment.model_copy(update={"microphone_probability": 0.5, "gain_db": (-30.0, 10.0)})
    return phonetic().model_copy(update={"learning_rate": 8e-4, "warmup_steps": 100, "augment": augment, "seed": 12})


def accented() -> TrainConfig:
    """More of `microphones`, with --init: beside recordings, new sentences that networks read, many with accents."""
    # Nothing is spliced, selections slip: docs/experiments.md, "Voices that are networks", "Selections that slip".
    augment = microphones().augment.model_copy(update={"splice_probability": 0.0})
    changes = {"learning_rate": 1e-3, "batch_seconds": 160, "slip_probability": 0.1, "augment": augment, "seed": 23}
    return microphones().model_copy(update=changes)


def discriminative() -> TrainConfig:
    """The CTC head alone, after `accented`, with --init: it learns to tell each transcript from all other texts.

    For searches with a language model (docs/experiments.md, "Told from all other texts"); minutes are enough. What the
    encoder knows by heart it will not know of others, so it is made to hear worse meanwhile: more dropout, wider masks.
    """
    masks = {"freq_mask_bins": 18, "time_masks": 3, "time_mask_frames": 40}
    augment = microphones().augment.model_copy(update={"splice_probability": 0.0} | masks)
    return microphones().model_copy(
        update={
            "train_encoder": False,
            "dropout": 0.4,
            "ctc_only": 1.0,
            "denominator_weight": 0.9,
            "consistency_weight": 0.0,
            "phone_weight": 0.0,
            "muon": False,
            "batch_seconds": 60,
            "learning_rate": 1e-3,
            "augment": augment,
            "seed": 17,
        }
    )


def sounds() -> TrainConfig:
    """A head of phones alone, after all else, with --init: what searches ask how words sound (needs espeak-ng).

    It is told apart from all other texts, as the CTC head is by `discriminative`.
    """
    own = {"keep_phones": True, "phone_weight": 1.0, "learning_rate": 5e-3, "seed": 18}
    return discriminative().model_copy(update=own)


def _no_augmentation() -> AugmentConfig:
    return AugmentConfig(
        speed_range=0,
        gain_db=(0, 0),
        noise_probability=0,
        room_probability=0,
        join_probability=0,
        freq_masks=0,
        time_masks=0,
    )


def plain() -> TrainConfig:
    """No augmentation and no warm start: for small experiments and tests."""
    return TrainConfig(ctc_only=0.0, augment=_no_augmentation(), bf16=False)


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


def _as_published(
    preset: Preset,
    init: InitConfig,
    learning_rate: float,
    rate_drops: tuple[tuple[int, float], ...],
    steps: int,
    batch_utterances: int,
    clip: float,
    weight_noise: WeightNoise,
    neighbour_smoothing: tuple[float, ...] = (),
    units: Units = "characters",
    fold_phones: bool = False,
) -> TrainConfig:
    """What the papers' recipes share: Adam and L2, cross-entropy alone, full noise before the sigmoid from the start.

    And the checkpoint that does best on dev (Chiu & Raffel 2018, section 3).
    """
    return TrainConfig(
        preset=preset,
        init=init,
        units=units,
        fold_phones=fold_phones,
        steps=steps,
        batch_utterances=batch_utterances,
        bf16=False,
        learning_rate=learning_rate,
        rate_drops=rate_drops,
        warmup_steps=1,
        scalar_rate=1.0,
        betas=(0.9, 0.999),
        epsilon=1e-6,
        weight_decay=1e-6,
        decoupled_decay=False,
        weight_noise=weight_noise,
        clip=clip,
        ctc_only=0.0,
        ctc_weight=0.0,
        quantity_weight=0.0,
        latency_weight=0.0,
        label_smoothing=0.0,
        neighbour_smoothing=neighbour_smoothing,
        noise_std=1.0,
        noise_full_at=0.0,
        max_seconds=40.0,
        evaluate_every=2_000,
        save_every=1_000,
        final="best",
        augment=_no_augmentation(),
    )


def librispeech() -> TrainConfig:
    """LibriSpeech's 960 hours from nothing to the end: the CTC branch alone for 3 passes, then along its path."""
    return TrainConfig(
        preset="large",
        epochs=20,
        batch_seconds=400,
        learning_rate=1e-3,
        warmup_steps=2000,
        ctc_only=0.15,
        attention="path",
        spec_augment_from=0.05,
        evaluate_every=2000,
        average_last=5,
        # None are joined: those of this corpus are long enough.
        augment=_moderate().model_copy(
            update={"join_probability": 0.0, "freq_mask_bins": 13, "time_mask_frames": 50, "noise_snr_db": (10.0, 30.0)}
        ),
    )


def tedlium() -> TrainConfig:
    """TED-LIUM 3: half as much speech as LibriSpeech, hence more passes over it."""
    return librispeech().model_copy(update={"epochs": 30})


def commonvoice() -> TrainConfig:
    """One language of Common Voice: short sentences, recorded with noise and in rooms as they are.

    The length suits a language of hundreds of hours; one of a few tens needs more `epochs` and less of a network.
    """
    augment = librispeech().augment.model_copy(update={"noise_probability": 0.1, "room_probability": 0.05})
    return librispeech().model_copy(update={"augment": augment})


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "warm_start": warm_start,
    "encoder": encoder,
    "expected": expected,
    "path": path,
    "further": further,
    "settle": settle,
    "widen": widen,
    "longer": longer,
    "onward": onward,
    "broaden": broaden,
    "sampled": sampled,
    "consistent": consistent,
    "spliced": spliced,
    "restored": restored,
    "phonetic": phonetic,
    "microphones": microphones,
    "accented": accented,
    "discriminative": discriminative,
    "sounds": sounds,
    "plain": plain,
    "librispeech": librispeech,
    "tedlium": tedlium,
    "commonvoice": commonvoice,
    "timit": timit,
    "wsj_monotonic": wsj_monotonic,
    "wsj_mocha": wsj_mocha,
}
