"""Augmentation of features: other vocal tracts, masked bands and spans (SpecAugment). Rows of a batch, seeded."""

import torch
from torch import Tensor

from mocha_model.config import FeatureConfig
from mocha_training.augment import AugmentConfig

VOICE_HZ = 4800.0  # up to here the formants of speech are moved by the whole factor; above, less and less


def warp_vocal_tract(frames: Tensor, features: FeatureConfig, spread: float, generator: torch.Generator) -> Tensor:
    """The mel bands of each row of [B, F, num_features] as of a longer or shorter vocal tract (Jaitly & Hinton 2013).

    Frequencies are multiplied by a factor drawn from 1 - `spread` ... 1 + `spread` for each row, in one straight line
    up to the formants' end and in another from there to the highest, which stays. A band's value is interpolated
    between the two whose centres are nearest.
    """
    factor = 1 + (2 * torch.rand(len(frames), 1, generator=generator) - 1) * spread
    lowest, highest = (_mel(torch.tensor(hertz)) for hertz in (features.lowest_hz, features.highest_hz))
    step = (highest - lowest) / (features.num_mels + 1)
    centre = 700 * (10 ** ((lowest + step * torch.arange(1, features.num_mels + 1)) / 2595) - 1)  # Hz
    bend = VOICE_HZ * factor.clamp(max=1)  # where the lines meet, after the warp
    above = features.highest_hz - (features.highest_hz - bend) / (features.highest_hz - bend / factor) * (
        features.highest_hz - centre
    )
    warped = torch.where(centre <= bend / factor, centre * factor, above)  # [B, num_mels]
    place = ((_mel(warped) - lowest) / step - 1).clamp(0, features.num_mels - 1).to(frames.device)
    below = place.floor().long().clamp(max=features.num_mels - 2)
    maps = frames.reshape(*frames.shape[:2], features.num_maps, features.num_bands)
    mels, rest = maps[..., : features.num_mels], maps[..., features.num_mels :]
    index = below[:, None, None].expand_as(mels)
    part = (place - below)[:, None, None]
    mels = torch.lerp(mels.gather(3, index), mels.gather(3, index + 1), part.expand_as(mels))
    return torch.cat([mels, rest], dim=3).flatten(2)


def _mel(hertz: Tensor) -> Tensor:
    return 2595 * torch.log10(1 + hertz / 700)


def spec_augment(frames: Tensor, config: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Mask bands of bins and spans of frames with the mean (0) in each row of [B, F, num_features] (Park et al. 2019).

    Bins are of all that a frame has: bands, and where there are any, energies and differences.
    """
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
