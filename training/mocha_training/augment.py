"""What a training example is made of: utterances, how they are spoken, and what distorts them; drawn, then made.

Seeded, every kind switchable. The distortions themselves are in `distortion` and, for features, `spectral`; knows
nothing of batches or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from mocha_model.config import SAMPLE_RATE
from mocha_training import distortion
from mocha_training.data import Corpus
from mocha_training.distortion import Audio
from mocha_training.settings import Settings
from mocha_training.splicing import SplicePoint

AMR_BIT_RATES = (4750, 5900, 7950, 12200)
OPUS_BIT_RATES = (6_000, 10_000, 16_000, 24_000)
JOIN_PAUSE_S = (0.1, 0.6)
LONG_PAUSE_S = (0.7, 8.0)
PAUSE_NOISE_DB = (-60.0, 0.0)  # beside what is said


class AugmentConfig(Settings):
    """How often and how strongly; 0 switches a kind off. A range r is of factors drawn from 1 - r ... 1 + r."""

    speed_range: float = Field(0.12, ge=0, lt=0.5, description="of rate, pitch and formants together")
    tempo_range: float = Field(0.0, ge=0, lt=0.5, description="of the rate alone")
    vocal_tract_range: float = Field(0.0, ge=0, lt=0.5, description="of the formants alone")
    join_probability: float = Field(0.08, ge=0, le=1, description="append another utterance after a pause, and so on")
    join_max_s: float = Field(12.0, ge=0, description="how long that, or long pauses, may make an example")
    splice_probability: float = Field(
        0.0, ge=0, le=1, description="that an utterance with a pause ends as another of its speaker with one does"
    )
    pause_probability: float = Field(
        0.0, ge=0, le=1, description="seconds before, after or between utterances in which nothing is said, or noise is"
    )
    room_probability: float = Field(0.2, ge=0, le=1)
    noise_probability: float = Field(0.4, ge=0, le=1)
    noise_snr_db: tuple[float, float] = (5.0, 30.0)
    babble_probability: float = Field(
        0.0, ge=0, le=1, description="that the noise, where there is some, is other utterances"
    )
    music_probability: float = Field(
        0.0, ge=0, le=1, description="that noise which is not babble, in pauses too, is chords"
    )
    overload_probability: float = Field(0.0, ge=0, le=1, description="cut off the loudest 0.1 to 5 % of samples")
    telephone_probability: float = Field(0.0, ge=0, le=1, description="the band and the quantisation of a telephone")
    codec_probability: float = Field(0.0, ge=0, le=1, description="Opus or, in one of four, AMR, at low bit rates")
    microphone_probability: float = Field(0.0, ge=0, le=1, description="a microphone that hears some pitches louder")
    gain_db: tuple[float, float] = Field(
        (-10.0, 10.0), description="least and most that it is made louder by; 0, 0 for off"
    )
    freq_masks: int = Field(2, ge=0)
    freq_mask_bins: int = Field(13, ge=0)
    time_masks: int = Field(2, ge=0)
    time_mask_frames: int = Field(30, ge=0)

    @classmethod
    def nothing(cls) -> Self:
        """Every kind switched off."""
        return cls(
            speed_range=0,
            gain_db=(0, 0),
            noise_probability=0,
            room_probability=0,
            join_probability=0,
            freq_masks=0,
            time_masks=0,
        )

    @model_validator(mode="after")
    def _ranges_rise(self) -> Self:
        if self.gain_db[0] > self.gain_db[1] or self.noise_snr_db[0] > self.noise_snr_db[1]:
            raise ValueError("gain_db and noise_snr_db are the lowest and the highest, in this order")
        return self


@dataclass(frozen=True)
class Part:
    """Samples `start` to `stop` of utterance `index` of a corpus, in which `text` is said.

    They are played `speed` times as fast and high, then `tempo` times as fast.
    """

    index: int
    start: int
    stop: int
    text: str
    speed: float
    tempo: float

    @property
    def seconds(self) -> float:
        """How long it is, when played."""
        return (self.stop - self.start) / SAMPLE_RATE / self.speed / self.tempo


@dataclass(frozen=True)
class Example:
    """What an example is made of, drawn before it is made: batches are of examples of like lengths.

    Attributes:
        parts: what is spoken, in this order.
        pauses: seconds before the first, between them and after the last, so one more than there are parts.
        seconds: how long it will be.

    """

    parts: tuple[Part, ...]
    pauses: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class Augmenter:
    """Applies `config` to recordings of `corpus`, with recorded noises where there are any.

    `splice_points` are those of each utterance (`splicing.find_splice_points`), where utterances are to be spliced.
    """

    config: AugmentConfig
    corpus: Corpus
    noises: Corpus | None = None
    splice_points: Sequence[tuple[SplicePoint, ...]] = ()

    def draw(self, index: int, rng: np.random.Generator) -> Example:
        """How utterance `index` is spoken, how it goes on, and what is said after it."""
        c, parts = self.config, [self._part(index, rng)]
        if self.splice_points and self.splice_points[index] and rng.random() < c.splice_probability:
            parts = self._spliced(parts[0], rng)
        pauses = [0.0] * len(parts)
        seconds = sum(part.seconds for part in parts)
        while rng.random() < c.join_probability:
            more, pause = self._part(int(rng.integers(len(self.corpus.utterances))), rng), rng.uniform(*JOIN_PAUSE_S)
            longer = seconds + pause + more.seconds
            if longer > c.join_max_s:
                break
            seconds = longer
            parts.append(more)
            pauses.append(pause)
        pauses.append(0.0)
        if c.pause_probability and rng.random() < c.pause_probability:
            place, pause = int(rng.integers(len(pauses))), rng.uniform(*LONG_PAUSE_S)
            longer = seconds - pauses[place] + pause
            if longer <= c.join_max_s:
                pauses[place], seconds = pause, longer
        return Example(tuple(parts), tuple(pauses), seconds)

    def make(self, example: Example, rng: np.random.Generator) -> tuple[Audio, str]:
        """The augmented recording and its transcript; the same for the same state of `rng`."""
        c = self.config
        said = [self._spoken(part) for part in example.parts]
        pieces = [self._pause(example.pauses[0], said, rng)]
        for more, pause in zip(said, example.pauses[1:], strict=True):
            pieces += [more, self._pause(pause, said, rng)]
        audio = np.concatenate(pieces)
        if rng.random() < c.room_probability:
            audio = distortion.reverberate(audio, distortion.room_response(int(rng.integers(distortion.NUM_ROOMS))))
        if rng.random() < c.noise_probability:
            audio = distortion.add_noise(audio, self._noise(rng), rng.uniform(*c.noise_snr_db), rng)
        # Where there are none nothing is drawn, so that runs without them stay what they were.
        if c.microphone_probability and rng.random() < c.microphone_probability:
            audio = distortion.through_microphone(audio, rng)
        if rng.random() < c.overload_probability:
            audio = distortion.overload(audio, 10 ** rng.uniform(-3, -1.3))
        if rng.random() < c.telephone_probability:
            audio = distortion.over_telephone(audio, rng)
        if rng.random() < c.codec_probability:
            audio = _coded(audio, rng)
        audio = audio * np.float32(10 ** (rng.uniform(*c.gain_db) / 20))
        return np.clip(audio, -1, 1), " ".join(part.text for part in example.parts)

    def _part(self, index: int, rng: np.random.Generator) -> Part:
        speed, tempo = 1 + rng.uniform(-1, 1, size=2) * (self.config.speed_range, self.config.tempo_range)
        utterance = self.corpus.utterances[index]
        return Part(index, 0, utterance.num_samples, utterance.text, float(speed), float(tempo))

    def _spliced(self, whole: Part, rng: np.random.Generator) -> list[Part]:
        """`whole` up to a splice point, then another utterance by the speaker from one on; `whole` if there is none.

        Nor are they spliced if that would be longer than both `whole` and what utterances are joined to.
        """
        alike = self._spliceable[self._speaker(whole.index)]
        if len(alike) == 1:
            return [whole]
        drawn = int(rng.integers(len(alike) - 1))
        other = alike[drawn] if alike[drawn] < whole.index else alike[drawn + 1]  # they are in order
        until, since = (p[rng.integers(len(p))] for p in (self.splice_points[i] for i in (whole.index, other)))
        end = self.corpus.utterances[other]
        spliced = [
            replace(whole, stop=until.at, text=" ".join(whole.text.split()[: until.words])),
            replace(
                whole,
                index=other,
                start=since.at,
                stop=end.num_samples,
                text=" ".join(end.text.split()[since.words :]),
            ),
        ]
        longest = max(self.config.join_max_s, whole.seconds)
        return spliced if sum(part.seconds for part in spliced) <= longest else [whole]

    @cached_property
    def _spliceable(self) -> dict[tuple[str, str], list[int]]:
        """Utterances with splice points, by speaker; of those whose speaker is not known each is alone."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, points in enumerate(self.splice_points):
            if points:
                found.setdefault(self._speaker(index), []).append(index)
        return found

    def _speaker(self, index: int) -> tuple[str, str]:
        utterance = self.corpus.utterances[index]
        return utterance.corpus, utterance.speaker or f"of {index} alone"

    def _spoken(self, part: Part) -> Audio:
        audio = self.corpus.audio(part.index)[part.start : part.stop]
        return distortion.change_tempo(distortion.change_speed(audio, part.speed), part.tempo)

    def _pause(self, seconds: float, said: list[Audio], rng: np.random.Generator) -> Audio:
        """Where nothing is said: if for long, silence or noise, at most as loud as what is `said` in the example."""
        length = int(seconds * SAMPLE_RATE)
        if seconds < LONG_PAUSE_S[0]:
            return (rng.standard_normal(length) * 1e-4).astype(np.float32)
        if rng.random() < 0.3:
            return np.zeros(length, np.float32)
        noise, speech = self._background(rng), np.concatenate(said)
        level = float(np.sqrt(np.mean(speech**2)) * 10 ** (rng.uniform(*PAUSE_NOISE_DB) / 20))
        return distortion.repeated(noise, length, level, rng)

    def _noise(self, rng: np.random.Generator) -> Audio:
        return self._babble(rng) if rng.random() < self.config.babble_probability else self._background(rng)

    def _background(self, rng: np.random.Generator) -> Audio:
        if self.config.music_probability and rng.random() < self.config.music_probability:
            return distortion.chords(10 * SAMPLE_RATE, rng)
        if self.noises is None or rng.random() < 0.3:
            return distortion.coloured_noise(2 * SAMPLE_RATE, rng)
        noise = self.noises.audio(int(rng.integers(len(self.noises.utterances))))
        return noise if len(noise) >= 160 else distortion.coloured_noise(2 * SAMPLE_RATE, rng)

    def _babble(self, rng: np.random.Generator) -> Audio:
        """Three to seven other utterances at once, as long as the longest."""
        voices = [self.corpus.audio(int(rng.integers(len(self.corpus.utterances)))) for _ in range(rng.integers(3, 8))]
        babble = np.zeros(max(map(len, voices)), np.float32)
        for voice in voices:
            babble[: len(voice)] += voice / (np.sqrt(np.mean(voice**2)) + 1e-6)
        return babble


def _coded(audio: Audio, rng: np.random.Generator) -> Audio:
    if rng.random() < 0.25:
        return distortion.through_codec(audio, "amr", int(rng.choice(AMR_BIT_RATES)))
    return distortion.through_codec(audio, "opus", int(rng.choice(OPUS_BIT_RATES)))
