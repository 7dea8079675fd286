"""Greedy search over the online attention process, batched over streams.

Chiu & Raffel 2018, algorithm 1: per row a pointer, the decoder state and the last symbol. Each turn of the loop emits
one symbol for every row whose attention fires in the frames on hand; rows that do not fire have inspected all of them,
so only the last w - 1 frames are kept. Segments end here too, frame by frame, so that chunking cannot move them.
Knows nothing of samples or text.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mocha_model.config import DecoderConfig
from mocha_model.decoder import Decoder
from mocha_model.encoder import RecurrentState
from mocha_model.scorers import Fusion
from mocha_model.streaming import gather_rows, scatter_rows, take_ends
from mocha_model.tokenizer import Tokenizer

WINDOW_FRAMES = 32  # frames looked at together; bounds the cost of a turn on long inputs, changes no result


@dataclass(frozen=True)
class SearchState:
    """A stream between steps; constant size.

    Attributes:
        decoder: s_{i-1}, [B, S] each.
        token: [B] int64, y_{i-1}.
        keys, values: [B, w-1, E d] and [B, w-1, D], the newest frames.
        num_frames: [B] int64, frames so far.
        start: [B] int64, first frame of the segment.
        last_emission: [B] int64, frame of the newest symbol, -1 before any.
        repeats: [B] int64, symbols emitted at that frame.
        last_voiced: [B] int64, newest frame where the CTC head hears a character, -1 before any.
        open: [B] bool, whether the segment has a character.
        scorers: states of what is fused, if anything.
        pause: [B] int64, frames without a character (by CTC) or an emission that end a segment.

    """

    decoder: RecurrentState
    token: Tensor
    keys: Tensor
    values: Tensor
    num_frames: Tensor
    start: Tensor
    last_emission: Tensor
    repeats: Tensor
    last_voiced: Tensor
    open: Tensor
    scorers: tuple[Any, ...]
    pause: Tensor


@dataclass(frozen=True, slots=True)
class Symbol:
    """One event of a row: a symbol chosen at `frame`, or the segment's end.

    `p` is the selection probability of the frame, `q` the probability of the symbol there, `weights` are the chunk's.
    `revises` is for symbols of `revised`, which replace what was emitted of their segment.
    """

    row: int
    token: int
    frame: int
    p: float
    q: float
    weights: tuple[float, ...]
    certain: int  # frame whose audio made it certain; `frame` itself in greedy search
    revises: bool = False


class OfflineModelError(ValueError):
    """Online decoding of an attention that needs the whole memory."""


class GreedySearch:
    """The online process over a `Decoder`; `fusion` adds to the scores of each next symbol."""

    def __init__(self, decoder: Decoder, config: DecoderConfig, space_id: int, fusion: Fusion | None = None) -> None:
        if not decoder.attention.is_online:
            raise OfflineModelError("softmax attention is offline: it cannot be streamed (decode it softly)")
        self.decoder, self.attention, self.space_id = decoder, decoder.attention, space_id
        self.config, self.energies = config, decoder.attention.energies
        self.width = decoder.attention.chunk_width
        self.fusion = fusion or Fusion(())

    def init_state(
        self, batch_size: int, scorers: tuple[Any, ...] | None = None, pause: Tensor | None = None
    ) -> SearchState:
        """Streams that have heard nothing; `scorers` is the state of the fusion, fresh if not given.

        `pause` [B] int64 is how many frames without a character end a segment, `config.endpoint_frames` if not given.
        """
        like = self.decoder.output.weight
        count = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        return SearchState(
            decoder=self.decoder.init_state(batch_size),
            token=count + Tokenizer.sos_id,
            keys=like.new_zeros(batch_size, self.width - 1, self.energies.memory_projection.out_features),
            values=like.new_zeros(batch_size, self.width - 1, self.energies.memory_size),
            num_frames=count,
            start=count.clone(),
            last_emission=count - 1,
            repeats=count.clone(),
            last_voiced=count - 1,
            open=count > 0,
            scorers=self.fusion.init_state(batch_size, like.device) if scorers is None else scorers,
            pause=count + self.config.endpoint_frames if pause is None else pause,
        )

    def step(
        self, memory: Tensor, labels: Tensor, num_valid: Tensor, state: SearchState
    ) -> tuple[list[Symbol], SearchState]:
        """Inspect new frames.

        Args:
            memory: [B, T, D] encoder output.
            labels: [B, T, V] what the CTC head makes of it; the probability of a symbol rises with its value.
            num_valid: [B] int64 real frames of each row.
            state: what `init_state`, `step` or `flush` returned.

        Returns:
            Symbols in the order of emission within each row, and the new state.

        """
        symbols: list[Symbol] = []
        voiced = labels.argmax(dim=2) != Tokenizer.blank_id
        for start in range(0, memory.shape[1], WINDOW_FRAMES):
            part = slice(start, start + WINDOW_FRAMES)
            valid = (num_valid - start).clamp(0, min(WINDOW_FRAMES, memory.shape[1] - start))
            found, state = self._window(memory[:, part], voiced[:, part], valid, state)
            symbols += found
        return symbols, state

    def _window(
        self, memory: Tensor, voiced: Tensor, num_valid: Tensor, state: SearchState
    ) -> tuple[list[Symbol], SearchState]:
        keys = torch.cat([state.keys, self.energies.memory_projection(memory)], dim=1)
        values = torch.cat([state.values, memory], dim=1)
        place = torch.arange(memory.shape[1], device=memory.device)
        frames = state.num_frames[:, None] + place  # [B, T] absolute
        real = place < num_valid[:, None]
        heard = torch.where(voiced & real, frames, -1)
        last_voiced = torch.maximum(heard.cummax(dim=1).values, state.last_voiced[:, None])
        turn = _Turn(keys, values, last_voiced, num_valid, state, self)
        symbols: list[Symbol] = []
        rows = num_valid.nonzero()[:, 0]
        pointer = torch.zeros_like(num_valid)  # relative; everything before this window has been inspected
        while len(rows):
            rows = turn.run(rows, pointer, symbols)
        kept = self.width - 1
        return symbols, replace(
            turn.state,
            keys=take_ends(keys, kept + num_valid, kept),
            values=take_ends(values, kept + num_valid, kept),
            num_frames=state.num_frames + num_valid,
            last_voiced=torch.where(num_valid > 0, last_voiced[:, -1], state.last_voiced),
        )

    def choose(self, hidden: Tensor, context: Tensor, scorers: tuple[Any, ...]) -> tuple[Tensor, Tensor, Any]:
        """The best symbol of each row [R] int64, its probability by the decoder alone [R], and the scorers after it."""
        scores = self.decoder.symbol_scores(hidden, context)
        token = (scores + self.fusion.scores(scorers)).argmax(dim=1)
        q = scores.gather(1, token[:, None])[:, 0].exp()
        return token, q, self.fusion.advance(scorers, token)

    def flush(self, rows: Tensor, state: SearchState) -> tuple[list[Symbol], SearchState]:
        """End the audio of `rows` [B] bool: the zero context until end-of-sequence, then a fresh state."""
        symbols: list[Symbol] = []
        active = (rows & state.open).nonzero()[:, 0]
        part = gather_rows(state, active)
        context = part.values.new_zeros(len(active), self.energies.memory_size)
        decoder, token, scorers = part.decoder, part.token, part.scorers
        going = [True] * len(active)
        names, last = active.tolist(), (part.num_frames - 1).tolist()
        nothing = (0.0,) * self.width
        for _ in range(self.config.max_emissions_at_end if len(active) else 0):
            decoder = self.decoder.step(token, context, decoder)
            previous = token.tolist()
            token, q, scorers = self.choose(decoder.hidden, context, scorers)
            for k, (chosen, likely) in enumerate(zip(token.tolist(), q.tolist(), strict=True)):
                going[k] = going[k] and chosen != Tokenizer.eos_id
                if going[k] and not chosen == previous[k] == self.space_id:
                    symbols.append(Symbol(names[k], chosen, last[k], 0.0, likely, nothing, last[k]))
            if not any(going):
                break
        for row, at in zip(names, last, strict=True):
            symbols.append(Symbol(row, Tokenizer.eos_id, at, 0.0, 1.0, nothing, at))
        index = rows.nonzero()[:, 0]
        new = gather_rows(state, torch.arange(len(rows), device=rows.device))
        scorers = self.fusion.restart(gather_rows(state.scorers, index))
        scatter_rows(new, index, self.init_state(len(index), scorers, state.pause[index]))
        return symbols, new


class _Turn:
    """The loop over one window of frames: everything that changes from symbol to symbol."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        last_voiced: Tensor,
        num_valid: Tensor,
        state: SearchState,
        search: GreedySearch,
    ) -> None:
        self.keys, self.values, self.last_voiced, self.num_valid = keys, values, last_voiced, num_valid
        self.search, self.config = search, search.config
        self.state = _rows(state, torch.arange(len(num_valid), device=num_valid.device))  # a copy, changed in place
        self.offset, self.vectors = state.num_frames, search.energies.vectors()
        self.place = torch.arange(keys.shape[1] - search.width + 1, device=keys.device)
        quiet = self._is_quiet(slice(None), state.last_emission)
        quiet &= (state.open | (len(self.place) >= state.pause))[:, None]  # else too few for one that is to begin yet
        self.may_end = bool(quiet.any())  # emissions only put an end off

    def run(self, rows: Tensor, pointer: Tensor, symbols: list[Symbol]) -> Tensor:
        """One turn for `rows` [R]; moves `pointer` [B] in place and returns the rows that go on."""
        state, keys = self.state, self.keys[:, self.search.width - 1 :]
        if len(rows) < len(keys):
            keys = keys.index_select(0, rows)
        hidden = state.decoder.hidden.index_select(0, rows)
        p = self.search.energies.pairs(0, hidden[:, None], keys, self.vectors).sigmoid()
        ahead = (self.place >= pointer[rows, None]) & (self.place < self.num_valid[rows, None])
        stop = fires = ahead & (p >= 0.5)  # algorithm 1, line 7
        if self.may_end:
            ends = ahead & self._is_quiet(rows, state.last_emission[rows]) & state.open[rows, None]
            stop = fires | ends
        first, stops = stop.int().argmax(dim=1), stop.any(dim=1)
        emits = stops
        if self.may_end:
            cut = stops & ends.gather(1, first[:, None])[:, 0]
            if cut.any():
                self._end_segments(rows[cut], first[cut], pointer, symbols)
                emits = stops & ~cut
        emit = emits.nonzero()[:, 0]
        if len(emit):
            at, chosen = first[emit], rows[emit]
            self._emit(chosen, at, p[emit, at], _rows(state, chosen), pointer, symbols)
        return rows[stops]

    def _is_quiet(self, rows: Any, last_emission: Tensor) -> Tensor:
        """Whether [R, T] a segment of `rows`, if one is open, ends before each frame."""
        heard = torch.maximum(self.last_voiced[rows], last_emission[:, None])
        quiet: Tensor = self.offset[rows, None] + self.place - heard >= self.state.pause[rows, None]
        return quiet

    def _end_segments(self, rows: Tensor, first: Tensor, pointer: Tensor, symbols: list[Symbol]) -> None:
        """Trailing silence: the segment ends before frame `first`, which a fresh decoder then inspects."""
        frames = self.offset[rows] + first
        pointer[rows] = first
        for row, frame in zip(rows.tolist(), frames.tolist(), strict=True):
            symbols.append(Symbol(row, Tokenizer.eos_id, frame, 0.0, 1.0, (0.0,) * self.search.width, frame))
        self._renew(rows, frames)

    def _emit(
        self,
        rows: Tensor,
        first: Tensor,
        p: Tensor,
        state: SearchState,
        pointer: Tensor,
        symbols: list[Symbol],
    ) -> None:
        """Attend over the chunk that ends at `first`, step the decoder, choose a symbol (lines 8-22)."""
        search, width = self.search, self.search.width
        window = first[:, None] + torch.arange(width, device=first.device)  # in the joined axis: j - w + 1 ... j
        frames = self.offset[rows] + first
        valid = search.attention.chunk_mask(frames, state.last_emission, state.start)
        values = self.values[rows[:, None], window]
        u = torch.zeros_like(window, dtype=p.dtype)
        if search.energies.count > 1:
            keys = self.keys[rows[:, None], window]
            u = search.energies.pairs(1, state.decoder.hidden[:, None], keys, self.vectors)
        context, weights = search.attention.attend_chunk(u, values, valid)
        decoder = search.decoder.step(state.token, context, state.decoder)
        token, q, scorers = search.choose(decoder.hidden, context, state.scorers)
        ended = token == Tokenizer.eos_id
        shown = ~ended & ~((token == search.space_id) & ((state.token == search.space_id) | ~state.open))
        repeats = torch.where(frames == state.last_emission, state.repeats, 0) + 1
        move_on = ended | (repeats >= self.config.max_emissions_per_frame)
        pointer[rows] = first + move_on.long()  # inclusive: the next symbol may choose the same frame
        into = self.state
        scatter_rows(into.decoder, rows, decoder)
        scatter_rows(into.scorers, rows, scorers)
        into.token[rows], into.last_emission[rows], into.repeats[rows] = token, frames, repeats
        into.open[rows] = state.open | shown
        tell = shown | (ended & state.open)
        columns = (rows, token, frames, p, q, weights, tell)
        found = zip(*(column.tolist() for column in columns), strict=True)
        symbols += [Symbol(r, t, f, p, q, tuple(w), f) for r, t, f, p, q, w, told in found if told]
        if ended.any():
            self._renew(rows[ended], frames[ended] + 1)

    def _renew(self, rows: Tensor, frames: Tensor) -> None:
        """A fresh decoder for the segment that begins at `frames`; the stream's own clock and memory go on."""
        self.state.start[rows] = frames
        scatter_rows(self.state.decoder, rows, self.search.decoder.init_state(len(rows)))
        scatter_rows(self.state.scorers, rows, self.search.fusion.restart(gather_rows(self.state.scorers, rows)))
        self.state.token[rows] = Tokenizer.sos_id
        self.state.open[rows] = False


def _rows(state: SearchState, index: Tensor) -> SearchState:
    """Copies of the rows `index` of everything that a turn changes; the rest as it is."""
    names = ("decoder", "token", "start", "last_emission", "repeats", "open", "scorers")
    return replace(state, **{name: gather_rows(getattr(state, name), index) for name in names})
