"""Soft decoding of whole memories: expected attention at every output step, greedy over symbols.

What softmax attention needs, and what Raffel 2017, section 4 reports beside hard decoding. Not online: nothing can be
said before the memory is complete.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mocha_model.model import SpeechModel
from mocha_model.streaming import valid_mask
from mocha_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class SoftDecoded:
    """One utterance: the symbols without eos, and the alignments [U, T] of the steps that gave them."""

    tokens: list[int]
    alpha: Tensor
    beta: Tensor


@torch.inference_mode()
def decode_softly(
    model: SpeechModel, memory: Tensor, num_memory: Tensor, max_symbols: int | None = None
) -> list[SoftDecoded]:
    """Decode `memory` [B, T, D] of lengths `num_memory` [B]; at most `max_symbols` each, T if not given."""
    decoder, attention = model.decoder, model.decoder.attention
    ready = attention.prepare(memory, valid_mask(num_memory, memory.shape[1]))
    state, alpha = decoder.init_state(len(memory)), attention.first_alignment(ready)
    token = num_memory.new_full((len(memory),), Tokenizer.sos_id)
    ended = torch.zeros_like(token, dtype=torch.bool)
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(memory.shape[1] if max_symbols is None else max_symbols):
        context, alpha, beta = attention.expect(state.hidden, ready, alpha, 0.0)
        state = decoder.step(token, context, state)
        token = decoder.best_symbol(state.hidden, context)
        ended = ended | (token == Tokenizer.eos_id)
        if ended.all():
            break
        rows.append((torch.where(ended, Tokenizer.eos_id, token), alpha, beta))
    if not rows:
        empty = memory.new_zeros(0, memory.shape[1])
        return [SoftDecoded([], empty, empty) for _ in memory]
    tokens, alphas, betas = (torch.stack(parts, 1) for parts in zip(*rows, strict=True))
    lengths = (tokens != Tokenizer.eos_id).int().cumprod(1).sum(1).tolist()
    return [SoftDecoded(tokens[b, :n].tolist(), alphas[b, :n], betas[b, :n]) for b, n in enumerate(lengths)]
