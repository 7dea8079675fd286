"""Losses along a known path: what the decoder writes where, and where it selects. Knows nothing of encoders."""

import torch
from torch import Tensor

from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import losses
from mocha_training.config import TrainConfig

Weighted = dict[str, tuple[float, Tensor]]  # each objective with its weight


def cross_entropy(config: TrainConfig, logits: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
    """As `config` smooths it; tensors as for `losses.label_smoothed_cross_entropy`."""
    if config.neighbour_smoothing:
        return losses.localized_label_smoothing(logits, tokens, num_tokens, config.neighbour_smoothing)
    return losses.label_smoothed_cross_entropy(logits, tokens, num_tokens, config.label_smoothing)


def path_losses(
    model: SpeechModel,
    config: TrainConfig,
    memory: tuple[Tensor, Tensor],
    tokens: Tensor,
    num_tokens: Tensor,
    frames: Tensor,
    given: Tensor | None = None,
    sampling_probability: float = 0.0,
    excused: Tensor | None = None,
) -> Weighted:
    """Cross-entropy of `tokens` [B, U] and likelihood of the path `frames` [B, U], see `SpeechModel.along_path`.

    `memory` [B, T, D] comes with its lengths [B]. As what it has read the decoder is `given` [B, U], `tokens` if
    nothing else, and draws of its own with the `sampling_probability`. Rows that cannot be aligned, whose first frame
    is -1, count for nothing; nor do `excused` [B, T] decisions.
    """
    counted = num_tokens * (frames[:, 0] >= 0)
    inputs = tokens if given is None else given
    if sampling_probability:
        inputs = sampled(model, memory, tokens, num_tokens, frames, inputs, sampling_probability)
    out = model.along_path(*memory, inputs, num_tokens, frames)
    ce = cross_entropy(config, out.logits, tokens, counted)
    decides = out.decides & (counted > 0)[:, None]
    if excused is not None:  # the first decision on each frame; those after a selection come behind
        decides = decides & ~torch.nn.functional.pad(excused, (0, decides.shape[1] - excused.shape[1]))
    path = losses.path_likelihood(out.energies, out.selects, decides, counted)
    selected = out.selects & decides
    fired = ((out.energies >= 0) & selected).sum() / selected.sum().clamp(min=1)  # p >= 0.5 where it should be
    return {"ce": (1 - config.ctc_weight, ce), "path": (config.path_weight, path), "fired": (0.0, fired)}


@torch.no_grad()
def sampled(
    model: SpeechModel,
    memory: tuple[Tensor, Tensor],
    tokens: Tensor,
    num_tokens: Tensor,
    frames: Tensor,
    inputs: Tensor,
    probability: float,
) -> Tensor:
    """`inputs` [B, U], or draws of the decoder's own at times.

    Scheduled sampling (Bengio et al. 2015) without a schedule, since runs that use it start from a model that
    reads; and in one parallel pass, the first of those of Duckworth et al. (2019): each symbol is drawn from the
    decoder's distribution after the transcript's symbols, not after other draws.
    """
    logits = model.along_path(*memory, tokens, num_tokens, frames).logits.float()
    logits[..., Tokenizer.eos_id] = -torch.inf  # never part of what has been read
    probabilities = (logits + model.decoder.never).softmax(2)
    drawn = torch.multinomial(probabilities.flatten(0, 1), 1).view(logits.shape[:2])
    own = torch.rand(drawn.shape, device=drawn.device) < probability
    return torch.where(own, drawn, inputs[:, : drawn.shape[1]])
