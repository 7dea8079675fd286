"""Named training configurations, one typed function each: the bundled model's, and corpora of hundreds of hours.

Those of the papers are in `paper_recipes`.
"""

from collections.abc import Callable
from typing import Any

from mocha_training.augment import AugmentConfig
from mocha_training.config import TrainConfig
from mocha_training.paper_recipes import timit, wsj_mocha, wsj_monotonic


def warm_start() -> TrainConfig:
    """The CTC branch alone on short, barely augmented utterances: the fastest way off the all-blank plateau.

    Give its checkpoint to `encoder` with --init.
    """
    gentle = AugmentConfig.nothing().having(speed_range=0.06, gain_db=(-6.0, 6.0), noise_probability=0.1)
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
    return path().having(learning_rate=1e-3, spec_augment_from=0.0, augment=stronger, seed=1)


def settle() -> TrainConfig:
    """The last part after `further`, with --init: augmented as `path`, from a lower rate down to nothing."""
    return path().having(learning_rate=8e-4, warmup_steps=100, spec_augment_from=0.0, seed=2)


def widen() -> TrainConfig:
    """After `settle`, with --init: synthetic speech beside the recorded, telephone lines and babble."""
    augment = _moderate().having(telephone_probability=0.08, babble_probability=0.15)
    return settle().having(learning_rate=1e-3, save_every=100, augment=augment, seed=3)


def longer() -> TrainConfig:
    """More of `widen`, with --init: batches twice as long, which a CPU gets through faster."""
    return widen().having(batch_seconds=120, learning_rate=1.2e-3, seed=4)


def onward() -> TrainConfig:
    """More of `longer`, with --init: Muon, longer batches, vocal tracts, codecs, longer joined speech."""
    augment = longer().augment.having(
        vocal_tract_range=0.1,
        join_probability=0.1,
        join_max_s=20.0,
        codec_probability=0.05,
        overload_probability=0.03,
    )
    return longer().having(muon=True, batch_seconds=240, learning_rate=2e-3, augment=augment, seed=5)


def broaden() -> TrainConfig:
    """More of `onward`, with --init: more rooms, codecs, vocal tracts, wider masks."""
    augment = onward().augment.having(
        vocal_tract_range=0.15,
        room_probability=0.2,
        codec_probability=0.1,
        freq_mask_bins=13,
        time_mask_frames=25,
    )
    return onward().having(augment=augment, seed=6)


def sampled() -> TrainConfig:
    """More of `broaden`, with --init: augmented as `onward`, and the decoder is given draws of its own."""
    return onward().having(sampling_probability=0.4, seed=7)


def consistent() -> TrainConfig:
    """More of `sampled`, with --init and grown with --preset medium: two views of an utterance are to be read alike."""
    return sampled().having(preset="medium", consistency_weight=0.2, seed=8)


def spliced() -> TrainConfig:
    """More of `consistent`, with --init: utterances with ends of others, more dropout, augmented as `broaden` and more.

    For a model that reads its own training speakers three times as well as others.
    """
    augment = broaden().augment.having(
        splice_probability=0.6, noise_probability=0.3, freq_mask_bins=15, time_mask_frames=30
    )
    return consistent().having(dropout=0.25, augment=augment, seed=9)


def restored() -> TrainConfig:
    """More of `spliced`, with --init: new voices, whose transcripts are longer and not all right; less of the rest.

    Beside the corpus, three times: recordings whose transcripts were restored (docs/experiments.md, "New voices").
    """
    augment = broaden().augment.having(splice_probability=0.5)
    return spliced().having(learning_rate=1.5e-3, dropout=0.2, max_seconds=17.5, augment=augment, seed=10)


def phonetic() -> TrainConfig:
    """More of `restored`, with --init: the layer below the last learns the phones of the words."""
    return restored().having(phone_weight=1.0, seed=11)


def microphones() -> TrainConfig:
    """More of `phonetic`, with --init: levels down to those of distant speech, and microphones that colour it."""
    augment = phonetic().augment.having(microphone_probability=0.5, gain_db=(-30.0, 10.0))
    return phonetic().having(learning_rate=8e-4, warmup_steps=100, augment=augment, seed=12)


def accented() -> TrainConfig:
    """More of `microphones`, with --init: beside recordings, new sentences that networks read, many with accents."""
    # Nothing is spliced, selections slip: docs/experiments.md, "Voices that are networks", "Selections that slip".
    augment = microphones().augment.having(splice_probability=0.0)
    return microphones().having(learning_rate=1e-3, batch_seconds=160, slip_probability=0.1, augment=augment, seed=23)


def paused() -> TrainConfig:
    """More of `accented`, with --init: there are seconds of silence or noise before, between and after utterances."""
    augment = accented().augment.having(pause_probability=0.25)
    return accented().having(learning_rate=1.2e-3, warmup_steps=40, batch_seconds=320, augment=augment, seed=71)


def rewarded() -> TrainConfig:
    """More of `paused`, with --init: the decoder's own decisions are judged by the errors that they lead to."""
    augment = paused().augment.having(music_probability=0.2)
    return paused().having(learning_rate=6e-4, warmup_steps=30, policy_weight=3.0, augment=augment, seed=81)


def ahead() -> TrainConfig:
    """More of `paused`, with --init: the encoder looks ahead, and the same recordings are heard as more voices.

    For a GPU: docs/experiments.md, "Looking ahead".
    """
    augment = paused().augment.having(
        music_probability=0.2, codec_probability=0.03, speed_range=0.15, vocal_tract_range=0.2
    )
    return paused().having(
        look_ahead=3,
        dropout=0.25,
        spec_augment_from=0.0,
        learning_rate=2e-3,
        warmup_steps=60,
        batch_seconds=2400,
        augment=augment,
        seed=112,
    )


def adapt() -> TrainConfig:
    """The bundled model, with --init, on recordings of other speakers, words or places: minutes on a CPU, and gently.

    The head of phones learns beside the encoder, for which it needs espeak-ng.
    """
    augment = settle().augment.having(pause_probability=0.25)
    return settle().having(phone_weight=1.0, slip_probability=0.1, augment=augment, seed=131)


def discriminative() -> TrainConfig:
    """The CTC head alone, after `ahead`, with --init: it learns to tell each transcript from all other texts.

    For searches with a language model (docs/experiments.md, "Told from all other texts"); minutes are enough. What the
    encoder knows by heart it will not know of others, so it is made to hear worse meanwhile: more dropout, wider masks.
    """
    augment = rewarded().augment.having(pause_probability=0.4, freq_mask_bins=18, time_masks=3, time_mask_frames=40)
    return microphones().having(
        train_encoder=False,
        dropout=0.4,
        ctc_only=1.0,
        denominator_weight=0.9,
        consistency_weight=0.0,
        phone_weight=0.0,
        muon=False,
        batch_seconds=60,
        learning_rate=1e-3,
        augment=augment,
        seed=17,
    )


def sounds() -> TrainConfig:
    """A head of phones alone, after all else, with --init: what searches ask how words sound (needs espeak-ng).

    It is told apart from all other texts, as the CTC head is by `discriminative`.
    """
    return discriminative().having(phone_weight=1.0, learning_rate=5e-3, seed=18)


def plain() -> TrainConfig:
    """No augmentation and no warm start: for small experiments and tests."""
    return TrainConfig(ctc_only=0.0, augment=AugmentConfig.nothing(), bf16=False)


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
        # None are joined: those of this corpus are long enough. But there may be pauses around them.
        augment=_moderate().having(
            join_probability=0.0,
            join_max_s=24.0,
            pause_probability=0.25,
            freq_mask_bins=13,
            time_mask_frames=50,
            noise_snr_db=(10.0, 30.0),
        ),
    )


def tedlium() -> TrainConfig:
    """TED-LIUM 3: half as much speech as LibriSpeech, hence more passes over it."""
    return librispeech().having(epochs=30)


def commonvoice() -> TrainConfig:
    """One language of Common Voice: short sentences, recorded with noise and in rooms as they are.

    The length suits a language of hundreds of hours; one of a few tens needs more `epochs` and less of a network.
    """
    augment = librispeech().augment.having(noise_probability=0.1, room_probability=0.05)
    return librispeech().having(augment=augment)


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        warm_start,
        encoder,
        expected,
        path,
        further,
        settle,
        widen,
        longer,
        onward,
        broaden,
        sampled,
        consistent,
        spliced,
        restored,
        phonetic,
        microphones,
        accented,
        paused,
        rewarded,
        ahead,
        adapt,
        discriminative,
        sounds,
        plain,
        librispeech,
        tedlium,
        commonvoice,
        timit,
        wsj_monotonic,
        wsj_mocha,
    )
}


def configured(recipe: str, changes: dict[str, Any]) -> TrainConfig:
    """A recipe with `changes` that are not None; `steps` replaces its `epochs` too. Raises ValueError."""
    if recipe not in RECIPES:
        raise ValueError(f"no recipe {recipe!r}; there are {', '.join(RECIPES)}")
    given = {name: value for name, value in changes.items() if value is not None}
    epochs = {} if changes["steps"] is None else {"epochs": 0.0}
    return TrainConfig.model_validate(RECIPES[recipe]().model_dump() | given | epochs)
