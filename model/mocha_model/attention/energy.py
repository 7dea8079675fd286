"""Energy functions over a memory: how well a query fits each entry. Knows nothing of what is made of them."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

EnergyKind = Literal["normalized", "additive", "dot"]


class Energies(nn.Module):
    """One or two energy functions with parameters of their own, evaluated together.

    - "normalized": ``g v/|v| . tanh(W_s s + W_h h + b) + r`` (Raffel 2017, eq. 16; Chiu & Raffel 2018, eq. 13)
    - "additive": ``v . tanh(W_s s + W_h h + b)`` (Raffel 2017, eq. 15)
    - "dot": ``g s . W h + r`` (Raffel 2017, eq. 17)
    """

    def __init__(self, memory_size: int, query_size: int, size: int, kind: EnergyKind, biases: list[float]) -> None:
        """`biases` are the initial r, one per function; `size` is d, the hidden size (not used by "dot")."""
        super().__init__()
        count = len(biases)
        self.kind, self.count, self.memory_size = kind, count, memory_size
        self.size = query_size if kind == "dot" else size  # of the part of a key that one function uses
        self.memory_projection = nn.Linear(memory_size, count * self.size, bias=kind != "dot")  # W_h and b
        if kind != "dot":
            self.query_projection = nn.Linear(query_size, count * size, bias=False)  # W_s
            self.direction = nn.Parameter(torch.randn(count, size))  # v
        if kind == "additive":
            nn.init.uniform_(self.direction, -1 / math.sqrt(size), 1 / math.sqrt(size))
        else:
            self.gain = nn.Parameter(torch.full((count,), 1 / math.sqrt(self.size)))  # g
            self.bias = nn.Parameter(torch.tensor(biases))  # r

    @property
    def scalars(self) -> list[nn.Parameter]:
        """The scalars g and r, which learn at a rate of their own; none for "additive"."""
        return [] if self.kind == "additive" else [self.gain, self.bias]

    def forward(self, query: Tensor, keys: Tensor, directions: Tensor) -> Tensor:
        """Energies [B, T, E] float32 of `query` [B, S] over `keys` [B, T, E d], which are ``memory_projection(h)``.

        `directions` is what `directions` returned, computed once for many queries.
        """
        if self.kind == "dot":
            apart = keys.view(*keys.shape[:-1], self.count, self.size)
            products: Tensor = (apart @ query[:, None, :, None])[..., 0].float()
            return products * self.gain + self.bias
        hidden = (keys + self.query_projection(query)[:, None]).tanh()
        both: Tensor = (hidden @ directions).float()
        return both if self.kind == "additive" else both + self.bias

    def pairs(self, which: int, queries: Tensor, keys: Tensor, vectors: Tensor | None = None) -> Tensor:
        """Energies [...] float32 of function `which`, each of `queries` [..., S] with its `keys` [..., E d].

        `vectors` is what `vectors` returned, if at hand.
        """
        part = slice(which * self.size, (which + 1) * self.size)
        if self.kind == "dot":
            product: Tensor = (keys[..., part] * queries).sum(-1).float()
            return product * self.gain[which] + self.bias[which]
        hidden = (keys[..., part] + linear(queries, self.query_projection.weight[part])).tanh()
        energy: Tensor = (hidden @ (self.vectors() if vectors is None else vectors)[which]).float()
        return energy if self.kind == "additive" else energy + self.bias[which]

    def vectors(self) -> Tensor:
        """What each tanh is multiplied by, [E, d]: v, or ``g v/|v|``; empty for "dot"."""
        if self.kind == "dot":
            return self.gain.new_zeros(0)
        if self.kind == "additive":
            return self.direction
        scale: Tensor = self.gain / self.direction.norm(dim=1)
        return self.direction * scale[:, None]

    def directions(self) -> Tensor:
        """`vectors` as a block-diagonal matrix [E d, E], so that one product gives all energies; empty for "dot"."""
        if self.kind == "dot":
            return self.vectors()
        return torch.block_diag(*self.vectors()[:, :, None])  # type: ignore[no-untyped-call, no-any-return]
