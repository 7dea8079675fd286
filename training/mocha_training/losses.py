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
    expected = (alpha * place).sum(2)  # no matrix product: autocast would round frames above 256 to even ones
    mask = valid_mask(num_tokens, alpha.shape[1]) & (boundaries >= 0)
    return ((expected - boundaries).abs() * mask).sum() / mask.sum().clamp(min=1)


def path_likelihood(energies: Tensor, selects: Tensor, decides: Tensor, num_tokens: Tensor) -> Tensor:
    """Negative log-probability, per token, that the stochastic hard process takes a given path.

    The process of Raffel 2017, eqs. 6-8, draws Bernoulli(sigmoid(e)) at every frame it inspects; the path's probability
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
    """Last frame of each token in the CTC forced alignment, [B, U] int64; -1 for eos, padding and impossible rows.

    All rows at once, frame by frame (Viterbi over Graves et al. 2006, section 4.1), on the device of `log_probs`; of
    paths that are equally likely the one that stays where it is.
    """
    best, steps = _viterbi(log_probs.detach().float(), tokens)
    row = torch.arange(len(tokens), device=tokens.device)
    frame = torch.arange(len(steps), device=tokens.device)[:, None]
    steps = steps.masked_fill((frame >= num_frames)[..., None], 0)  # after its last frame a row stays in its last state
    end = 2 * (num_tokens - 1)  # the blank after the last character
    final = best[(num_frames - 1).clamp(min=0), row]
    ends_blank = final.gather(1, end[:, None]) >= final.gather(1, (end - 1).clamp(min=0)[:, None])
    states = [torch.where(ends_blank[:, 0], end, end - 1).clamp(min=0)]
    for step in reversed(steps[1:].unbind()):
        states.append(states[-1] - step.gather(1, states[-1][:, None])[:, 0])
    path = torch.stack(states[::-1])  # [T, B], each a blank (even) or the character (state - 1) / 2
    last = torch.full((len(tokens), best.shape[2]), -1, device=tokens.device)
    last.scatter_reduce_(1, path.t(), torch.where(frame < num_frames, frame, -1).t(), "amax")
    result = functional.pad(last[:, 1::2], (0, 1), value=-1)
    aligned = has_ctc_path(num_frames, tokens, num_tokens) & (num_tokens > 1)
    return result.masked_fill(~(aligned[:, None] & valid_mask(num_tokens - 1, tokens.shape[1])), -1)


def _viterbi(log_probs: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of the likeliest path to each state at each frame, [T, B, 2 U - 1], and how many it came by."""
    batch_size, length = tokens.shape
    labels = tokens.new_zeros(batch_size, 2 * length - 1)  # blanks, and the characters between them
    labels[:, 1::2] = tokens[:, :-1]
    skips = torch.full(labels.shape, -torch.inf, device=tokens.device)
    skips[:, 3::2].masked_fill_(tokens[:, 1:-1] != tokens[:, :-2], 0.0)  # past the blank between two that differ
    emitted = log_probs.gather(2, labels[:, None].expand(-1, log_probs.shape[1], -1)).transpose(0, 1).contiguous()
    best = emitted.new_full((len(emitted), batch_size, labels.shape[1] + 2), -torch.inf)  # two before all
    steps = torch.zeros(emitted.shape, dtype=torch.int8, device=tokens.device)
    best[0, :, 2:4] = emitted[0, :, :2]
    for t in range(1, len(emitted)):
        before = best[t - 1]
        likeliest, steps[t] = torch.stack([before[:, 2:], before[:, 1:-1], before[:, :-2] + skips]).max(0)
        torch.add(likeliest, emitted[t], out=best[t, :, 2:])
    return best[..., 2:], steps
