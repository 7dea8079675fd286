"""What all texts together score by the CTC branch and a model of characters: what a transcript is to be told from.

CTC alone asks that the transcript be likely. With this taken off it asks that it be likelier than other texts that a
search with a language model could find instead: maximum mutual information without lattices (Povey et al. 2016), over
CTC's alignments (CTC-CRF: Xiang & Ou 2019). The sum is exact: texts are scored by trigrams of characters, so that a
path's two newest characters are all there is to know of it. Knows nothing of networks or audio.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from mocha_model.tokenizer import Tokenizer
from mocha_training.losses import has_ctc_path

FIRST = Tokenizer.first_id
ORDER = 3
MOST = 200  # symbols; trigrams are a table of their third power


def character_trigrams(texts: Iterable[str], tokenizer: Tokenizer) -> Tensor:
    """P(third | first, second) of the S symbols that can be written, [S, S, S] float32.

    Each text stands between spaces; what is outside the vocabulary is left out of it. Interpolated with shorter ones by
    the number of different symbols that follow (Witten & Bell 1991, method C); a symbol that nothing is known of is as
    likely as any. Raises ValueError where there are more than `MOST` symbols.
    """
    space, size = tokenizer.space_id, tokenizer.vocab_size - FIRST
    if size > MOST:
        raise ValueError(f"denominator_weight is for alphabets of up to {MOST} characters, not {size}")
    place = size ** torch.arange(ORDER - 1, -1, -1)

    def numbered(text: str) -> Tensor:
        """The trigrams of a text as numbers [N]."""
        ids = [i for i in tokenizer.encode(text) if i >= FIRST]
        return (torch.tensor([space, space, *ids, space]).sub(FIRST).unfold(0, ORDER, 1) * place).sum(1)

    counts = torch.cat([numbered(text) for text in texts]).bincount(minlength=size**ORDER)
    counts = counts.view(size, size, size).double()
    probability = torch.full((size,), 1 / size, dtype=torch.float64)
    for seen in (counts.sum((0, 1)), counts.sum(0), counts):
        kinds, total = (seen > 0).sum(-1, keepdim=True), seen.sum(-1, keepdim=True)
        probability = torch.where(total > 0, (seen + kinds * probability) / (total + kinds), probability)
    return probability.float()


def denominator(
    log_probs: Tensor, num_frames: Tensor, tokens: Tensor, num_tokens: Tensor, trigrams: Tensor, space: int
) -> Tensor:
    """Logarithm of the sum over all texts of their probabilities by CTC times those by `trigrams`, per character.

    Of the same utterances as `losses.ctc`, whose tensors it has, but for those that the symbols cannot spell: no other
    text has the symbol that stands for what is unknown, so its probability would grow without bound. `space` is the
    symbol that texts stand between.
    """
    possible = has_ctc_path(num_frames, tokens, num_tokens) & (tokens != Tokenizer.unk_id).all(1)
    total = torch.where(possible, log_total(log_probs, num_frames, trigrams, space - FIRST), 0.0)
    return total.sum() / (num_tokens - 1).sum().clamp(min=1)


def phone_bigrams(sequences: Iterable[list[int]], num_phones: int) -> tuple[Tensor, Tensor, Tensor]:
    """P(second | first) of phones [S, S], P(first of a text) [S] and P(end | last) [S], float32.

    `sequences` are labels from 1 on; each pair is taken to have occurred a tenth of a time more than it has.
    """
    edge = num_phones
    counts = torch.full((num_phones + 1, num_phones + 1), 0.1)
    for labels in sequences:
        numbers = torch.tensor([edge, *(n - 1 for n in labels), edge])
        counts.index_put_((numbers[:-1], numbers[1:]), torch.ones(len(numbers) - 1), accumulate=True)
    share = counts / counts.sum(1, keepdim=True)
    return share[:edge, :edge].contiguous(), share[edge, :edge].contiguous(), share[:edge, edge].contiguous()


def log_total_of_pairs(log_probs: Tensor, num_frames: Tensor, bigrams: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """As `log_total`, [B] float32, of sequences that `bigrams` (as of `phone_bigrams`) score.

    The forward recursion over the newest label and over whether it has ended; `log_probs` is [B, T, S + 1].
    """
    after, first, last = bigrams
    with torch.autocast(log_probs.device.type, enabled=False):
        each, size = log_probs.float().exp(), len(after)
        begins_or_follows = torch.cat([after, first[None]])  # [S + 1, S], nothing yet as the last row
        label, blank = each.new_zeros(len(each), size), each.new_zeros(len(each), size + 1)
        blank[:, size] = 1
        total = each.new_zeros(len(each))
        for t in range(each.shape[1]):
            reached = torch.cat([blank[:, :size] + label, blank[:, size:]], dim=1)
            written = reached @ begins_or_follows - label * after.diagonal()  # itself only after a blank
            new, quiet = (written + label) * each[:, t, 1:], reached * each[:, t, :1]
            scale = new.sum(1) + quiet.sum(1)
            going = t < num_frames
            scale = torch.where(going, scale, 1.0)
            label = torch.where(going[:, None], new / scale[:, None], label)
            blank = torch.where(going[:, None], quiet / scale[:, None], blank)
            total = total + scale.log()
        return total + ((blank[:, :size] + label) @ last).log()


def log_total(log_probs: Tensor, num_frames: Tensor, trigrams: Tensor, space: int) -> Tensor:
    """Logarithm of the sum over all texts y of P_ctc(y) P(y), [B] float32.

    The forward recursion over the newest two characters and over whether the newest label is a blank; numbers are
    divided by their sum after each frame.

    Args:
        log_probs: [B, T, V] float32, blank 0, of which the first `FIRST` but the blank are never written.
        num_frames: [B] int64.
        trigrams: [S, S, S] float32, S = V - FIRST.
        space: which of S stands before and after texts.

    """
    with torch.autocast(log_probs.device.type, enabled=False):
        each, size = log_probs.float().exp(), len(trigrams)
        # By the newest character, the row, and the one before it: [S, B, S].
        label = each.new_zeros(size, len(each), size)
        blank = label.clone()
        blank[space, :, space] = 1
        after = trigrams.transpose(0, 1).contiguous()  # [second, first, third]
        again = trigrams.diagonal(dim1=1, dim2=2).t()[:, None]  # [second, 1, first], where the third is the second
        same = torch.eye(size, device=each.device)[:, None]
        total = each.new_zeros(len(each))
        for t in range(each.shape[1]):
            reached = blank + label
            # A character follows itself only after a blank.
            written = reached @ after - (label * again).sum(2, keepdim=True) * same  # [second, B, third]
            new = (written.permute(2, 1, 0) + label) * each[:, t, FIRST:].t()[:, :, None]
            quiet = reached * each[:, t, Tokenizer.blank_id, None]
            scale = new.sum((0, 2)) + quiet.sum((0, 2))
            going = t < num_frames
            scale = torch.where(going, scale, 1.0)
            label = torch.where(going[:, None], new / scale[:, None], label)
            blank = torch.where(going[:, None], quiet / scale[:, None], blank)
            total = total + scale.log()
        ends = trigrams[..., space].t()[:, None]
        return total + ((blank + label) * ends).sum((0, 2)).log()
