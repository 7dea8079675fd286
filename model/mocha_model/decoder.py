"""The decoder: embedding of the last symbol, one LSTM, output layer over [state; context] (or the state alone).

`step` is one output step for any set of rows; `teacher_forced` runs it over whole transcripts with expected attention.
Knows nothing of search.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mocha_model.attention import Attention, Memory
from mocha_model.config import ModelConfig
from mocha_model.decoder_loop import along_path
from mocha_model.encoder import RecurrentState
from mocha_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class TeacherForced:
    """What a transcript gives under expected attention.

    Attributes:
        logits: [B, U, V] before the softmax, output step i predicting token i.
        p, alpha, beta: [B, U, T] float32, see `Expected`.

    """

    logits: Tensor
    p: Tensor
    alpha: Tensor
    beta: Tensor


@dataclass(frozen=True)
class AlongPath:
    """What a transcript gives when every token is selected at a known frame.

    Attributes:
        logits: [B, U, V] before the softmax, output step i predicting token i.
        energies: [B, T + U - 1] float32, monotonic energies e of all decisions that algorithm 1 takes on this path.
        selects: [B, T + U - 1] bool, whether the path selects at that decision.
        decides: [B, T + U - 1] bool, false where the decision is not part of the row's path.

    """

    logits: Tensor
    energies: Tensor
    selects: Tensor
    decides: Tensor


class Decoder(nn.Module):
    """Chiu & Raffel 2018, eqs. 2-3, with MoChA for the context."""

    never: Tensor  # [V], added to the logits of symbols that cannot be written

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        memory_size, size = config.encoder.output_size, config.decoder.lstm_size
        self.attention = Attention(memory_size, size, config.attention)
        self.embedding = nn.Embedding(config.vocab_size, config.decoder.embedding_size)
        self.cell = nn.LSTMCell(config.decoder.embedding_size + memory_size, size)
        self.dropout = nn.Dropout(config.decoder.dropout)
        self.output_context = config.decoder.output_context
        self.output = nn.Linear(size + (memory_size if self.output_context else 0), config.vocab_size)
        never = torch.zeros(config.vocab_size)
        never[[Tokenizer.blank_id, Tokenizer.sos_id, Tokenizer.unk_id]] = -torch.inf
        self.register_buffer("never", never, persistent=False)

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
        seen = torch.cat([hidden, context], dim=-1) if self.output_context else hidden
        result: Tensor = self.output(self.dropout(seen))
        return result

    def symbol_scores(self, hidden: Tensor, context: Tensor) -> Tensor:
        """Log-probabilities [R, V] float32 of symbols that can be written: blank, start and unknown have none."""
        return (self.logits(hidden, context).float() + self.never).log_softmax(dim=1)

    def teacher_forced(self, memory: Memory, tokens: Tensor, noise_std: float) -> TeacherForced:
        """Expected attention over whole transcripts; y_{i-1} is the reference (Chiu & Raffel 2018, algorithm 1, note).

        `tokens` [B, U] int64 end with eos and are padded with 0; memories as `Attention.prepare` makes them.
        """
        batch_size, num_steps = tokens.shape
        start = torch.full((batch_size, 1), Tokenizer.sos_id, dtype=tokens.dtype, device=tokens.device)
        inputs = torch.cat([start, tokens[:, :-1]], dim=1)
        state, alpha = self.init_state(batch_size), self.attention.first_alignment(memory)
        steps, hiddens = [], []
        for i in range(num_steps):
            steps.append(self.attention.expect(state.hidden, memory, alpha, noise_std))
            alpha = steps[-1].alpha
            state = self.step(inputs[:, i], steps[-1].context, state)
            hiddens.append(state.hidden)
        contexts, p, alphas, betas = (
            torch.stack([getattr(s, name) for s in steps], 1) for name in ("context", "p", "alpha", "beta")
        )
        return TeacherForced(self.logits(torch.stack(hiddens, 1), contexts), p, alphas, betas)

    def along_path(self, memory: Memory, tokens: Tensor, num_tokens: Tensor, frames: Tensor) -> AlongPath:
        """Hard attention over whole transcripts along a given path, in O(T + U) instead of O(T U) energies.

        Follows Chiu & Raffel 2018, algorithm 1, with t_i given: token i attends to the chunk that ends at `frames`
        [B, U] int64 (strictly rising over real tokens). -1 is "never selected": the decoder passes over the rest of
        the memory and is given the zero context, as at the end of the input. `tokens` [B, U] and `num_tokens` [B] as
        for `teacher_forced`.
        """
        batch_size, num_steps = tokens.shape
        attention, length = self.attention, memory.mask.shape[1]
        chunks = frames[..., None] + torch.arange(1 - attention.chunk_width, 1, device=frames.device)  # [B, U, w]
        earlier = torch.nn.functional.pad(frames[:, :-1], (1, 0))  # t_{i-1}; t_0 is the first frame
        inside = attention.chunk_mask(frames, earlier, torch.zeros_like(frames))
        row = torch.arange(batch_size, device=frames.device)[:, None]
        flat = (row[..., None] * length + chunks.clamp(min=0)).flatten()
        energies = attention.energies
        chunk = slice(energies.size, None)  # of the keys; empty for hard monotonic attention, whose chunk is one frame
        keys = memory.keys.flatten(0, 1)[:, chunk].index_select(0, flat).view(*chunks.shape, -1)
        values = memory.values.flatten(0, 1).index_select(0, flat).view(*chunks.shape, -1)
        embedded = self.embedding(torch.nn.functional.pad(tokens[:, :-1], (1, 0), value=Tokenizer.sos_id))
        from_token, from_context = torch.split(self.cell.weight_ih, [embedded.shape[2], values.shape[3]], dim=1)
        hidden, context = along_path(
            torch.nn.functional.linear(embedded, from_token, self.cell.bias_ih + self.cell.bias_hh).to(
                self.cell.weight_hh
            ),
            keys,
            values,
            inside,
            from_context.t(),
            self.cell.weight_hh.t(),
            energies.query_projection.weight[chunk].t(),
            energies.vectors()[1:].flatten(),
        )
        logits = self.logits(hidden, context)
        # Every frame is decided on by the token that waits there, and the frame of each selection once more by the
        # token after it, since the pointer is inclusive.
        ends = torch.where(frames >= 0, frames, length)
        place = torch.arange(length, device=frames.device).expand(batch_size, length).contiguous()
        waiting = torch.minimum(torch.searchsorted(ends, place), num_tokens[:, None] - 1)  # [B, T]
        states = torch.nn.functional.pad(hidden[:, :-1], (0, 0, 1, 0))  # s_{i-1}
        first = energies.pairs(0, states[row, waiting], memory.keys)
        again = energies.pairs(0, states[:, 1:], memory.keys[row, frames[:, :-1].clamp(min=0)])
        real = torch.arange(1, num_steps, device=frames.device) < num_tokens[:, None]
        return AlongPath(
            logits,
            energies=torch.cat([first, again], 1),
            selects=torch.cat([place == ends.gather(1, waiting), torch.zeros_like(real)], 1),
            decides=torch.cat([memory.mask, real & (frames[:, :-1] >= 0)], 1),
        )
