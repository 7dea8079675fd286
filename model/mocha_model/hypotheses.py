"""What searches with several hypotheses keep of each, and how those of many streams are laid out and cut short."""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mocha_model.encoder import RecurrentState
from mocha_model.streaming import map_state

MAX_UNSTABLE = 48  # symbols on which hypotheses may differ; beyond, those that contradict the best one are dropped


@dataclass(frozen=True)
class Hypotheses:
    """The hypotheses of B streams, W each, flattened: every tensor is [B W, ...]; constant size.

    Attributes:
        decoder: s_{i-1}. token: y_{i-1}. scorers: states of the fused scorers, with their next scores.
        score: float32, -inf where there is none. ended: bool, whether the last symbol is end-of-sequence.
        start, last_emission, repeats: as in `search.SearchState`.
        length: int64, symbols not yet stable; tokens, frames [., L] int64, p [., L] and weights [., L, w] are theirs.

    """

    decoder: RecurrentState
    token: Tensor
    scorers: Any
    score: Tensor
    ended: Tensor
    start: Tensor
    last_emission: Tensor
    repeats: Tensor
    length: Tensor
    tokens: Tensor
    frames: Tensor
    p: Tensor
    q: Tensor
    weights: Tensor


Some = TypeVar("Some", bound=Hypotheses)


def best_of(score: Tensor) -> Tensor:
    """Which hypothesis of each row scores best: [B, W] to [B]."""
    return score.argmax(dim=1)


def flat_rows(h: Hypotheses) -> Hypotheses:
    """[B, W, ...] to [B W, ...]."""
    flat: Hypotheses = map_state(lambda x: x.flatten(0, 1), h)
    return flat


def split_rows(h: Hypotheses, width: int) -> Hypotheses:
    """[B W, ...] to [B, W, ...]."""
    split: Hypotheses = map_state(lambda x: x.view(-1, width, *x.shape[1:]), h)
    return split


def forget_first(h: Hypotheses, count: Tensor) -> Hypotheses:
    """Drop the first `count` [B] symbols of every hypothesis' suffix."""
    index = (torch.arange(MAX_UNSTABLE, device=count.device) + count[:, None]).clamp(max=MAX_UNSTABLE - 1)

    def shift(x: Tensor) -> Tensor:
        at = index[:, None].expand(-1, x.shape[1], -1)
        return x.gather(2, at.view(*at.shape, *(1,) * (x.dim() - 3)).expand(-1, -1, -1, *x.shape[3:]))

    return replace(
        h,
        length=(h.length - count[:, None]).clamp(min=0),
        tokens=shift(h.tokens),
        frames=shift(h.frames),
        p=shift(h.p),
        q=shift(h.q),
        weights=shift(h.weights),
    )
