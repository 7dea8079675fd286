"""The decoder: embedding of the last symbol, one LSTM, output layer over [state; context].

`step` is one output step for any set of rows; `teacher_forced` runs it over whole transcripts with expected attention.
Knows nothing of search.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mocha_model.attention import MochaAttention, MochaKeys
from mocha_model.config import ModelConfig
from mocha_model.encoder import RecurrentState
from mocha_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class TeacherForced:
    """What a transcript gives under expected attention.

    Attributes:
        logits: [B, U, V] before the softmax, output step i predicting token i.
        alpha: [B, U, T] monotonic alignment, float32.
        beta: [B, U, T] chunkwise alignment, float32.

    """

    logits: Tensor
    alpha: Tensor
    beta: Tensor


class Decoder(nn.Module):
    """Chiu & Raffel 2018, eqs. 2-3, with MoChA for the context."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        memory_size, size = config.encoder.projection_size, config.decoder.lstm_size
        self.attention = MochaAttention(memory_size, size, config.attention)
        self.embedding = nn.Embedding(config.vocab_size, config.decoder.embedding_size)
        self.cell = nn.LSTMCell(config.decoder.embedding_size + memory_size, size)
        self.dropout = nn.Dropout(config.decoder.dropout)
        self.output = nn.Linear(size + memory_size, config.vocab_size)

    def init_state(self, batch_size: int) -> RecurrentState:
        """s_0 = 0, [B, S]."""
        zeros = self.output.weight.new_zeros(batch_size, self.cell.hidden_size)
        return RecurrentState(zeros, zeros.clone())

    def step(self, token: Tensor, context: Tensor, state: RecurrentState) -> RecurrentState:
        """s_i from y_{i-1} `token` [R] int64, c_i `context` [R, D] and s_{i-1}."""
        hidden, cell = self.cell(torch.cat([self.embedding(token), context], 1), (state.hidden, state.cell))
        return RecurrentState(hidden, cell)

    def logits(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Output layer: [..., S] and [..., D] to [..., V]."""
        result: Tensor = self.output(self.dropout(torch.cat([hidden, context], dim=-1)))
        return result

    def teacher_forced(self, memory: MochaKeys, tokens: Tensor, noise_std: float) -> TeacherForced:
        """Expected attention over whole transcripts; y_{i-1} is the reference (Chiu & Raffel 2018, algorithm 1, note).

        `tokens` [B, U] int64 end with eos and are padded with 0; memories as `MochaAttention.prepare` makes them.
        """
        batch_size, num_steps = tokens.shape
        start = torch.full((batch_size, 1), Tokenizer.sos_id, dtype=tokens.dtype, device=tokens.device)
        inputs = torch.cat([start, tokens[:, :-1]], dim=1)
        state, alpha = self.init_state(batch_size), self.attention.first_alignment(memory)
        hiddens, contexts, alphas, betas = [], [], [], []
        for i in range(num_steps):
            context, alpha, beta = self.attention.expect(state.hidden, memory, alpha, noise_std)
            state = self.step(inputs[:, i], context, state)
            hiddens.append(state.hidden)
            contexts.append(context)
            alphas.append(alpha)
            betas.append(beta)
        logits = self.logits(torch.stack(hiddens, 1), torch.stack(contexts, 1))
        return TeacherForced(logits, torch.stack(alphas, 1), torch.stack(betas, 1))
