"""Samples to log-mel frames, normalised with the checkpoint's statistics. Causal: no centring, no look-ahead.

Knows nothing of the encoder. Statistics are fixed numbers, never those of the utterance at hand.
"""

from dataclasses import dataclass

import torch
import torchaudio
from torch import Tensor, nn

from mocha_model.config import FeatureConfig
from mocha_model.streaming import SlidingWindow, WindowState, valid_mask


@dataclass(frozen=True)
class FeatureState:
    """Samples not yet framed, and the last frames for the differences."""

    samples: WindowState
    frames: Tensor  # [B, 2, num_bands], not normalised
    num_seen: Tensor  # [B] int64, frames so far, counted up to 2


class LogMel(nn.Module):
    """Natural logarithm of mel-band power of Hann windows; optionally of their energy; optionally with differences.

    Every value is standardised by its own mean and deviation over training data, differences too (Raffel 2017, D.1).
    """

    mean: Tensor
    std: Tensor
    window: Tensor
    mel: Tensor

    def __init__(self, config: FeatureConfig, tail_samples: int | None = None) -> None:
        """`tail_samples` of silence end whole utterances; those of `config` if not given."""
        super().__init__()
        if config.hop_samples > config.window_samples:
            raise ValueError("hop_samples must not exceed window_samples: samples would be lost")
        self.config = config
        self.tail_samples = config.tail_samples if tail_samples is None else tail_samples
        self.framing = SlidingWindow(config.window_samples, config.hop_samples)
        mel = torchaudio.functional.melscale_fbanks(
            config.num_fft // 2 + 1,
            config.lowest_hz,
            config.highest_hz,
            config.num_mels,
            config.sample_rate,
            norm=None,
            mel_scale="htk",
        )
        self.register_buffer("mel", mel, persistent=False)
        self.register_buffer("window", torch.hann_window(config.window_samples, periodic=False), persistent=False)
        self.register_buffer("mean", torch.zeros(config.num_features))
        self.register_buffer("std", torch.ones(config.num_features))

    def set_normalization(self, mean: Tensor, std: Tensor) -> None:
        """Fix the statistics: `mean` and `std` [num_features] of what `raw` returns over training data."""
        self.mean.copy_(mean)
        self.std.copy_(std.clamp(min=1e-3))

    def init_state(self, batch_size: int) -> FeatureState:
        """State of streams that have heard nothing."""
        samples = self.framing.init_state(batch_size, (), 0, self.mean)
        frames = self.mean.new_zeros(batch_size, 2, self.config.num_bands)
        return FeatureState(samples, frames, torch.zeros(batch_size, dtype=torch.int64, device=self.mean.device))

    def step(self, x: Tensor, num_valid: Tensor, state: FeatureState) -> tuple[Tensor, Tensor, FeatureState]:
        """Samples `x` [B, N] float32 in [-1, 1] to normalised frames [B, F, num_features]."""
        frames, num_frames, state = self._raw_step(x, num_valid, state)
        return (frames - self.mean) / self.std, num_frames, state

    def forward(self, samples: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Whole utterances [B, N] with their flush tail -> (frames [B, F, num_features], num_frames [B])."""
        padded, num_padded = self._with_tail(samples, num_samples)
        frames, num_frames, _ = self.step(padded, num_padded, self.init_state(samples.shape[0]))
        return frames * valid_mask(num_frames, frames.shape[1])[..., None], num_frames

    def raw(self, samples: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        """Unnormalised features [B, F, num_features] and their number [B], without the tail: for statistics."""
        frames, num_frames, _ = self._raw_step(samples, num_samples, self.init_state(samples.shape[0]))
        return frames, num_frames

    def _raw_step(self, x: Tensor, num_valid: Tensor, state: FeatureState) -> tuple[Tensor, Tensor, FeatureState]:
        left, num_frames, samples = self.framing.step(x, num_valid, state.samples)
        frames = self._bands(left, int(num_frames.max()) if len(num_frames) else 0)
        if not self.config.deltas:
            return frames, num_frames, FeatureState(samples, state.frames, state.num_seen)
        frames, kept, num_seen = self._with_deltas(frames, num_frames, state)
        return frames, num_frames, FeatureState(samples, kept, num_seen)

    def _with_tail(self, samples: Tensor, num_samples: Tensor) -> tuple[Tensor, Tensor]:
        samples = samples * valid_mask(num_samples, samples.shape[1])
        return nn.functional.pad(samples, (0, self.tail_samples)), num_samples + self.tail_samples

    def _bands(self, samples: Tensor, num_frames: int) -> Tensor:
        """Frames [B, num_frames, num_bands] of samples that start at the first window."""
        if num_frames == 0:
            return self.mean.new_zeros(samples.shape[0], 0, self.config.num_bands)
        windows = samples.unfold(1, self.config.window_samples, self.config.hop_samples)[:, :num_frames] * self.window
        spectrum = torch.fft.rfft(windows, n=self.config.num_fft)
        power = spectrum.real.square() + spectrum.imag.square()
        with torch.autocast(samples.device.type, enabled=False):  # in training as in serving
            bands: Tensor = power @ self.mel
        if self.config.energy:
            bands = torch.cat([bands, windows.square().sum(dim=-1, keepdim=True)], dim=-1)
        return (bands + self.config.floor).log()

    def _with_deltas(self, frames: Tensor, num_frames: Tensor, state: FeatureState) -> tuple[Tensor, Tensor, Tensor]:
        """Append x_t - x_{t-1} and its difference; before the start of the stream frames repeat the first one."""
        history = state.frames
        if frames.shape[1]:
            first = frames[:, :1]
            place = torch.arange(2, device=frames.device)  # history[k] is real if at least 2 - k frames were seen
            real = (2 - place)[None] <= state.num_seen[:, None]
            oldest_real = torch.where(real.any(1)[:, None, None], history[:, 1:], first)
            history = torch.where(real[..., None], history, oldest_real)
        joined = torch.cat([history, frames], dim=1)
        first_difference = joined[:, 1:] - joined[:, :-1]
        second_difference = first_difference[:, 1:] - first_difference[:, :-1]
        ends = num_frames[:, None] + torch.arange(2, device=frames.device)
        kept = joined.gather(1, ends[..., None].expand(-1, -1, joined.shape[2]))
        kept = torch.where((num_frames > 0)[:, None, None], kept, state.frames)
        num_seen = (state.num_seen + num_frames).clamp(max=2)
        return torch.cat([frames, first_difference[:, 1:], second_difference], dim=2), kept, num_seen
