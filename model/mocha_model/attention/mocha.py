"""Monotonic chunkwise attention as a layer: energies, the training-time step, and the pieces of the online process.

Both energies share one tanh over [B, T, 2d]; their parameters stay separate, as in the paper. Knows nothing of search.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mocha_model.attention.alignment import chunkwise_alignment, monotonic_alignment, simplified_alignment
from mocha_model.config import AttentionConfig


@dataclass(frozen=True)
class MochaKeys:
    """A memory made ready for attention.

    Attributes:
        keys: [B, T, 2d] ``W_h h + b`` of the monotonic energy (first d) and of the chunk energy (last d).
        values: [B, T, D] the memory itself.
        mask: [B, T] bool, true where the memory is real.
        directions: [2d, 2], see `MochaAttention.directions`.

    """

    keys: Tensor
    values: Tensor
    mask: Tensor
    directions: Tensor


class MochaAttention(nn.Module):
    """MonotonicEnergy and ChunkEnergy, both ``g v/|v| . tanh(W_s s + W_h h + b) + r`` (Chiu & Raffel 2018, eq. 13)."""

    def __init__(self, memory_size: int, query_size: int, config: AttentionConfig) -> None:
        super().__init__()
        self.config = config
        size = config.size
        self.memory_projection = nn.Linear(memory_size, 2 * size)  # W_h and b of both
        self.query_projection = nn.Linear(query_size, 2 * size, bias=False)  # W_s of both
        self.direction = nn.Parameter(torch.randn(2, size))  # v
        self.gain = nn.Parameter(torch.full((2,), 1 / math.sqrt(size)))  # g
        self.bias = nn.Parameter(torch.tensor([config.initial_bias, 0.0]))  # r

    @property
    def chunk_width(self) -> int:
        """w, in memory entries."""
        return self.config.chunk_width

    def prepare(self, memory: Tensor, mask: Tensor) -> MochaKeys:
        """Project a memory [B, T, D] with its mask [B, T] once, for all output steps."""
        return MochaKeys(self.memory_projection(memory), memory, mask, self.directions())

    def directions(self) -> Tensor:
        """``g v/|v|`` of both energies as one block-diagonal matrix [2d, 2], so that one product gives both."""
        rows = self.direction * (self.gain / self.direction.norm(dim=1))[:, None]
        zeros = torch.zeros_like(rows[0])
        return torch.stack([torch.cat([rows[0], zeros]), torch.cat([zeros, rows[1]])], dim=1)

    def energies(self, query: Tensor, keys: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Monotonic and chunk energies e, u [B, T] float32 of decoder state `query` [B, S] over `keys` [B, T, 2d].

        `directions` is what `directions()` returned, computed once for many output steps.
        """
        hidden = (keys + self.query_projection(query)[:, None]).tanh()
        both = (hidden @ directions).float() + self.bias
        return both[..., 0], both[..., 1]

    def first_alignment(self, memory: MochaKeys) -> Tensor:
        """alpha_0 [B, T]: all mass on the first entry."""
        alpha = torch.zeros(memory.mask.shape, dtype=torch.float32, device=memory.mask.device)
        alpha[:, 0] = 1.0
        return alpha

    def expect(self, query: Tensor, memory: MochaKeys, previous: Tensor, noise_std: float) -> tuple[Tensor, ...]:
        """One output step of training: expected context (Chiu & Raffel 2018, eqs. 20-26).

        Args:
            query: [B, S] decoder state s_{i-1}.
            memory: what `prepare` returned.
            previous: [B, T] alpha_{i-1}.
            noise_std: standard deviation of the noise before the sigmoid (1 in the paper; 0 for none).

        Returns:
            ``(context [B, D], alpha [B, T], beta [B, T])``, alignments in float32.

        """
        e, u = self.energies(query, memory.keys, memory.directions)
        if noise_std:
            e = e + noise_std * torch.randn_like(e)  # eqs. 21-22
        p = e.sigmoid() * memory.mask
        alpha = monotonic_alignment(p, previous) if self.config.alpha == "exact" else simplified_alignment(p)
        beta = chunkwise_alignment(alpha, u, self.chunk_width)
        context = torch.bmm(beta[:, None].to(memory.values.dtype), memory.values)[:, 0]  # eq. 26
        return context, alpha, beta

    def energy_along(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Monotonic energies e [...] float32 of single pairs: each of `queries` [..., S] with its `keys` [..., 2d]."""
        size, direction = self.config.size, self.directions()[: self.config.size, 0]
        hidden = keys[..., :size] + nn.functional.linear(queries, self.query_projection.weight[:size])
        return (hidden.tanh() @ direction).float() + self.bias[0]

    def attend_chunk(self, u: Tensor, values: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax attention over one chunk per row (Chiu & Raffel 2018, eq. 16).

        Args: `u` [R, w] energies, `values` [R, w, D], `valid` [R, w] bool (false before the start of the memory).
        Returns: ``(context [R, D], weights [R, w])``.
        """
        weights = u.masked_fill(~valid, -torch.inf).softmax(dim=1)
        return torch.bmm(weights[:, None].to(values.dtype), values)[:, 0], weights
