"""What searches with several hypotheses share: frames, segments, and which symbols have become certain.

After each frame the best few hypotheses of a stream survive. What all of them agree on is stable and is emitted; it is
never retracted. A search may be asked to wait no longer than its patience, and to tell before what is likely enough;
hypotheses that contradict it are dropped then. Which hypotheses there are, and what they score, is for `beam` and
`joint` to say. Knows nothing of samples or text.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mocha_model.config import DecoderConfig
from mocha_model.decoder import Decoder
from mocha_model.encoder import RecurrentState
from mocha_model.hypotheses import MAX_UNSTABLE, best_of, flat_rows, forget_first, split_rows
from mocha_model.scorers import Fusion
from mocha_model.search import OfflineModelError, Symbol
from mocha_model.streaming import gather_rows, map_state, take_ends, where_rows, with_rows
from mocha_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class WideState:
    """A stream between steps; every tensor is [B, ...].

    Attributes:
        hypotheses: `Hypotheses` of the search's own kind, [B, W, ...].
        follower: what the search keeps of the stream beside them; may be nothing.
        keys, values: of the `window` - 1 frames before; the others are as in `search.SearchState`.

    """

    hypotheses: Any
    follower: Any
    keys: Tensor
    values: Tensor
    num_frames: Tensor
    last_voiced: Tensor
    open: Tensor
    last_shown: Tensor
    pause: Tensor


@dataclass(frozen=True)
class Follower:
    """A decoder before it writes one more symbol; every tensor is [R, ...].

    Attributes:
        decoder: s_{i-1}. token: y_{i-1}. last_emission: t_{i-1}. start: the frame at which its segment began.

    """

    decoder: RecurrentState
    token: Tensor
    last_emission: Tensor
    start: Tensor


class WideSearch(ABC):
    """Behind the interface of `GreedySearch`; a search says how hypotheses begin, go on and end."""

    def __init__(
        self,
        decoder: Decoder,
        config: DecoderConfig,
        space_id: int,
        width: int,
        patience: int | None,
        window: int,
        fusion: Fusion | None,
        caution: float = math.inf,
        key_window: int = 0,
    ) -> None:
        """`width` hypotheses, each frame with the `window` frames up to it, of keys with `key_window` if that is more.

        `patience` is as of `beam.BeamConfig`, `caution` as of `joint.JointConfig`.
        """
        if not decoder.attention.is_online:
            raise OfflineModelError("softmax attention is offline: it cannot be streamed (decode it softly)")
        self.decoder, self.attention, self.energies = decoder, decoder.attention, decoder.attention.energies
        self.config, self.space_id = config, space_id
        self.width, self.patience, self.window, self.fusion = width, patience, window, fusion or Fusion(())
        self.caution, self.key_window = caution, max(window, key_window)

    @abstractmethod
    def keys_of(self, memory: Tensor, phones: Tensor | None = None) -> Tensor:
        """What hypotheses need of memory [B, T, D] and `phones` [B, T, P] beside it, [B, T, K]; K may be 0."""

    @abstractmethod
    def no_keys(self, batch_size: int, like: Tensor) -> Tensor:
        """Keys [B, w - 1, K] of the frames before the first, on the device of `like`."""

    @abstractmethod
    def _fresh(self, start: Tensor, scorers: tuple[Any, ...]) -> Any:
        """Segments that begin at frames `start` [B], with `scorers` [B]: one empty hypothesis each, [B W, ...]."""

    @abstractmethod
    def _follower(self, start: Tensor) -> Any:
        """What is kept beside the hypotheses of segments that begin at `start` [B]."""

    @abstractmethod
    def _advance(self, active: Any, keys: Tensor, values: Tensor, frame: Tensor, labels: Tensor) -> Any:
        """Hypotheses [B W, ...] after one more frame; `keys`, `values` [B, w, ...] end with it, `labels` are [B, V]."""

    @abstractmethod
    def _finish(self, active: Any, frames: Tensor) -> Any:
        """Hypotheses [B W, ...] when the audio has ended."""

    @abstractmethod
    def _said(self, state: WideState, best: Tensor, count: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Of the first `count` [B] symbols of `best` [B]: q [B, N], attention weights [B, N, w]; and the follower then.

        N is the greatest count, or more; `values` [B, w, D] end with the newest frame.
        """

    def attend(
        self, before: Follower, keys: Tensor, values: Tensor, frames: Tensor
    ) -> tuple[Tensor, Tensor, RecurrentState]:
        """Context [R, D] and weights [R, w] of the chunks that end at `frames` [R], and the decoder's state after.

        `keys` [R, w, K] and `values` [R, w, D] are the chunks.
        """
        u = torch.zeros_like(keys[..., 0])
        if self.energies.count > 1:
            u = self.energies.pairs(1, before.decoder.hidden[:, None].expand(-1, keys.shape[1], -1), keys)
        valid = self.attention.chunk_mask(frames, before.last_emission, before.start)
        context, weights = self.attention.attend_chunk(u, values, valid)
        return context, weights, self.decoder.step(before.token, context, before.decoder)

    def _nothing(self, start: Tensor, scorers: tuple[Any, ...]) -> dict[str, Any]:
        """What every kind of `Hypotheses` begins with, for `_fresh`."""
        width, like = self.width, self.decoder.output.weight
        rows = len(start) * width
        count = torch.zeros(rows, dtype=torch.int64, device=like.device)
        first = (torch.arange(rows, device=like.device) % width) == 0
        history = count[:, None].expand(rows, MAX_UNSTABLE).clone()
        return {
            "token": count + Tokenizer.sos_id,
            "scorers": map_state(lambda x: x.repeat_interleave(width, 0), scorers),
            "score": torch.where(first, 0.0, -torch.inf),
            "last_emission": start.repeat_interleave(width) - 1,
            "length": count.clone(),
            "tokens": history,
            "frames": history.clone(),
            "p": like.new_zeros(rows, MAX_UNSTABLE),
        }

    def init_state(
        self, batch_size: int, scorers: tuple[Any, ...] | None = None, pause: Tensor | None = None
    ) -> WideState:
        """Streams that have heard nothing; arguments as of `GreedySearch.init_state`."""
        like, width = self.decoder.output.weight, self.width
        count = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        scorers = self.fusion.init_state(batch_size, like.device) if scorers is None else scorers
        fresh = self._fresh(count, scorers)
        before = like.new_zeros(batch_size, self.window - 1, self.energies.memory_size)
        return WideState(
            hypotheses=split_rows(fresh, width),
            follower=self._follower(count),
            keys=self.no_keys(batch_size, like),
            values=before,
            num_frames=count,
            last_voiced=count - 1,
            open=count > 0,
            last_shown=count + Tokenizer.sos_id,
            pause=count + self.config.endpoint_frames if pause is None else pause,
        )

    def step(
        self, memory: Tensor, labels: Tensor, num_valid: Tensor, state: WideState, phones: Tensor | None = None
    ) -> tuple[list[Symbol], WideState]:
        """Inspect new frames; arguments and results as of `GreedySearch.step`. Symbols come when they are stable.

        `phones` [B, T, P] are log-probabilities, for searches that ask for them.
        """
        keys, values = self.joined(memory, phones, state)
        symbols: list[Symbol] = []
        for t in range(memory.shape[1]):
            real = t < num_valid
            new = self._frame(*self.chunk(keys, values, t), labels[:, t], state, symbols, real)
            state = new if real.all() else where_rows(real, new, state)
        return symbols, self.kept(keys, values, num_valid, state)

    def joined(self, memory: Tensor, phones: Tensor | None, state: WideState) -> tuple[Tensor, Tensor]:
        """Keys and values of the frames that are kept and of new ones."""
        return torch.cat([state.keys, self.keys_of(memory, phones)], 1), torch.cat([state.values, memory], 1)

    def chunk(self, keys: Tensor, values: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Of what is `joined`, the windows that end with new frame `t`."""
        return keys[:, t : t + self.key_window], values[:, t : t + self.window]

    def kept(self, keys: Tensor, values: Tensor, num_valid: Tensor, state: WideState) -> WideState:
        """`state` with what the next step needs of what is `joined`."""
        ends = ((keys, self.key_window - 1), (values, self.window - 1))
        keys, values = (take_ends(x, count + num_valid, count) for x, count in ends)
        return replace(state, keys=keys, values=values)

    def _frame(
        self, keys: Tensor, values: Tensor, labels: Tensor, state: WideState, symbols: list[Symbol], real: Tensor
    ) -> WideState:
        """One frame for all rows; `keys` and `values` [B, w, ...] end with it. Only `real` rows may tell symbols."""
        frame = state.num_frames
        state = self.hear(labels, state)
        ends = self.is_quiet(state, frame) & real
        if ends.any():
            state = self.close(ends, state, frame, symbols, keys, values)
        return self.search_frame(keys, values, labels, frame, state, symbols, real)

    def hear(self, labels: Tensor, state: WideState) -> WideState:
        """Count one more frame, of which the CTC head says `labels` [B, V]."""
        voiced = labels.argmax(dim=1) != Tokenizer.blank_id
        last_voiced = torch.where(voiced, state.num_frames, state.last_voiced)
        return replace(state, last_voiced=last_voiced, num_frames=state.num_frames + 1)

    def is_quiet(self, state: WideState, frame: Tensor) -> Tensor:
        """Rows [B] whose segment ends before `frame` [B]: too long without a character."""
        best = best_of(state.hypotheses.score)
        last_emission, length = (
            x.gather(1, best[:, None])[:, 0] for x in (state.hypotheses.last_emission, state.hypotheses.length)
        )
        quiet = frame - torch.maximum(state.last_voiced, last_emission)
        too_long: Tensor = (quiet >= state.pause) & (state.open | (length > 0))
        return too_long

    def search_frame(
        self,
        keys: Tensor,
        values: Tensor,
        labels: Tensor,
        frame: Tensor,
        state: WideState,
        symbols: list[Symbol],
        real: Tensor,
    ) -> WideState:
        """Extend the hypotheses at `frame` [B], and tell what has become stable; arguments as of `_frame`."""
        hypotheses = self._advance(flat_rows(state.hypotheses), keys, values, frame, labels)
        state = replace(state, hypotheses=split_rows(hypotheses, self.width))
        return self._tell_stable(state, symbols, real, values)

    def _tell_stable(
        self, state: WideState, symbols: list[Symbol], real: Tensor, values: Tensor, room: int = 0
    ) -> WideState:
        """Emit what all hypotheses of a row share, and forget it.

        Those that contradict the best one are dropped first: in what cannot wait or is likely enough, or where the
        suffix has no room for what a frame, or `room` symbols, may add.
        """
        h = state.hypotheses
        kept = h.score > -torch.inf
        longest = h.length.masked_fill(~kept, 0).amax(1)
        count = int(longest.max()) if len(longest) else 0  # L below: symbols that any of them has
        if not count:
            return state
        best = best_of(h.score)
        place, tokens = torch.arange(count, device=best.device), h.tokens[..., :count]
        lead = tokens.gather(1, best[:, None, None].expand(-1, 1, count))  # [B, 1, L]
        written = place < h.length[..., None]
        shared = (tokens == lead) & written
        same = shared.int().cumprod(2).sum(2)  # [B, W] symbols from the first on that are the best one's
        room = max(room, self.config.max_emissions_per_frame)
        overdue = place <= (longest + room - MAX_UNSTABLE)[:, None, None]
        if self.patience is not None:
            overdue = overdue | (h.frames[..., :count] <= (state.num_frames - 1 - self.patience)[:, None, None])
        due = (overdue & written).int().cumprod(2).sum(2)  # [B, W] symbols that cannot wait
        alive = kept & (due == due.gather(1, best[:, None])) & (same >= due)
        if self.patience is not None and self.caution < math.inf:
            score = h.score.masked_fill(~alive, -torch.inf)
            alive &= same >= self._likely(score, same, h, best, state.num_frames - 1, count)
        h = replace(h, score=h.score.masked_fill(~alive, -torch.inf))
        agreed = (shared | ~alive[..., None]).all(1).int().cumprod(1).sum(1) * real  # [B]
        if not agreed.any():
            return replace(state, hypotheses=h)
        state = self._tell(replace(state, hypotheses=h), agreed, symbols, values)
        row = torch.arange(len(best), device=best.device)
        told = h.frames[row, best, (agreed - 1).clamp(min=0)] * (agreed > 0)
        left = forget_first(state.hypotheses, agreed)  # what comes next comes no earlier than what was told
        return replace(state, hypotheses=replace(left, frames=torch.maximum(left.frames, told[:, None, None])))

    def _likely(self, score: Tensor, same: Tensor, h: Any, best: Tensor, now: Tensor, longest: int) -> Tensor:
        """How many symbols [B, 1] of the `best` [B] hypotheses are likely enough to be told at frames `now` [B].

        One that may wait for n more frames has to be shared by hypotheses that have all but exp(-caution n) of the
        probability, as `score` [B, W] distributes it; `same` [B, W] is how many symbols each shares with the best, and
        none has more than `longest`.
        """
        share = score.softmax(1)
        nothing = share.new_zeros(len(best), longest + 1)
        without = nothing.scatter_add(1, same, share).cumsum(1)[:, :-1]  # [B, L] what those have that lack each symbol
        row, place = torch.arange(len(best), device=best.device), torch.arange(longest, device=best.device)
        left = h.frames[row, best, :longest] + self.patience - now[:, None]  # [B, L]
        sure = (without < torch.exp(-self.caution * left)) & (place < h.length[row, best, None])
        count: Tensor = sure.int().cumprod(1).sum(1, keepdim=True)
        return count

    def _tell(self, state: WideState, count: Tensor, symbols: list[Symbol], values: Tensor) -> WideState:
        """Emit the first `count` [B] symbols of each row's best hypothesis; no leading or double spaces."""
        h, best = state.hypotheses, best_of(state.hypotheses.score)
        is_open, last = state.open.clone(), state.last_shown.clone()
        q, weights, follower = self._said(state, best, count, values)
        for row in count.nonzero()[:, 0].tolist():
            k, n, now = int(best[row]), int(count[row]), int(state.num_frames[row]) - 1
            shown, previous = bool(is_open[row]), int(last[row])
            told = (x[:n].tolist() for x in (h.tokens[row, k], h.frames[row, k], h.p[row, k], q[row], weights[row]))
            for token, frame, p, own_q, chunk in zip(*told, strict=True):
                repeated = token == self.space_id and (not shown or previous == self.space_id)
                previous = token
                if token != Tokenizer.eos_id and not repeated:
                    shown = True
                    symbols.append(Symbol(row, token, frame, p, own_q, tuple(chunk), now))
            is_open[row], last[row] = shown, previous
        return replace(state, open=is_open, last_shown=last, follower=follower)

    def close(
        self, rows: Tensor, state: WideState, frame: Tensor, symbols: list[Symbol], keys: Tensor, values: Tensor
    ) -> WideState:
        """End the segments of `rows` [B] bool with their best hypothesis; new ones begin at `frame` [B].

        `keys` and `values` [B, w, ...] end with the newest frame.
        """
        best = best_of(state.hypotheses.score)
        state = self._tell(state, state.hypotheses.length.gather(1, best[:, None])[:, 0] * rows, symbols, values)
        for row in (rows & state.open).nonzero()[:, 0].tolist():
            now, nowhere = int(frame[row]), (0.0,) * self.attention.chunk_width
            symbols.append(Symbol(row, Tokenizer.eos_id, now, 0.0, 1.0, nowhere, now))
        at = rows.nonzero()[:, 0]
        scorers = self._restarted(gather_rows(state.hypotheses.scorers, at))
        fresh = split_rows(self._fresh(frame[at], scorers), self.width)
        return replace(
            state,
            hypotheses=with_rows(state.hypotheses, at, fresh),
            follower=with_rows(state.follower, at, self._follower(frame[at])),
            open=state.open & ~rows,
            last_shown=torch.where(rows, Tokenizer.sos_id, state.last_shown),
        )

    def flush(self, rows: Tensor, state: WideState) -> tuple[list[Symbol], WideState]:
        """End the audio of `rows` [B] bool: the zero context until end-of-sequence, then a fresh state."""
        symbols: list[Symbol] = []
        alive = state.hypotheses.score > -torch.inf
        spoken = state.open | (alive & (state.hypotheses.length > 0)).any(1)
        last = state.num_frames - 1
        frames = last.repeat_interleave(self.width)
        finished = self._finish(flat_rows(state.hypotheses), frames)
        too_long = (finished.length > MAX_UNSTABLE) & (finished.score > -torch.inf)
        crowded = rows & too_long.view(-1, self.width).any(1)
        if crowded.any():  # once more, with room for all that is added
            roomy = self._tell_stable(state, symbols, crowded, state.values, self.config.max_emissions_at_end)
            state = where_rows(crowded, roomy, state)
            finished = self._finish(flat_rows(state.hypotheses), frames)
        ready = replace(state, hypotheses=where_rows(rows & spoken, split_rows(finished, self.width), state.hypotheses))
        closed = self.close(rows & spoken, ready, last, symbols, state.keys, state.values)
        fresh = self.init_state(len(rows), self._restarted(state.hypotheses.scorers), state.pause)
        return symbols, where_rows(rows, fresh, closed)

    def _restarted(self, scorers: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of `scorers` [R, W], what they are [R] before the first symbol of each stream's next segment."""
        first: tuple[Any, ...] = map_state(lambda x: x[:, 0], scorers)
        return self.fusion.restart(first)
