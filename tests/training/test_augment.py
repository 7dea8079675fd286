"""Augmentation: each distortion against what it claims, and examples that depend on nothing but their seed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torchaudio.functional import fftconvolve

from mocha_model.checkpoint import load_checkpoint
from mocha_model.config import FeatureConfig
from mocha_model.features import LogMel
from mocha_model.tokenizer import Tokenizer
from mocha_training.augment import AugmentConfig, Augmenter
from mocha_training.data import Corpus
from mocha_training.distortion import (
    Audio,
    Codec,
    add_noise,
    change_speed,
    change_tempo,
    chords,
    over_telephone,
    overload,
    reverberate,
    room_response,
    through_codec,
    through_microphone,
)
from mocha_training.manifests import Utterance, decode_audio
from mocha_training.spectral import spec_augment, warp_vocal_tract
from mocha_training.splicing import SplicePoint, ctc_forward, find_splice_points, kept_splice_points, middles

FIXTURES = Path(__file__).parents[1] / "fixtures"
NOTHING = AugmentConfig(speed_range=0, join_probability=0, room_probability=0, noise_probability=0, gain_db=(0, 0))
SECOND = np.arange(16_000) / 16_000


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Two recordings of two sentences."""
    files = tuple(decode_audio((FIXTURES / f"{name}.wav").read_bytes(), name) for name in ("weather", "suit"))
    texts = (
        "the weather is fine today and we are going to the river",
        "she had your dark suit in greasy wash water all year",
    )
    return Corpus(tuple(Utterance(str(n), texts[n], "s", "c", 0, len(file), n) for n, file in enumerate(files)), files)


def tones(*hertz: float, amplitude: float = 0.3) -> Audio:
    """A second of sine waves."""
    return np.sum([amplitude * np.sin(2 * np.pi * f * SECOND) for f in hertz], axis=0).astype(np.float32)


def strengths(audio: Audio, *hertz: int) -> list[float]:
    """Amplitudes of tones in a second of audio."""
    return [float(a) for a in np.abs(np.fft.rfft(audio))[list(hertz)] * 2 / 16_000]  # a bin is a hertz


def loudest_hertz(audio: Audio) -> float:
    return float(np.abs(np.fft.rfft(audio)).argmax() * 16_000 / len(audio))


def test_an_example_depends_only_on_its_seed(corpus: Corpus):
    config = AugmentConfig(
        tempo_range=0.1, noise_probability=1, room_probability=1, join_probability=0.9, join_max_s=30,
        microphone_probability=1, overload_probability=1, telephone_probability=1, codec_probability=1,
    )  # fmt: skip
    augmenter = Augmenter(config, corpus, corpus)

    def example(seed: int) -> tuple[Audio, str]:
        rng = np.random.default_rng(seed)
        return augmenter.make(augmenter.draw(0, rng), rng)

    (a, text), (b, _), (c, _) = map(example, (3, 3, 4))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert a.dtype == np.float32 and np.abs(a).max() <= 1
    assert text.startswith("the weather is fine today ")


def test_an_example_is_as_long_as_was_drawn(corpus: Corpus):
    config = NOTHING.model_copy(
        update={"speed_range": 0.2, "tempo_range": 0.2, "join_probability": 0.8, "join_max_s": 20.0}
    )
    augmenter, rng = Augmenter(config, corpus), np.random.default_rng(0)
    examples = [augmenter.draw(n % 2, rng) for n in range(30)]
    for example in examples:
        audio, text = augmenter.make(example, rng)
        assert len(audio) / 16_000 == pytest.approx(example.seconds, abs=0.05 * len(example.parts))
        assert text == " ".join(corpus.utterances[part.index].text for part in example.parts)
    assert max(e.seconds for e in examples) <= 20 and max(len(e.parts) for e in examples) > 2


def tonality(audio: Audio) -> float:
    """How much of the power, from 60 Hz on, the strongest twentieth of the bins of half a second has; the mean."""
    moments = audio[: len(audio) // 8_000 * 8_000].reshape(-1, 8_000) * np.hanning(8_000)
    power = np.sort(np.abs(np.fft.rfft(moments)[:, 30:]) ** 2)
    return float(np.mean(power[:, -power.shape[1] // 20 :].sum(1) / power.sum(1)))


def test_chords_stand_in_for_other_noise(corpus: Corpus):
    music = chords(10 * 16_000, np.random.default_rng(0))
    assert music.shape == (160_000,) and music.dtype == np.float32 and tonality(music) > 0.95
    for probability in (0.0, 1.0):
        changes = {"noise_probability": 1.0, "noise_snr_db": (-40.0, -40.0), "music_probability": probability}
        augmenter, rng = Augmenter(NOTHING.model_copy(update=changes), corpus), np.random.default_rng(4)
        audio = [augmenter.make(augmenter.draw(0, rng), rng)[0] for _ in range(8)]
        shares = [tonality(each) for each in audio]
        assert all((share > 0.9) == bool(probability) for share in shares), shares


def test_long_pauses_before_between_and_after_are_silent_or_no_louder_than_what_is_said(corpus: Corpus):
    config = NOTHING.model_copy(update={"join_probability": 0.5, "join_max_s": 20.0, "pause_probability": 1.0})
    augmenter, rng = Augmenter(config, corpus, corpus), np.random.default_rng(0)
    places, levels = set[str](), list[float]()
    for n in range(60):
        example = augmenter.draw(n % 2, rng)
        audio, text = augmenter.make(example, rng)
        assert example.seconds <= 20 and len(audio) / 16_000 == pytest.approx(example.seconds, abs=0.01)
        assert text == " ".join(corpus.utterances[part.index].text for part in example.parts)
        longest = int(np.argmax(example.pauses))
        if example.pauses[longest] < 0.7:
            continue  # there was no room for a long one
        place = "before" if longest == 0 else "after" if longest == len(example.parts) else "between"
        start = sum(part.seconds for part in example.parts[:longest]) + sum(example.pauses[:longest])
        pause = audio[int(start * 16_000) + 8 : int((start + example.pauses[longest]) * 16_000) - 8]
        said = np.concatenate([corpus.audio(part.index) for part in example.parts])
        places.add(place)
        levels.append(float(np.sqrt(np.mean(pause**2) / np.mean(said**2))))
    assert places == {"before", "between", "after"}
    assert max(levels) <= 1.1 and min(levels) == 0 and len([x for x in levels if 0 < x < 0.1]) > 5


def two_sentences_in_one(corpus: Corpus) -> Corpus:
    """Both recordings of `corpus` with a pause between them, the second time the other way round.

    And the first once more, by another speaker.
    """
    pause = np.zeros(6_400, np.int16)
    audio = [np.concatenate([corpus.pcm(a), pause, corpus.pcm(b)]) for a, b in ((0, 1), (1, 0))]
    texts = [f"{corpus.utterances[a].text} {corpus.utterances[b].text}" for a, b in ((0, 1), (1, 0))]
    both = [Utterance(str(n), texts[n], "s", "c", 0, len(audio[n]), n) for n in range(2)]
    return Corpus((*both, replace(both[0], key="2", speaker="t")), tuple(audio))


def test_splice_points_are_in_pauses_between_words_that_are_known(corpus: Corpus, tmp_path: Path):
    start, longer = load_checkpoint(), two_sentences_in_one(corpus)
    kept = tmp_path / "run" / "points.json"
    points = kept_splice_points(kept, start.model, start.tokenizer, longer)
    for n, words in enumerate((12, 11)):
        pause = len(corpus.pcm(n))
        (between,) = [point.at for point in points[n] if point.words == words]
        assert pause - 4_000 < between < pause + 10_400  # with the quiet at the end of one, the beginning of the other
    assert points[2] == points[0] and kept_splice_points(kept, start.model, start.tokenizer, longer) == points
    renamed = Corpus((*longer.utterances[:2], replace(longer.utterances[2], text="something else")), longer.files)
    with pytest.raises(ValueError, match="found in another corpus"):
        kept_splice_points(kept, start.model, start.tokenizer, renamed)


def test_there_is_no_splice_point_with_words_on_one_side_alone(corpus: Corpus):
    start, speech = load_checkpoint(), corpus.pcm(1)
    pause, knock = np.zeros(6_400, np.int16), (32_767 * tones(300)[:3_200]).astype(np.int16)
    then_a_knock = np.concatenate([speech, pause, knock, pause])
    assert len(speech) < middles(then_a_knock)[-1] < len(speech) + 6_400
    knocked = replace(corpus.utterances[1], num_samples=len(then_a_knock), file=0)
    (points,) = find_splice_points(start.model, start.tokenizer, Corpus((knocked,), (then_a_knock,)))
    assert all(point.at < len(speech) for point in points)
    phones = Tokenizer.from_texts(["aa b"], "words")
    with pytest.raises(ValueError, match="words that are spelled"):
        find_splice_points(start.model, phones, corpus)


def test_ctc_forward_is_the_likelihood_of_every_beginning():
    torch.manual_seed(0)
    log_probs, num_frames = torch.randn(3, 20, 8).log_softmax(2), torch.tensor([20, 13, 5])
    tokens = torch.tensor([[4, 4, 5, 4], [7, 5, 5, 5], [6, 6, 6, 4]])  # the last: too short for three of the same
    found = ctc_forward(log_probs, num_frames, tokens)
    for n in range(5):
        expected = -torch.nn.functional.ctc_loss(
            log_probs.transpose(0, 1), tokens, num_frames, torch.full((3,), n), reduction="none"
        )
        torch.testing.assert_close(found[:, n], expected)
    assert found[2, 4] == -torch.inf and found[:, :3].isfinite().all()


def test_a_spliced_example_begins_as_one_utterance_and_ends_as_another_of_its_speaker(corpus: Corpus):
    longer = two_sentences_in_one(corpus)
    first, second = (int(len(corpus.pcm(n)) + 3_200) for n in range(2))
    points = [(SplicePoint(first, 12),), (SplicePoint(second, 11),), (SplicePoint(first, 12),)]
    config = NOTHING.model_copy(update={"splice_probability": 1.0})
    augmenter, rng = Augmenter(config, longer, splice_points=points), np.random.default_rng(0)
    example = augmenter.draw(0, rng)
    audio, text = augmenter.make(example, rng)
    assert len(audio) / 16_000 == pytest.approx(example.seconds)
    assert text == f"{corpus.utterances[0].text} {corpus.utterances[0].text}"
    assert np.array_equal(audio, np.concatenate([longer.audio(0)[:first], longer.audio(1)[second:]]))
    assert len(augmenter.draw(2, rng).parts) == 1  # this speaker has no other
    never = config.model_copy(update={"splice_probability": 0.0})
    assert len(replace(augmenter, config=never).draw(0, rng).parts) == 1
    # Nor when that would be too long: the end of the second begins early, the first ends late.
    late = [(SplicePoint(longer.utterances[0].num_samples - 160, 22),), (SplicePoint(160, 1),), ()]
    for longest, parts in ((12.0, 1), (15.0, 2)):
        bounded = config.model_copy(update={"join_max_s": longest})
        assert len(Augmenter(bounded, longer, splice_points=late).draw(0, rng).parts) == parts


def test_nothing_is_changed_where_everything_is_off(corpus: Corpus):
    rng = np.random.default_rng(0)
    augmenter = Augmenter(NOTHING, corpus)
    assert np.array_equal(augmenter.make(augmenter.draw(1, rng), rng)[0], corpus.audio(1))


def test_speed_moves_the_pitch_and_tempo_does_not():
    tone = tones(440)
    for change, expected in ((change_speed, 550), (change_tempo, 440)):
        faster = change(tone, 1.25)
        assert abs(len(faster) - 12_800) < 400 and faster.dtype == np.float32
        assert loudest_hertz(faster) == pytest.approx(expected, abs=6)


def test_speed_changes_recordings_of_any_length():
    ends_at_its_last_step = np.ones(35_904, np.float32)  # 35,903 / 1.15 is whole, but for rounding
    assert len(change_speed(ends_at_its_last_step, 1.15)) == 31_221
    for length in range(4):
        assert len(change_speed(np.ones(length, np.float32), 0.9)) <= length + 1


def test_noise_has_the_ratio_asked_for():
    tone, rng = tones(440), np.random.default_rng(0)
    noise = add_noise(tone, rng.standard_normal(5000).astype(np.float32), 10.0, rng) - tone
    assert 10 * np.log10(np.mean(tone**2) / np.mean(noise**2)) == pytest.approx(10, abs=0.1)


def test_rooms_begin_with_the_direct_sound_and_die_away():
    responses = [room_response(number) for number in range(8)]
    click = np.zeros(16_000, np.float32)
    click[100] = 0.5
    for response in responses:
        assert np.abs(response).argmax() == 0 and np.sum(response**2) == pytest.approx(1, rel=1e-4)
        late = response[len(response) * 3 // 4 :]
        assert np.sum(late**2) < 0.02
        heard = reverberate(click, response)
        assert len(heard) == len(click) and np.abs(heard).argmax() == 100
    reverberant = [float(np.sum(r[800:] ** 2)) for r in responses]  # after 50 ms
    assert min(reverberant) < 0.1 and max(reverberant) > 0.3, "rooms differ"


def test_microphones_hear_some_pitches_louder_and_all_as_loud_as_before():
    sound = tones(100, 300, 550, 1000, amplitude=0.05)
    for seed in range(8):
        heard = through_microphone(sound, np.random.default_rng(seed))
        assert heard.dtype == np.float32 and len(heard) == len(sound)
        assert np.mean(heard**2) == pytest.approx(np.mean(sound**2), rel=1e-3)
        drawn = np.random.default_rng(seed).uniform(-10, 10, 5)
        response = 20 * np.log10(strengths(heard, 100, 300, 550, 1000))
        half_way = np.log(550 / 300) / np.log(1000 / 300)  # along the line from 300 Hz to 1 kHz
        expected = [*drawn[:2], drawn[1] + half_way * (drawn[2] - drawn[1]), drawn[2]]
        assert np.diff(response) == pytest.approx(np.diff(expected), abs=0.2)


def test_levels_are_drawn_from_the_range(corpus: Corpus):
    augmenter = Augmenter(NOTHING.model_copy(update={"gain_db": (-30.0, -10.0)}), corpus)
    example = augmenter.draw(0, np.random.default_rng(0))
    gains = []
    for seed in range(40):
        soft = augmenter.make(example, np.random.default_rng(seed))[0]
        gains.append(20 * np.log10(np.abs(soft).max() / np.abs(corpus.audio(0)).max()))
    assert -30 <= min(gains) < -28 and -12 < max(gains) <= -10
    for name in ("gain_db", "noise_snr_db"):
        with pytest.raises(ValueError, match="lowest and the highest"):
            AugmentConfig.model_validate({name: (10, -10)})


def test_a_telephone_line_keeps_its_band_only():
    heard = [over_telephone(tones(100, 1000, 6000), np.random.default_rng(seed)) for seed in range(8)]
    power = [strengths(line, 100, 1000, 6000) for line in heard]
    assert all(line.dtype == np.float32 and np.abs(line).max() <= 1 for line in heard)
    assert all(p[1] == pytest.approx(0.3, rel=0.05) and p[2] < 0.02 * 0.3 for p in power)
    assert len({bool(p[0] > 0.15) for p in power}) == 2, "the lower edge is drawn anew for each line"
    assert len(np.unique(heard[0])) <= 256


@pytest.mark.parametrize(("codec", "bit_rate", "highest"), [("opus", 24_000, 7000), ("amr", 12_200, 3000)])
def test_codecs_keep_speech_in_its_place(codec: Codec, bit_rate: int, highest: int, corpus: Corpus):
    speech = corpus.audio(0)
    heard = through_codec(speech, codec, bit_rate)
    assert len(heard) == len(speech) and heard.dtype == np.float32 and not np.array_equal(heard, speech)
    like = fftconvolve(torch.from_numpy(heard), torch.from_numpy(speech).flip(0))
    assert abs(int(like.argmax()) - (len(speech) - 1)) < 100, "later or earlier by 6 ms or more"
    assert float(like.max()) / float(np.linalg.norm(heard) * np.linalg.norm(speech)) > 0.8
    spectrum = np.abs(np.fft.rfft(heard))
    hertz = np.fft.rfftfreq(len(heard), 1 / 16_000)
    share = float((spectrum[hertz > 4000] ** 2).sum() / (spectrum**2).sum())
    assert (share > 1e-4) == (highest > 4000), "AMR carries nothing above 4 kHz, Opus does"


def test_overload_cuts_off_the_share_asked_for(corpus: Corpus):
    speech = corpus.audio(0)
    cut = overload(speech, 0.02)
    assert np.mean(cut != speech) == pytest.approx(0.02, abs=0.002)
    assert np.mean(np.abs(cut) == np.abs(cut).max()) >= 0.02


def test_babble_is_other_utterances(corpus: Corpus):
    config = NOTHING.model_copy(update={"noise_probability": 1.0, "babble_probability": 1.0})
    augmenter = Augmenter(config, corpus)
    example = augmenter.draw(0, np.random.default_rng(0))
    noisy = augmenter.make(example, np.random.default_rng(1))[0]
    noise = torch.from_numpy(noisy - corpus.audio(0))
    voices = [torch.from_numpy(corpus.audio(i).copy()) for i in range(len(corpus.utterances))]
    likeness = max(fftconvolve(noise, v.flip(0)).abs().max() / (noise.norm() * v.norm()) for v in voices)
    assert likeness > 0.2, "no utterance of the corpus is in the noise"


def test_a_vocal_tract_moves_formants_by_its_factor():
    config = FeatureConfig()
    features, generator = LogMel(config), torch.Generator().manual_seed(0)
    frames = features(torch.from_numpy(np.tile(tones(1000), (64, 1))), torch.full((64,), 16_000))[0]
    assert torch.allclose(warp_vocal_tract(frames, config, 0.0, generator), frames, atol=1e-3)
    warped = warp_vocal_tract(frames, config, 0.2, generator)
    bands = warped[:, 50].argmax(1)
    centres = features.mel.argmax(0) * 16_000 / 512
    assert warped.shape == frames.shape and len(bands.unique()) > 4
    # A band takes what is at its own frequency times the factor: a tone of 1 kHz is found at 1 kHz / factor.
    assert centres[bands].min() == pytest.approx(1000 / 1.2, abs=60)
    assert centres[bands].max() == pytest.approx(1000 / 0.8, abs=60)
    assert torch.equal(
        warp_vocal_tract(frames, config, 0.1, torch.Generator().manual_seed(5)),
        warp_vocal_tract(frames, config, 0.1, torch.Generator().manual_seed(5)),
    )


def test_a_vocal_tract_leaves_the_highest_band_and_differences_follow_it():
    config = FeatureConfig(num_mels=40, energy=True, deltas=True)
    ramp = torch.arange(float(config.num_mels))
    energy = torch.tensor([7.0])
    frames = torch.cat([ramp, energy] * 3).expand(50, 10, -1)
    warped = warp_vocal_tract(frames, config, 0.2, torch.Generator().manual_seed(0))
    maps = warped.unflatten(2, (3, config.num_bands))
    assert torch.equal(maps[:, :, 0], maps[:, :, 1]) and torch.equal(maps[..., -1], torch.full((50, 10, 3), 7.0))
    assert bool((maps[..., 1:40] > maps[..., :39]).float().mean() > 0.95), "the order of frequencies stays"
    moved = (maps[:, 0, 0, :40] - ramp).abs()
    assert moved[:, 39].max() < 1 and moved[:, 20].max() > 1


def test_masks_hide_part_of_the_features():
    frames = torch.ones(4, 200, 80)
    masked = spec_augment(frames, AugmentConfig(), torch.Generator().manual_seed(0))
    assert 0 < (masked == 0).float().mean() < 0.6
    assert torch.equal(masked, spec_augment(frames, AugmentConfig(), torch.Generator().manual_seed(0)))
