"""Soft decoding of whole memories: expected attention at every output step, greedy over symbols.

What softmax attention needs, and what Raffel 2017, section 4 reports beside hard decoding. Not online: nothing can be
said before the memory is complete.
"""

import torch
from torch import Tensor

from mocha_model.decoder import Decoder
from mocha_model.streaming import valid_mask
from mocha_model.tokenizer import Tokenizer


@torch.inference_mode()
def decode_softly(decoder: Decoder, memory: Tensor, num_memory: Tensor) -> list[list[int]]:
    """Symbols of each row of `memory` [B, T, D] with lengths `num_memory` [B], without eos.

    At most as many as its row has entries.
    """
    attention = decoder.attention
    ready = attention.prepare(memory, valid_mask(num_memory, memory.shape[1]))
    state, alpha = decoder.init_state(len(memory)), attention.first_alignment(ready)
    token = num_memory.new_full((len(memory),), Tokenizer.sos_id)
    ended = torch.zeros_like(token, dtype=torch.bool)
    found: list[list[int]] = [[] for _ in memory]
    for number in range(memory.shape[1]):
        step = attention.expect(state.hidden, ready, alpha, 0.0)
        alpha = step.alpha
        state = decoder.step(token, step.context, state)
        token = decoder.symbol_scores(state.hidden, step.context).argmax(dim=1)
        ended = ended | (token == Tokenizer.eos_id) | (num_memory <= number)
        if ended.all():
            break
        for row, (symbol, over) in enumerate(zip(token.tolist(), ended.tolist(), strict=True)):
            if not over:
                found[row].append(symbol)
    return found
