"""Greedy search for live text and, beside it, a joint search that settles the text of each segment when it ends.

What greedy search emits is emitted as ever, at the same frames. The joint search hears the same frames and ends its
segments where the greedy one does, or by itself where that has heard nothing; what it makes of a segment is told as
symbols that revise it, before the segment's end. Knows nothing of samples or text.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from mocha_model.joint import JointSearch
from mocha_model.search import GreedySearch, SearchState, Symbol
from mocha_model.streaming import where_rows
from mocha_model.tokenizer import Tokenizer
from mocha_model.wide import WideState


class Place(IntEnum):
    """Order of events at one frame. What closes a segment comes with its last symbols, then with its end."""

    CLOSED_BEFORE = -2
    LIVE = 0
    SETTLED = 1
    CLOSED_AFTER = 2


@dataclass(frozen=True)
class RevisedState:
    """A stream between steps; constant size."""

    live: SearchState
    settling: WideState


class RevisedSearch:
    """Behind the interface of `GreedySearch`. Its scorers are those of `settling`; `live` has the last of them."""

    def __init__(self, live: GreedySearch, settling: JointSearch) -> None:
        self.live, self.settling = live, settling
        self.num_scorers = len(live.fusion.parts)

    def init_state(
        self, batch_size: int, scorers: tuple[Any, ...] | None = None, pause: Tensor | None = None
    ) -> RevisedState:
        """See `GreedySearch.init_state`."""
        first = None if scorers is None else scorers[len(scorers) - self.num_scorers :]
        live = self.live.init_state(batch_size, first, pause)
        return RevisedState(live, self.settling.init_state(batch_size, scorers, pause))

    def step(
        self, memory: Tensor, labels: Tensor, num_valid: Tensor, state: RevisedState, phones: Tensor | None = None
    ) -> tuple[list[Symbol], RevisedState]:
        """See `WideSearch.step`; the symbols that revise a segment come before its end."""
        emitted, live = self.live.step(memory, labels, num_valid, state.live)
        ends = _Ends(emitted, state.live, memory.shape[1])
        events = _Events([(symbol, _how_it_ends(symbol)) for symbol in emitted])
        search, settling = self.settling, state.settling
        keys, values = search.joined(memory, phones, settling)
        for t in range(memory.shape[1]):
            real, frame, heard = t < num_valid, settling.num_frames, search.chunk(keys, values, t)
            new = search.hear(labels[:, t], settling)
            by_itself = search.is_quiet(new, frame) & ~ends.open[:, t]
            new = self._close((ends.before[:, t] | by_itself) & real, new, frame, events, Place.CLOSED_BEFORE, heard)
            symbols: list[Symbol] = []
            new = search.search_frame(*heard, labels[:, t], frame, new, symbols, real)
            events.settled(symbols, frame, Place.SETTLED)
            new = self._close(ends.after[:, t] & real, new, frame, events, Place.CLOSED_AFTER, heard)
            settling = new if real.all() else where_rows(real, new, settling)
        return events.in_order(), RevisedState(live, search.kept(keys, values, num_valid, settling))

    def flush(self, rows: Tensor, state: RevisedState) -> tuple[list[Symbol], RevisedState]:
        """See `GreedySearch.flush`."""
        emitted, live = self.live.flush(rows, state.live)
        symbols, settling = self.settling.flush(rows, state.settling)
        events = _Events([(symbol, Place.CLOSED_AFTER) for symbol in emitted])
        events.settled(symbols, state.settling.num_frames - 1, Place.CLOSED_AFTER)
        return events.in_order(), RevisedState(live, settling)

    def _close(
        self,
        rows: Tensor,
        state: WideState,
        frame: Tensor,
        events: "_Events",
        place: "Place",
        heard: tuple[Tensor, Tensor],
    ) -> WideState:
        """End the segments of `rows` [B] bool before or after `frame` [B], with which keys and values `heard` end."""
        if not rows.any():
            return state
        symbols: list[Symbol] = []
        state = self.settling.close(rows, state, frame + int(place is Place.CLOSED_AFTER), symbols, *heard)
        events.settled(symbols, frame, place)
        return state


def _how_it_ends(symbol: Symbol) -> Place:
    """Greedy search ends a segment before a frame that is quiet for too long, or by a symbol selected at a frame."""
    return Place.CLOSED_AFTER if symbol.p > 0 else Place.CLOSED_BEFORE


class _Ends:
    """Where the live segments of a block of frames are open and end, each [B, T] bool."""

    def __init__(self, emitted: list[Symbol], state: SearchState, num_frames: int) -> None:
        self.open = state.open[:, None].repeat(1, num_frames)
        self.before, self.after = torch.zeros_like(self.open), torch.zeros_like(self.open)
        first = state.num_frames.tolist()
        for symbol in emitted:
            at = symbol.frame - first[symbol.row]
            if symbol.token != Tokenizer.eos_id:
                self.open[symbol.row, at:] = True
            elif _how_it_ends(symbol) is Place.CLOSED_BEFORE:
                self.before[symbol.row, at] = True
                self.open[symbol.row, at:] = False
            else:
                self.after[symbol.row, at] = True
                self.open[symbol.row, at + 1 :] = False


class _Events:
    """Symbols of both searches, to be told in the order of their frames whatever order they were found in."""

    def __init__(self, emitted: list[tuple[Symbol, Place]]) -> None:
        """`emitted` are the live ones, each with where it is if it is an end."""
        self._placed: list[tuple[int, int, Symbol]] = []
        self._ends: set[tuple[int, int, int]] = set()
        for symbol, place in emitted:
            if symbol.token == Tokenizer.eos_id:
                self._end(symbol, symbol.frame, place)
            else:
                self._placed.append((symbol.frame, Place.LIVE, symbol))

    def settled(self, symbols: list[Symbol], frame: Tensor, place: Place) -> None:
        """Add what the joint search told at `frame` [B]; ends that the live search told too are told once."""
        for symbol in symbols:
            at = int(frame[symbol.row])
            if symbol.token == Tokenizer.eos_id:
                self._end(symbol, at, place)
            else:
                self._placed.append((at, place, replace(symbol, revises=True)))

    def in_order(self) -> list[Symbol]:
        """All of them; those of one frame and place as they were added."""
        return [symbol for _, _, symbol in sorted(self._placed, key=lambda event: event[:2])]

    def _end(self, symbol: Symbol, at: int, place: Place) -> None:
        key = (symbol.row, at, place)
        if key not in self._ends:
            self._ends.add(key)
            self._placed.append((at, place + 1, symbol))
