"""The step/state contract that every layer keeps, and the arithmetic of ragged batches behind it.

A layer has ``init_state(batch_size)`` and ``step(x, num_valid, state) -> (y, num_out, state)``. State is a frozen
dataclass tree of batch-first tensors whose size does not depend on how much was heard. `step` never changes the state
it is given, and a row with ``num_valid == 0`` comes back bit-identical. Offline is one `step` over everything.

This module knows nothing of audio or attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def map_state(function: Callable[..., Any], *states: Any) -> Any:
    """Apply `function` to the tensors at the same place of each state tree; returns a tree of what it returns."""
    first = states[0]
    if isinstance(first, Tensor):
        return function(*states)
    if isinstance(first, tuple):
        return tuple(map_state(function, *items) for items in zip(*states, strict=True))
    kind: Any = type(first)
    if names := _field_names(kind):
        return kind(*(map_state(function, *(getattr(s, name) for s in states)) for name in names))
    raise TypeError(f"a state holds tensors, tuples and dataclasses, not {type(first).__name__}")


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def gather_rows(state: State, index: Tensor) -> State:
    """Copy of the rows `index` [K] int64 of every tensor in `state`."""
    gathered: State = map_state(lambda tensor: tensor.index_select(0, index), state)
    return gathered


def first_rows(state: State, count: int) -> State:
    """View of the first `count` rows of every tensor in `state`."""
    first: State = map_state(lambda tensor: tensor[:count], state)
    return first


def scatter_rows(pool: State, index: Tensor, rows: State) -> None:
    """Write `rows` (K rows) over the rows `index` [K] int64 of `pool`, in place; the caller owns the pool."""
    map_state(lambda into, new: into.index_copy_(0, index, new), pool, rows)


def with_rows(state: State, index: Tensor, rows: State) -> State:
    """`state` with `rows` (K rows) in the place of its rows `index` [K] int64; a copy."""
    replaced: State = map_state(lambda old, new: old.index_copy(0, index, new), state, rows)
    return replaced


def where_rows(rows: Tensor, chosen: State, other: State) -> State:
    """Row by row `chosen` where `rows` [B] bool is true, else `other`."""

    def select(a: Tensor, b: Tensor) -> Tensor:
        if a is b:
            return a
        return torch.where(rows.view(-1, *(1,) * (a.dim() - 1)), a, b)

    merged: State = map_state(select, chosen, other)
    return merged


def state_bytes(state: Any) -> int:
    """Bytes of all tensors in a state tree."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    map_state(add, state)
    return total


def valid_mask(num_valid: Tensor, length: int) -> Tensor:
    """Mask [B, length] bool of the first ``num_valid`` [B] places of each row."""
    return torch.arange(length, device=num_valid.device) < num_valid[:, None]


def is_uniform(num_valid: Tensor, length: int) -> bool:
    """Whether every row is full, so that no row needs its own end."""
    return bool((num_valid == length).all())


def take_ends(x: Tensor, ends: Tensor, width: int) -> Tensor:
    """The `width` items before ``ends`` [B] of each row of `x` [B, N, ...] -> [B, width, ...]; needs ends >= width."""
    if len(ends) and is_uniform(ends, int(ends[0])):
        return x[:, int(ends[0]) - width : int(ends[0])].clone()  # keeps nothing else of `x` in memory
    index = ends[:, None] - width + torch.arange(width, device=x.device)
    return x.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))


@dataclass(frozen=True)
class WindowState:
    """What a sliding window has yet to use.

    Attributes:
        held: [B, K, ...] the newest items, right-aligned.
        num_held: [B] int64, how many of them are real.

    """

    held: Tensor
    num_held: Tensor


@dataclass(frozen=True)
class SlidingWindow:
    """Gathers items into windows of `width`, `hop` apart, across steps: the one place where ragged rows are aligned."""

    width: int
    hop: int

    def init_state(self, batch_size: int, item_shape: tuple[int, ...], history: int, like: Tensor) -> WindowState:
        """State that begins with `history` zero items (causal padding), on the device and dtype of `like`."""
        held = like.new_zeros((batch_size, self.width - 1, *item_shape))
        return WindowState(held, torch.full((batch_size,), history, dtype=torch.int64, device=like.device))

    def step(self, x: Tensor, num_valid: Tensor, state: WindowState) -> tuple[Tensor, Tensor, WindowState]:
        """Prepend what is held to `x` [B, N, ...].

        Returns ``(joined [B, M, ...], num_windows [B], state)``: window i of a row is ``joined[i*hop : i*hop+width]``.
        """
        batch_size, kept = x.shape[0], self.width - 1
        if batch_size and is_uniform(state.num_held, int(state.num_held[0])) and is_uniform(num_valid, x.shape[1]):
            return self._step_together(x, num_valid, int(state.num_held[0]), state)
        joined = torch.cat([state.held, x], dim=1)
        num_joined = state.num_held + num_valid
        num_windows = ((num_joined - self.width).div(self.hop, rounding_mode="floor") + 1).clamp(min=0)
        if batch_size and bool((state.num_held == state.num_held[0]).all()):
            left = joined[:, kept - int(state.num_held[0]) :]
        else:
            start = kept - state.num_held
            index = (start[:, None] + torch.arange(joined.shape[1], device=x.device)).clamp(max=joined.shape[1] - 1)
            left = joined.gather(1, index.view(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
        held = take_ends(joined, kept + num_valid, kept) if kept else state.held
        num_held = num_joined - num_windows * self.hop
        # A window never needs more than width - 1 old items: hop <= width is checked where windows are made.
        return left, num_windows, WindowState(held, num_held)

    def _step_together(
        self, x: Tensor, num_valid: Tensor, num_held: int, state: WindowState
    ) -> tuple[Tensor, Tensor, WindowState]:
        """`step` for rows that all have held and get the same number: slices instead of gathers."""
        kept, num_joined = self.width - 1, num_held + x.shape[1]
        num_windows = max(0, (num_joined - self.width) // self.hop + 1)
        left = torch.cat([state.held[:, kept - num_held :], x], dim=1)
        whole = left if num_joined >= kept else torch.cat([state.held, x], dim=1)
        held = whole[:, whole.shape[1] - kept :].clone()  # keeps nothing else of the step in memory
        new = torch.full_like(state.num_held, num_joined - num_windows * self.hop)
        return left, torch.full_like(num_valid, num_windows), WindowState(held, new)
