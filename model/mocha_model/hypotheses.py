"""What searches with several hypotheses keep of each, and how those of many streams are laid out and cut short."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from mocha_model.streaming import map_state

MAX_UNSTABLE = 48  # symbols on which hypotheses may differ; beyond, those that contradict the best one are dropped


@dataclass(frozen=True)
class Hypotheses:
    """The hypotheses of B streams, W each, flattened: every tensor is [B W, ...]; constant size.

    Attributes:
        token: y_{i-1}. scorers: states of the fused scorers, with their next scores.
        score: float32, -inf where there is none. last_emission: int64, frame of the newest symbol.
        length: int64, symbols not yet stable; tokens, frames [., L] int64 and p [., L] are theirs.

    """

    suffixes: ClassVar[tuple[str, ...]] = ("tokens", "frames", "p")  # what there is of each symbol

    token: Tensor
    scorers: Any
    score: Tensor
    last_emission: Tensor
    length: Tensor
    tokens: Tensor
    frames: Tensor
    p: Tensor


Some = TypeVar("Some", bound=Hypotheses)


def best_of(score: Tensor) -> Tensor:
    """Which hypothesis of each row scores best: [B, W] to [B]."""
    return score.argmax(dim=1)


def flat_rows(h: Some) -> Some:
    """[B, W, ...] to [B W, ...]."""
    flat: Some = map_state(lambda x: x.flatten(0, 1), h)
    return flat


def split_rows(h: Some, width: int) -> Some:
    """[B W, ...] to [B, W, ...]."""
    split: Some = map_state(lambda x: x.view(-1, width, *x.shape[1:]), h)
    return split


def append(h: Some, token: Tensor, **of_symbol: Tensor) -> Some:
    """`h` with one more symbol each: `token` [B W], and what `suffixes` names beside it, each [B W, ...]."""
    at = h.length.clamp(max=MAX_UNSTABLE - 1)
    place = torch.arange(MAX_UNSTABLE, device=at.device) == at[:, None]

    def put(name: str, new: Tensor) -> Tensor:
        here = place.view(*place.shape, *(1,) * (new.dim() - 1))
        return torch.where(here, new[:, None], getattr(h, name))

    return replace(
        h, token=token, length=h.length + 1, **{k: put(k, v) for k, v in ({"tokens": token} | of_symbol).items()}
    )


def forget_first(h: Some, count: Tensor) -> Some:
    """Drop the first `count` [B] symbols of every hypothesis' suffix; `h` is [B, W, ...]."""
    index = (torch.arange(MAX_UNSTABLE, device=count.device) + count[:, None]).clamp(max=MAX_UNSTABLE - 1)

    def shift(x: Tensor) -> Tensor:
        at = index[:, None].expand(-1, x.shape[1], -1)
        return x.gather(2, at.view(*at.shape, *(1,) * (x.dim() - 3)).expand(-1, -1, -1, *x.shape[3:]))

    shifted = {name: shift(getattr(h, name)) for name in h.suffixes}
    return replace(h, length=(h.length - count[:, None]).clamp(min=0), **shifted)
