"""Waveform and feature augmentation: speed, rooms, noise, telephone lines, gain, joined utterances, SpecAugment.

Seeded, switchable. Works on one recording at a time in numpy; knows nothing of batches or models.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torchaudio.functional import mu_law_decoding, mu_law_encoding

from mocha_model.config import SAMPLE_RATE
from mocha_training.data import Corpus

Audio = NDArray[np.float32]


class AugmentConfig(BaseModel):
    """How often and how strongly; a probability of 0 switches a kind off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    speed_range: float = Field(0.12, ge=0, lt=0.5, description="factor drawn from 1 - r ... 1 + r; changes pitch too")
    gain_db: float = Field(10.0, ge=0, description="level drawn from -g ... +g dB")
    noise_probability: float = Field(0.4, ge=0, le=1)
    noise_snr_db: tuple[float, float] = (5.0, 30.0)
    room_probability: float = Field(0.2, ge=0, le=1)
    room_decay_s: tuple[float, float] = (0.1, 0.5)
    telephone_probability: float = Field(0.0, ge=0, le=1, description="the band and the quantisation of a telephone")
    babble_probability: float = Field(
        0.0, ge=0, le=1, description="that the noise, where there is some, is other utterances"
    )
    join_probability: float = Field(0.08, ge=0, le=1, description="append another utterance after a pause")
    join_max_s: float = 12.0
    freq_masks: int = 2
    freq_mask_bins: int = 13
    time_masks: int = 2
    time_mask_frames: int = 30


def change_speed(audio: Audio, factor: float) -> Audio:
    """Play `factor` times as fast, by linear interpolation."""
    if abs(factor - 1) < 1e-3:
        return audio
    at = np.arange(0, len(audio) - 1, factor, dtype=np.float64)
    return np.interp(at, np.arange(len(audio)), audio).astype(np.float32)


def _convolve(audio: Audio, kernel: Audio) -> Audio:
    size = 1 << (len(audio) + len(kernel) - 1).bit_length()
    y = np.fft.irfft(np.fft.rfft(audio, size) * np.fft.rfft(kernel, size), size)
    return y[: len(audio)].astype(np.float32)


def add_room(audio: Audio, decay_s: float, rng: np.random.Generator) -> Audio:
    """A direct path and exponentially decaying noise (60 dB in `decay_s`), energy kept about the same."""
    length = max(1, int(decay_s * SAMPLE_RATE))
    tail = rng.standard_normal(length) * 10 ** (-3 * np.arange(length) / length)
    tail *= rng.uniform(0.2, 0.7) / np.sqrt(np.sum(tail**2))
    delay = int(rng.uniform(0.001, 0.01) * SAMPLE_RATE)
    kernel = np.concatenate([[1.0], np.zeros(delay), tail]).astype(np.float32)
    return _convolve(audio, kernel / np.sqrt(np.sum(kernel**2)))


def add_noise(audio: Audio, noise: Audio, snr_db: float, rng: np.random.Generator) -> Audio:
    """Mix in `noise` (looped from a random place) at `snr_db` relative to the whole recording's power."""
    repeated = np.resize(np.roll(noise, int(rng.integers(len(noise)))), len(audio))
    ratio = np.sqrt(np.mean(audio**2) + 1e-12) / np.sqrt(np.mean(repeated**2) + 1e-12)
    mixed: Audio = audio + (repeated * ratio * 10 ** (-snr_db / 20)).astype(np.float32)
    return mixed


def coloured_noise(length: int, rng: np.random.Generator) -> Audio:
    """Noise with a power spectrum of 1 / f^k, k drawn from 0 ... 2."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    spectrum /= np.maximum(np.arange(len(spectrum)), 1) ** (rng.uniform(0, 2) / 2)
    return np.fft.irfft(spectrum, length).astype(np.float32)


def over_telephone(audio: Audio, rng: np.random.Generator) -> Audio:
    """What is left after a telephone line: a band of it, drawn around 0.2 to 3.6 kHz, in 8 bits of mu-law."""
    spectrum = np.fft.rfft(audio)
    hertz = np.fft.rfftfreq(len(audio), 1 / SAMPLE_RATE)
    spectrum[(hertz < rng.uniform(50, 350)) | (hertz > rng.uniform(3300, 3950))] = 0
    band = torch.from_numpy(np.fft.irfft(spectrum, len(audio)).clip(-1, 1).astype(np.float32))
    line: Audio = mu_law_decoding(mu_law_encoding(band, 256), 256).numpy()
    return line


@dataclass(frozen=True)
class Augmenter:
    """Applies `config` to recordings of `corpus`, with recorded noises where there are any."""

    config: AugmentConfig
    corpus: Corpus
    noises: Corpus | None = None

    def utterance(self, index: int, rng: np.random.Generator) -> tuple[Audio, str]:
        """An augmented recording and its transcript; the same for the same state of `rng`."""
        c = self.config
        audio, text = self._spoken(index, rng), self.corpus.utterances[index].text
        if rng.random() < c.join_probability:
            other = int(rng.integers(len(self.corpus.utterances)))
            more = self._spoken(other, rng)
            if (len(audio) + len(more)) / SAMPLE_RATE < c.join_max_s:
                pause = (rng.standard_normal(int(rng.uniform(0.1, 0.6) * SAMPLE_RATE)) * 1e-4).astype(np.float32)
                audio = np.concatenate([audio, pause, more])
                text = f"{text} {self.corpus.utterances[other].text}"
        if rng.random() < c.room_probability:
            audio = add_room(audio, rng.uniform(*c.room_decay_s), rng)
        if rng.random() < c.noise_probability:
            audio = add_noise(audio, self._noise(rng), rng.uniform(*c.noise_snr_db), rng)
        if rng.random() < c.telephone_probability:
            audio = over_telephone(audio, rng)
        audio = audio * np.float32(10 ** (rng.uniform(-c.gain_db, c.gain_db) / 20))
        return np.clip(audio, -1, 1), text

    def _spoken(self, index: int, rng: np.random.Generator) -> Audio:
        speed = 1 + rng.uniform(-1, 1) * self.config.speed_range
        return change_speed(self.corpus.audio(index), speed)

    def _noise(self, rng: np.random.Generator) -> Audio:
        if rng.random() < self.config.babble_probability:
            return self._babble(rng)
        if self.noises is None or rng.random() < 0.3:
            return coloured_noise(2 * SAMPLE_RATE, rng)
        noise = self.noises.audio(int(rng.integers(len(self.noises.utterances))))
        return noise if len(noise) >= 160 else coloured_noise(2 * SAMPLE_RATE, rng)

    def _babble(self, rng: np.random.Generator) -> Audio:
        """Three to seven other utterances at once, as long as the longest."""
        voices = [self.corpus.audio(int(rng.integers(len(self.corpus.utterances)))) for _ in range(rng.integers(3, 8))]
        babble = np.zeros(max(map(len, voices)), np.float32)
        for voice in voices:
            babble[: len(voice)] += voice / (np.sqrt(np.mean(voice**2)) + 1e-6)
        return babble


def spec_augment(frames: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Mask bands of bins and spans of frames with the mean (0) in each row of [B, F, num_mels] (Park et al. 2019)."""
    batch_size, num_frames, num_bins = frames.shape
    keep = torch.ones_like(frames, dtype=torch.bool)
    for count, widest, length, dim in (
        (config.freq_masks, config.freq_mask_bins, num_bins, 2),
        (config.time_masks, min(config.time_mask_frames, num_frames // 6), num_frames, 1),
    ):
        for _ in range(count):
            width = torch.randint(0, widest + 1, (batch_size, 1), generator=generator)
            start = (torch.rand(batch_size, 1, generator=generator) * (length - width)).long()
            place = torch.arange(length)
            masked = ((place >= start) & (place < start + width)).to(frames.device)
            keep &= ~masked.unsqueeze(3 - dim)
    return frames * keep
