"""Beam search over the online attention process, streaming, batched over streams and hypotheses.

Every hypothesis has its own pointer, decoder state and scorer states. The search goes frame by frame, so hypotheses
are always compared after the same audio: at each frame those whose attention fires are extended by their best symbols
(and asked again at the same frame, the pointer being inclusive), the others pass on; then the best few survive. What
all survivors agree on is stable and is emitted; it is never retracted. A hypothesis' score is the log-probability of
its symbols, of the decisions that its path took (weighted), and of what the scorers say.

The number of hypotheses is the papers' "rank pruning", the threshold their "pruning threshold" (Chiu & Raffel 2018,
A.1: 8 and 3). Knows nothing of samples or text.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mocha_model.config import DecoderConfig
from mocha_model.decoder import Decoder
from mocha_model.encoder import RecurrentState
from mocha_model.hypotheses import MAX_UNSTABLE, Hypotheses, Some, best_of, flat_rows, forget_first, split_rows
from mocha_model.scorers import Fusion
from mocha_model.search import OfflineModelError, Symbol
from mocha_model.streaming import gather_rows, map_state, take_ends, where_rows
from mocha_model.tokenizer import Tokenizer


@dataclass(frozen=True)
class BeamConfig:
    """How wide and how strict.

    Attributes:
        width: hypotheses kept per stream.
        threshold: hypotheses this much worse than the best one (natural logarithm) are dropped.
        selection_weight: of the log-probability of the path's decisions to select and to pass; 0 as in the papers.
        length_bonus: added per symbol.
        patience: frames from a symbol's own to the one at which it is emitted at the latest: hypotheses that differ
            from the best one in what they wrote until so long ago are dropped. None to wait until all agree, or
            `hypotheses.MAX_UNSTABLE` symbols are open.

    """

    width: int = 8
    threshold: float = 3.0
    selection_weight: float = 0.0
    length_bonus: float = 0.0
    patience: int | None = None


@dataclass(frozen=True)
class BeamState:
    """A stream between steps: its hypotheses and what `search.SearchState` has; every tensor is [B, ...]."""

    hypotheses: Hypotheses  # [B, W, ...]
    keys: Tensor
    values: Tensor
    num_frames: Tensor
    last_voiced: Tensor
    open: Tensor
    last_shown: Tensor


class BeamSearch:
    """Beam search behind the interface of `GreedySearch`."""

    def __init__(
        self,
        decoder: Decoder,
        config: DecoderConfig,
        space_id: int,
        beam: BeamConfig | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        if not decoder.attention.is_online:
            raise OfflineModelError("softmax attention is offline: it cannot be streamed (decode it softly)")
        self.decoder, self.attention, self.energies = decoder, decoder.attention, decoder.attention.energies
        self.config, self.space_id = config, space_id
        self.beam, self.fusion = beam or BeamConfig(), fusion or Fusion(())
        self.window = decoder.attention.chunk_width

    def init_state(self, batch_size: int, scorers: tuple[Any, ...] | None = None) -> BeamState:
        """Streams that have heard nothing; `scorers` is the state of the fusion [B], fresh if not given."""
        like, width = self.decoder.output.weight, self.beam.width
        count = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        scorers = self.fusion.init_state(batch_size, like.device) if scorers is None else scorers
        fresh = self._fresh(count, scorers)
        return BeamState(
            hypotheses=split_rows(fresh, width),
            keys=like.new_zeros(batch_size, self.window - 1, self.energies.memory_projection.out_features),
            values=like.new_zeros(batch_size, self.window - 1, self.energies.memory_size),
            num_frames=count,
            last_voiced=count - 1,
            open=count > 0,
            last_shown=count + Tokenizer.sos_id,
        )

    def _fresh(self, start: Tensor, scorers: tuple[Any, ...]) -> Hypotheses:
        """Segments that begin at frames `start` [B], with `scorers` [B]: one empty hypothesis each, [B W, ...]."""
        width, like = self.beam.width, self.decoder.output.weight
        rows = len(start) * width
        count = torch.zeros(rows, dtype=torch.int64, device=like.device)
        first = (torch.arange(rows, device=like.device) % width) == 0
        history = count[:, None].expand(rows, MAX_UNSTABLE).clone()
        return Hypotheses(
            decoder=self.decoder.init_state(rows),
            token=count + Tokenizer.sos_id,
            scorers=map_state(lambda x: x.repeat_interleave(width, 0), scorers),
            score=torch.where(first, 0.0, -torch.inf),
            ended=count > 0,
            start=start.repeat_interleave(width),
            last_emission=start.repeat_interleave(width) - 1,
            repeats=count.clone(),
            length=count.clone(),
            tokens=history,
            frames=history.clone(),
            p=like.new_zeros(rows, MAX_UNSTABLE),
            q=like.new_zeros(rows, MAX_UNSTABLE),
            weights=like.new_zeros(rows, MAX_UNSTABLE, self.window),
        )

    def step(
        self, memory: Tensor, labels: Tensor, num_valid: Tensor, state: BeamState
    ) -> tuple[list[Symbol], BeamState]:
        """Inspect new frames; arguments and results as of `GreedySearch.step`. Symbols come when they are stable."""
        keys = torch.cat([state.keys, self.energies.memory_projection(memory)], dim=1)
        values = torch.cat([state.values, memory], dim=1)
        symbols: list[Symbol] = []
        for t in range(memory.shape[1]):
            real = t < num_valid
            chunk = slice(t, t + self.window)
            new = self._frame(keys[:, chunk], values[:, chunk], labels[:, t], state, symbols, real)
            state = where_rows(real, new, state)
        kept = self.window - 1
        return symbols, replace(
            state, keys=take_ends(keys, kept + num_valid, kept), values=take_ends(values, kept + num_valid, kept)
        )

    def _frame(
        self, keys: Tensor, values: Tensor, labels: Tensor, state: BeamState, symbols: list[Symbol], real: Tensor
    ) -> BeamState:
        """One frame for all rows; `keys` and `values` [B, w, ...] end with it. Only `real` rows may tell symbols."""
        frame = state.num_frames
        state = self.hear(labels, state)
        ends = self.is_quiet(state, frame) & real
        if ends.any():
            state = self.close(ends, state, frame, symbols)
        state = self.search_frame(keys, values, labels, frame, state, symbols, real)
        best = best_of(state.hypotheses.score)
        finished = state.hypotheses.ended.gather(1, best[:, None])[:, 0] & real
        if finished.any():
            state = self.close(finished, state, frame + 1, symbols)
        return state

    def hear(self, labels: Tensor, state: BeamState) -> BeamState:
        """Count one more frame, of which the CTC head says `labels` [B, V]."""
        voiced = labels.argmax(dim=1) != Tokenizer.blank_id
        last_voiced = torch.where(voiced, state.num_frames, state.last_voiced)
        return replace(state, last_voiced=last_voiced, num_frames=state.num_frames + 1)

    def is_quiet(self, state: BeamState, frame: Tensor) -> Tensor:
        """Rows [B] whose segment ends before `frame` [B]: too long without a character."""
        best = best_of(state.hypotheses.score)
        last_emission, length = (
            x.gather(1, best[:, None])[:, 0] for x in (state.hypotheses.last_emission, state.hypotheses.length)
        )
        quiet = frame - torch.maximum(state.last_voiced, last_emission)
        return (quiet >= self.config.endpoint_frames) & (state.open | (length > 0))

    def search_frame(
        self,
        keys: Tensor,
        values: Tensor,
        labels: Tensor,
        frame: Tensor,
        state: BeamState,
        symbols: list[Symbol],
        real: Tensor,
    ) -> BeamState:
        """Extend the hypotheses at `frame` [B], and tell what has become stable; arguments as of `_frame`."""
        hypotheses = self._advance(flat_rows(state.hypotheses), keys, values, frame, labels)
        state = replace(state, hypotheses=split_rows(hypotheses, self.beam.width))
        return self._tell_stable(state, symbols, real)

    def _advance(self, active: Hypotheses, keys: Tensor, values: Tensor, frame: Tensor, labels: Tensor) -> Hypotheses:
        """Let every hypothesis decide on this frame until none fires; the best `width` of each row."""
        width = self.beam.width
        keys, values = keys.repeat_interleave(width, 0), values.repeat_interleave(width, 0)
        frames = frame.repeat_interleave(width)
        waiting: Hypotheses | None = None
        for turn in range(self.config.max_emissions_per_frame + 1):
            e = self.energies.pairs(0, active.decoder.hidden, keys[:, -1])
            alive = active.score > -torch.inf
            fires = alive & ~active.ended & (e >= 0) & (turn < self.config.max_emissions_per_frame)  # p >= 0.5
            decided = torch.where(fires, logsigmoid(e), torch.where(active.ended, 0.0, logsigmoid(-e)))
            if turn == self.config.max_emissions_per_frame:  # cut short: the pointer must move on, nothing is decided
                decided = torch.zeros_like(e)
            active = replace(active, score=active.score + self.beam.selection_weight * decided)
            passed = replace(active, score=active.score.masked_fill(fires, -torch.inf))
            waiting = passed if waiting is None else self._prune(waiting, passed)
            if not fires.any():
                break
            active = self._extend(
                replace(active, score=active.score.masked_fill(~fires, -torch.inf)), e, keys, values, frames
            )
        assert waiting is not None
        return self._prune(waiting)

    def _prune(self, *groups: Hypotheses) -> Hypotheses:
        """The best `width` of each row's hypotheses, within the threshold."""
        width = self.beam.width
        parts = [split_rows(g, width) for g in groups]
        joined: Hypotheses = map_state(lambda *x: torch.cat(x, 1), *parts) if len(parts) > 1 else parts[0]
        score, index = joined.score.topk(width, dim=1)
        score = torch.where(score >= score[:, :1] - self.beam.threshold, score, -torch.inf)
        rows = torch.arange(len(score), device=score.device)[:, None] * joined.score.shape[1] + index
        return replace(gather_rows(flat_rows(joined), rows.flatten()), score=score.flatten())

    def _extend(self, parents: Hypotheses, e: Tensor, keys: Tensor, values: Tensor, frames: Tensor) -> Hypotheses:
        """The best `width` one-symbol extensions of each row's firing hypotheses (algorithm 1, lines 14-22)."""
        context, weights, decoder = self._attend(parents, keys, values, frames)
        parent, token, score, q = self._choose(decoder.hidden, context, parents)
        children: Hypotheses = gather_rows(replace(parents, decoder=decoder), parent)
        symbol = (token, frames[parent], e.sigmoid()[parent], q, weights[parent])
        repeats = torch.where(frames[parent] == children.last_emission, children.repeats, 0) + 1
        return replace(
            self._append(children, *symbol),
            score=score,
            scorers=self.fusion.advance(children.scorers, token),
            last_emission=frames[parent],
            repeats=repeats,
        )

    def _attend(
        self, h: Hypotheses, keys: Tensor, values: Tensor, frames: Tensor
    ) -> tuple[Tensor, Tensor, RecurrentState]:
        """Context [R, D] and weights [R, w] of the chunks that end at `frames` [R], and the decoder's state after."""
        u = torch.zeros_like(keys[..., 0])
        if self.energies.count > 1:
            u = self.energies.pairs(1, h.decoder.hidden[:, None].expand(-1, keys.shape[1], -1), keys)
        valid = self.attention.chunk_mask(frames, h.last_emission, h.start)
        context, weights = self.attention.attend_chunk(u, values, valid)
        return context, weights, self.decoder.step(h.token, context, h.decoder)

    def _choose(self, hidden: Tensor, context: Tensor, parents: Hypotheses) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(parent row, token, score, q), each [B W], of the best extensions of each stream's hypotheses."""
        width = self.beam.width
        own = self.decoder.symbol_scores(hidden, context)
        total = own + self.fusion.scores(parents.scorers) + self.beam.length_bonus
        total = (total + parents.score[:, None]).nan_to_num(-torch.inf, neginf=-torch.inf)
        score, flat = total.view(-1, width * total.shape[1]).topk(width, dim=1)
        rows = torch.arange(len(score), device=score.device)[:, None] * width
        parent = (rows + flat // total.shape[1]).flatten()
        token = (flat % total.shape[1]).flatten()
        return parent, token, score.flatten(), own[parent, token].exp()

    def _append(self, h: Some, token: Tensor, frame: Tensor, p: Tensor, q: Tensor, weights: Tensor) -> Some:
        at = h.length.clamp(max=MAX_UNSTABLE - 1)
        place = torch.arange(MAX_UNSTABLE, device=at.device) == at[:, None]
        return replace(
            h,
            token=token,
            ended=token == Tokenizer.eos_id,
            length=h.length + 1,
            tokens=torch.where(place, token[:, None], h.tokens),
            frames=torch.where(place, frame[:, None], h.frames),
            p=torch.where(place, p[:, None], h.p),
            q=torch.where(place, q[:, None], h.q),
            weights=torch.where(place[..., None], weights[:, None], h.weights),
        )

    def _tell_stable(self, state: BeamState, symbols: list[Symbol], real: Tensor, room: int = 0) -> BeamState:
        """Emit what all hypotheses of a row share, and forget it.

        Those that contradict the best one are dropped first: in what cannot wait, or where the suffix has no room for
        what a frame, or `room` symbols, may add.
        """
        h = state.hypotheses
        best = best_of(h.score)
        place = torch.arange(MAX_UNSTABLE, device=best.device)
        lead = h.tokens.gather(1, best[:, None, None].expand(-1, 1, MAX_UNSTABLE))  # [B, 1, L]
        written = place < h.length[..., None]
        shared = (h.tokens == lead) & written
        same = shared.int().cumprod(2).sum(2)  # [B, W] symbols from the first on that are the best one's
        kept = h.score > -torch.inf
        room = max(room, self.config.max_emissions_per_frame)
        longest = h.length.masked_fill(~kept, 0).amax(1)
        overdue = place <= (longest + room - MAX_UNSTABLE)[:, None, None]
        if self.beam.patience is not None:
            overdue = overdue | (h.frames <= (state.num_frames - 1 - self.beam.patience)[:, None, None])
        due = (overdue & written).int().cumprod(2).sum(2)  # [B, W] symbols that cannot wait
        alive = kept & (due == due.gather(1, best[:, None])) & (same >= due)
        h = replace(h, score=h.score.masked_fill(~alive, -torch.inf))
        agreed = (shared | ~alive[..., None]).all(1).int().cumprod(1).sum(1) * real  # [B]
        if not agreed.any():
            return replace(state, hypotheses=h)
        state = self._tell(replace(state, hypotheses=h), agreed, symbols)
        return replace(state, hypotheses=forget_first(state.hypotheses, agreed))

    def _tell(self, state: BeamState, count: Tensor, symbols: list[Symbol]) -> BeamState:
        """Emit the first `count` [B] symbols of each row's best hypothesis; no leading or double spaces."""
        h, best = state.hypotheses, best_of(state.hypotheses.score)
        is_open, last = state.open.clone(), state.last_shown.clone()
        for row in count.nonzero()[:, 0].tolist():
            k, now = int(best[row]), int(state.num_frames[row]) - 1
            for n in range(int(count[row])):
                token, frame = int(h.tokens[row, k, n]), int(h.frames[row, k, n])
                previous = int(last[row])
                last[row] = token
                if token == Tokenizer.eos_id or (
                    token == self.space_id and (not is_open[row] or previous == self.space_id)
                ):
                    continue
                is_open[row] = True
                told = tuple(h.weights[row, k, n].tolist())
                symbols.append(Symbol(row, token, frame, float(h.p[row, k, n]), float(h.q[row, k, n]), told, now))
        return replace(state, open=is_open, last_shown=last)

    def close(self, rows: Tensor, state: BeamState, frame: Tensor, symbols: list[Symbol]) -> BeamState:
        """End the segments of `rows` [B] bool with their best hypothesis; new ones begin at `frame` [B]."""
        best = best_of(state.hypotheses.score)
        state = self._tell(state, state.hypotheses.length.gather(1, best[:, None])[:, 0] * rows, symbols)
        for row in (rows & state.open).nonzero()[:, 0].tolist():
            at = int(frame[row])
            symbols.append(Symbol(row, Tokenizer.eos_id, at, 0.0, 1.0, (0.0,) * self.window, at))
        fresh = split_rows(self._fresh(frame, self._restarted(state)), self.beam.width)
        return replace(
            state,
            hypotheses=where_rows(rows, fresh, state.hypotheses),
            open=state.open & ~rows,
            last_shown=torch.where(rows, Tokenizer.sos_id, state.last_shown),
        )

    def flush(self, rows: Tensor, state: BeamState) -> tuple[list[Symbol], BeamState]:
        """End the audio of `rows` [B] bool: the zero context until end-of-sequence, then a fresh state."""
        symbols: list[Symbol] = []
        spoken = state.open | (state.hypotheses.length > 0).any(1)
        last = state.num_frames - 1
        frames = last.repeat_interleave(self.beam.width)
        finished = self._finish(flat_rows(state.hypotheses), frames)
        too_long = (finished.length > MAX_UNSTABLE) & (finished.score > -torch.inf)
        crowded = rows & too_long.view(len(rows), -1).any(1)
        if crowded.any():  # once more, with room for all that is added
            roomy = self._tell_stable(state, symbols, crowded, self.config.max_emissions_at_end)
            state = where_rows(crowded, roomy, state)
            finished = self._finish(flat_rows(state.hypotheses), frames)
        ready = replace(
            state, hypotheses=where_rows(rows & spoken, split_rows(finished, self.beam.width), state.hypotheses)
        )
        closed = self.close(rows & spoken, ready, last, symbols)
        return symbols, where_rows(rows, self.init_state(len(rows), self._restarted(state)), closed)

    def _restarted(self, state: BeamState) -> tuple[Any, ...]:
        """Scorers [B] before the first symbol of each stream's next segment."""
        first: tuple[Any, ...] = map_state(lambda x: x[:, 0], state.hypotheses.scorers)
        return self.fusion.restart(first)

    def _finish(self, active: Hypotheses, frames: Tensor) -> Hypotheses:
        context = active.decoder.hidden.new_zeros(len(frames), self.energies.memory_size)
        nothing = context.new_zeros(len(frames), self.window)
        done = replace(active, score=active.score.masked_fill(~active.ended, -torch.inf))
        active = replace(active, score=active.score.masked_fill(active.ended, -torch.inf))
        for _ in range(self.config.max_emissions_at_end):
            decoder = self.decoder.step(active.token, context, active.decoder)
            parent, token, score, q = self._choose(decoder.hidden, context, active)
            children: Hypotheses = gather_rows(replace(active, decoder=decoder), parent)
            children = self._append(children, token, frames[parent], torch.zeros_like(score), q, nothing)
            active = replace(children, score=score, scorers=self.fusion.advance(children.scorers, token))
            done = self._prune(done, replace(active, score=active.score.masked_fill(~active.ended, -torch.inf)))
            active = replace(active, score=active.score.masked_fill(active.ended, -torch.inf))
        none = (split_rows(done, self.beam.width).score == -torch.inf).all(1).repeat_interleave(self.beam.width)
        return where_rows(none, active, done)  # cut short if no hypothesis ever ends
