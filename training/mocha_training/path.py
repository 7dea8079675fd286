"""Training along a known path of selections: what the decoder writes, where it selects, and its own slips and draws.

Decoding at times selects too early or too late and reads symbols that it got wrong, and has to go on from there; a
decoder that has only ever been given the reference has not learned to. Knows nothing of encoders and loops.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import losses
from mocha_training.config import TrainConfig

Weighted = dict[str, tuple[float, Tensor]]  # each objective with its weight

SLIPS = {-1: 2, 1: 5, 2: 2}  # frames too late, and how often of those that slip


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
    ends: Tensor,
) -> Weighted:
    """Cross-entropy of `tokens` [B, U] and likelihood of the path along `ends` [B, U] (`losses.ctc_boundaries`).

    `memory` [B, T, D] comes with its lengths [B]. Rows that cannot be aligned, whose first end is -1, count for
    nothing.
    """
    counted = num_tokens * (ends[:, 0] >= 0)
    frames, excused = ends, torch.zeros(memory[0].shape[:2], dtype=torch.bool, device=ends.device)
    if config.slip_probability:
        frames, excused = slipped(ends, drawn_slips(ends, config.slip_probability), memory[1], memory[0].shape[1])
    inputs = tokens
    if config.sampling_probability:
        inputs = sampled(model, memory, tokens, num_tokens, frames, config.sampling_probability)
    out = model.along_path(*memory, inputs, num_tokens, frames)
    ce = cross_entropy(config, out.logits, tokens, counted)
    decides = out.decides & (counted > 0)[:, None]
    # The first decision on each frame; those after a selection come behind, and are never excused.
    decides &= ~functional.pad(excused, (0, decides.shape[1] - excused.shape[1]))
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
    probability: float,
) -> Tensor:
    """Tokens [B, U] that the decoder is given as what it has read: the transcript's, or draws of its own at times.

    Scheduled sampling (Bengio et al. 2015) without a schedule, since runs that use it start from a model that
    reads; and in one parallel pass, the first of those of Duckworth et al. (2019): each symbol is drawn from the
    decoder's distribution after the transcript's symbols, not after other draws.
    """
    logits = model.along_path(*memory, tokens, num_tokens, frames).logits.float()
    logits[..., Tokenizer.eos_id] = -torch.inf  # never part of what has been read
    probabilities = (logits + model.decoder.never).softmax(2)
    drawn = torch.multinomial(probabilities.flatten(0, 1), 1).view(logits.shape[:2])
    own = torch.rand(drawn.shape, device=drawn.device) < probability
    return torch.where(own, drawn, tokens[:, : drawn.shape[1]])


def drawn_slips(ends: Tensor, probability: float) -> Tensor:
    """By how many frames each of `ends` is selected too late, like `ends`; 0 but for a share of `probability`."""
    late, weights = (torch.tensor(x, device=ends.device) for x in zip(*SLIPS.items(), strict=True))
    drawn = late[torch.multinomial(weights.float(), ends.numel(), replacement=True)].view(ends.shape)
    return drawn * (torch.rand(ends.shape, device=ends.device) < probability)


def slipped(ends: Tensor, late: Tensor, num_frames: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """A path that does not always select where it should, and which of its decisions are mistakes.

    Args:
        ends: [B, U] int64, where each token should be selected, rising; -1 for eos, padding and impossible rows.
        late: [B, U] int64, by how many frames it is selected too late. What comes after may have to wait for it.
        num_frames: [B] int64.
        length: T, of the longest.

    Returns:
        Frames [B, U] int64, strictly rising, -1 where a token has no end or its frame is after the last; and [B, T]
        bool, decisions not to learn: not to select where a token should be, and to select too early.

    """
    order = torch.arange(ends.shape[1], device=ends.device)
    real = ends >= 0
    # at_i = max(end_i + late_i, at_{i-1} + 1)
    at = (torch.where(real, (ends + late).clamp(min=0), 0) - order).cummax(1).values + order
    inside = real & (at < num_frames[:, None])
    stop = torch.where(inside, at, length)
    earliest = functional.pad(at[:, :-1] + 1, (1, 0))
    begin = torch.maximum(ends, earliest)
    early = inside & (at < ends)
    begin, stop = torch.where(early, at, begin), torch.where(early, at + 1, stop)
    some = (real & (begin < stop)).int()
    edges = torch.zeros(len(ends), length + 1, dtype=torch.int32, device=ends.device)
    edges.scatter_add_(1, begin.clamp(0, length), some).scatter_add_(1, stop, -some)
    return torch.where(inside, at, -1), edges.cumsum(1)[:, :length] > 0
