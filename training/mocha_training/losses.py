"""Training objectives over what the model returns. Plain functions on tensors; no model, no loop."""

import torch
from torch import Tensor
from torch.nn import functional

from mocha_model.streaming import valid_mask


def label_smoothed_cross_entropy(logits: Tensor, tokens: Tensor, num_tokens: Tensor, smoothing: float) -> Tensor:
    """Mean cross-entropy per token with `smoothing` of the target mass spread evenly over the vocabulary.

    `logits` [B, U, V], `tokens` [B, U] int64, `num_tokens` [B]; scalar float32.
    """
    flat = functional.cross_entropy(
        logits.float().flatten(0, 1), tokens.flatten(), reduction="none", label_smoothing=smoothing
    )
    mask = valid_mask(num_tokens, tokens.shape[1]).flatten()
    return (flat * mask).sum() / mask.sum().clamp(min=1)


def localized_label_smoothing(logits: Tensor, tokens: Tensor, num_tokens: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Mean cross-entropy per token whose targets give mass to neighbouring tokens (Chorowski & Jaitly 2017).

    `weights` are those of tokens [-k ... k] relative to the target, divided by their sum; in Raffel 2017, D.1.2
    (0.015, 0.035, 1, 0.035, 0.015). What falls outside the transcript goes to the token itself. Tensors as for
    `label_smoothed_cross_entropy`.
    """
    log_probs = logits.float().log_softmax(-1)
    mask = valid_mask(num_tokens, tokens.shape[1])
    reach, length, total = len(weights) // 2, tokens.shape[1], sum(weights)
    own = torch.ones_like(tokens, dtype=torch.float32)
    loss = torch.zeros_like(own)
    place = torch.arange(length, device=tokens.device)
    for offset, weight in zip(range(-reach, reach + 1), weights, strict=True):
        if offset == 0:
            continue
        at = (place + offset).clamp(0, length - 1)
        inside = ((place + offset >= 0) & (place + offset < num_tokens[:, None])).float() * (weight / total)
        loss = loss - inside * log_probs.gather(2, tokens[:, at, None])[..., 0]
        own = own - inside
    loss = loss - own * log_probs.gather(2, tokens[..., None])[..., 0]
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def ctc(log_probs: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
    """Connectionist temporal classification per character (Graves et al. 2006); blank 0, the closing eos left out.

    `log_probs` [B, T, V] float32. Utterances with too few frames for their text count as zero.
    """
    per_row = functional.ctc_loss(
        log_probs.transpose(0, 1), tokens, num_frames, num_tokens - 1, blank=0, reduction="none", zero_infinity=True
    )
    return per_row.sum() / (num_tokens - 1).sum().clamp(min=1)


def consistency(log_probs: Tensor, num_frames: Tensor, num_tokens: Tensor) -> Tensor:
    """How far the CTC branch's readings of two views of each utterance are from each other (CR-CTC, Yao et al. 2025).

    `log_probs` [2 B, T, V] float32, the second views after the first, with `num_frames` and `num_tokens` [2 B] alike
    in both halves. Mean of both views' Kullback-Leibler divergences from the other, which is taken as given, summed
    over frames; per token (eos left out) as `ctc`.
    """
    other = torch.cat(log_probs.detach().chunk(2)[::-1])
    divergence = (other.exp() * (other - log_probs)).sum(2)
    mask = valid_mask(num_frames, log_probs.shape[1])
    return (divergence * mask).sum() / (num_tokens - 1).sum().clamp(min=1)


def quantity(alpha: Tensor, num_tokens: Tensor) -> Tensor:
    """Mean over the batch of ``|sum alpha - num_tokens|`` (eos counted); alpha [B, U, T]. Per token of the batch."""
    mask = valid_mask(num_tokens, alpha.shape[1])
    total = (alpha.sum(2) * mask).sum(1)
    return (total - num_tokens).abs().sum() / num_tokens.sum()


def boundary_latency(alpha: Tensor, boundaries: Tensor, num_tokens: Tensor) -> Tensor:
    """CTC-ST / MinLT: ``mean_i |sum_j j alpha_ij - b_i|`` over real tokens.

    `alpha` [B, U, T]; `boundaries` [B, U] int64 frames, -1 where unknown (left out); scalar, in frames.
    """
    place = torch.arange(alpha.shape[2], device=alpha.device, dtype=alpha.dtype)
    expected = alpha @ place
    mask = valid_mask(num_tokens, alpha.shape[1]) & (boundaries >= 0)
    return ((expected - boundaries).abs() * mask).sum() / mask.sum().clamp(min=1)


def path_likelihood(energies: Tensor, selects: Tensor, decides: Tensor, num_tokens: Tensor) -> Tensor:
    """Negative log-probability, per token, that the stochastic hard process takes a given path.

    The process of Raffel 2017, eqs. 3-5, draws Bernoulli(sigmoid(e)) at every frame it inspects; the path's probability
    is the product over its decisions. `energies`, `selects`, `decides` [B, N] as `Decoder.along_path` returns them.
    """
    each = functional.binary_cross_entropy_with_logits(energies, selects.float(), reduction="none")
    return (each * decides).sum() / num_tokens.sum().clamp(min=1)


def has_ctc_path(num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
    """Rows [B] bool with frames enough for their characters and for a blank between two that are alike.

    `num_frames` [B]; `tokens` [B, U] and `num_tokens` [B] as for `ctc`.
    """
    repeats = (tokens[:, 1:] == tokens[:, :-1]) & valid_mask(num_tokens - 1, tokens.shape[1])[:, 1:]
    return num_frames >= num_tokens - 1 + repeats.sum(1)


def ctc_boundaries(log_probs: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor) -> Tensor:
    """Last frame of each token in the CTC forced alignment, [B, U] int64; -1 for eos, padding and impossible rows."""
    from torchaudio.functional import forced_align

    result = torch.full_like(tokens, -1)
    aligned = has_ctc_path(num_frames, tokens, num_tokens) & (num_tokens > 1)
    for row in aligned.nonzero()[:, 0].tolist():
        target, frames = tokens[row, : int(num_tokens[row]) - 1], int(num_frames[row])
        path, _ = forced_align(log_probs[row : row + 1, :frames].detach().cpu(), target[None].int().cpu(), blank=0)
        labels = path[0]
        starts = labels.ne(0) & functional.pad(labels[1:].ne(labels[:-1]), (1, 0), value=True)
        run = functional.pad(labels[1:].ne(labels[:-1]), (0, 1), value=True) & labels.ne(0)
        if int(starts.sum()) == len(target):
            result[row, : len(target)] = run.nonzero()[:, 0].to(tokens.device)
    return result
