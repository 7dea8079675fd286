"""Attention as a layer: every mechanism of the papers behind one training step, and the pieces of the online process.

Knows nothing of search, and nothing of speech: a memory is any sequence of vectors.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mocha_model.attention.alignment import (
    adaptive_chunkwise_alignment,
    chunkwise_alignment,
    monotonic_alignment,
    simplified_alignment,
)
from mocha_model.attention.energy import Energies
from mocha_model.config import AttentionConfig


@dataclass(frozen=True)
class Memory:
    """A memory made ready for attention.

    Attributes:
        keys: [B, T, E d] ``W_h h + b`` of every energy function, the monotonic one first.
        values: [B, T, D] the memory itself.
        mask: [B, T] bool, true where the memory is real.
        directions: see `Energies.directions`.

    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    directions: Tensor


@dataclass(frozen=True)
class Expected:
    """One output step under expected attention.

    Attributes:
        context: [B, D] c_i.
        p: [B, T] float32 selection probabilities; for softmax attention its weights.
        alpha: [B, T] float32, where the monotonic attention selects; for softmax attention its weights.
        beta: [B, T] float32, what the context is made of.

    """

    context: Tensor
    p: Tensor
    alpha: Tensor
    beta: Tensor


class Attention(nn.Module):
    """Softmax attention, hard monotonic attention, MoChA or MAtChA, as the configuration says."""

    def __init__(self, memory_size: int, query_size: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        biases = {
            "softmax": [0.0],  # of the chunk energy
            "monotonic": [config.initial_bias],
            "mocha": [config.initial_bias, 0.0],
            "matcha": [config.initial_bias, 0.0],
        }[config.mechanism]
        self.energies = Energies(memory_size, query_size, config.size, config.energy, biases)

    @property
    def is_online(self) -> bool:
        """Whether there is an online process; softmax attention needs the whole memory."""
        return self.config.mechanism != "softmax"

    @property
    def chunk_width(self) -> int:
        """Memory entries that a selection may attend to: w, 1 for hard monotonic attention, MAtChA's bound."""
        return 1 if self.config.mechanism == "monotonic" else self.config.chunk_width

    def prepare(self, values: Tensor, mask: Tensor) -> Memory:
        """Project a memory [B, T, D] with its mask [B, T] once, for all output steps."""
        return Memory(self.energies.memory_projection(values), values, mask, self.energies.directions())

    def first_alignment(self, memory: Memory) -> Tensor:
        """alpha_0 [B, T]: all mass on the first entry."""
        alpha = torch.zeros(memory.mask.shape, dtype=torch.float32, device=memory.mask.device)
        alpha[:, 0] = 1.0
        return alpha

    def both_energies(self, query: Tensor, keys: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Monotonic and chunk energies e, u, each [B, T] float32; a mechanism's only function is e, and u is 0."""
        both = self.energies(query, keys, directions)
        return both[..., 0], both[..., 1] if both.shape[-1] > 1 else torch.zeros_like(both[..., 0])

    def expect(self, query: Tensor, memory: Memory, previous: Tensor, noise_std: float) -> Expected:
        """One output step of training, or of soft decoding: the expected context.

        Args:
            query: [B, S] decoder state s_{i-1}.
            memory: what `prepare` returned.
            previous: [B, T] alpha_{i-1}; not used by softmax attention and by simplified alpha.
            noise_std: standard deviation of the noise before the sigmoid (1 in the papers; 0 for none).

        """
        e, u = self.both_energies(query, memory.keys, memory.directions)
        if self.config.mechanism == "softmax":
            p = alpha = beta = e.masked_fill(~memory.mask, -torch.inf).softmax(dim=1)
        else:
            if noise_std:
                e = e + noise_std * torch.randn_like(e)  # Chiu & Raffel 2018, eqs. 21-22
            p = e.sigmoid() * memory.mask
            alpha = monotonic_alignment(p, previous) if self.config.alpha == "exact" else simplified_alignment(p)
            if self.config.mechanism == "monotonic":
                beta = alpha  # Raffel 2017, eq. 14
            elif self.config.mechanism == "mocha":
                beta = chunkwise_alignment(alpha, u, self.chunk_width)  # Chiu & Raffel 2018, eqs. 24-25
            else:
                beta = adaptive_chunkwise_alignment(p, previous, u)  # Chiu & Raffel 2018, eq. 28
        context = torch.bmm(beta[:, None].to(memory.values.dtype), memory.values)[:, 0]  # eq. 26
        return Expected(context, p, alpha, beta)

    def chunk_mask(self, frames: Tensor, previous: Tensor, start: Tensor) -> Tensor:
        """Which of the `chunk_width` entries up to t_i = `frames` [...] an online selection attends to: bool [..., w].

        `previous` [...] is t_{i-1} and `start` [...] the first entry of the memory that the decoder began with.
        """
        width = self.chunk_width
        entries = frames[..., None] + torch.arange(1 - width, 1, device=frames.device)
        first = torch.maximum(previous, start) if self.config.mechanism == "matcha" else torch.zeros_like(frames)
        return (entries >= first[..., None]) & (frames >= 0)[..., None]

    def attend_chunk(self, u: Tensor, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax attention over one chunk per row (Chiu & Raffel 2018, eqs. 16 and 27).

        Args: `u` [R, w] energies, `values` [R, w, D], `valid` [R, w] bool (false outside the chunk).
        Returns: ``(context [R, D], weights [R, w])``.
        """
        weights = u.masked_fill(~valid, -torch.inf).softmax(dim=1)
        return torch.bmm(weights[:, None].to(values.dtype), values)[:, 0], weights
