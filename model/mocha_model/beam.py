"""Beam search over the online attention process, streaming, batched over streams and hypotheses.

Every hypothesis has its own pointer, decoder state and scorer states. The search goes frame by frame, so hypotheses
are always compared after the same audio: at each frame those whose attention fires are extended by their best symbols
(and asked again at the same frame, the pointer being inclusive), the others pass on; then the best few survive. A
hypothesis' score is the log-probability of its symbols, of the decisions that its path took (weighted), and of what
the scorers say.

The number of hypotheses is the papers' "rank pruning", the threshold their "pruning threshold" (Chiu & Raffel 2018,
A.1: 8 and 3). Knows nothing of samples or text.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from mocha_model.config import DecoderConfig
from mocha_model.decoder import Decoder
from mocha_model.encoder import RecurrentState
from mocha_model.hypotheses import Hypotheses, append, best_of, flat_rows, split_rows
from mocha_model.scorers import Fusion
from mocha_model.search import Symbol
from mocha_model.streaming import gather_rows, map_state, where_rows
from mocha_model.tokenizer import Tokenizer
from mocha_model.wide import Follower, WideSearch, WideState


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
class OnlineHypotheses(Hypotheses):
    """Hypotheses of the online process.

    Attributes:
        decoder: s_{i-1}. ended: bool, whether the last symbol is end-of-sequence.
        start, repeats: as in `search.SearchState`.
        q [., L] and weights [., L, w] are of the symbols not yet stable.

    """

    suffixes: ClassVar[tuple[str, ...]] = ("tokens", "frames", "p", "q", "weights")

    decoder: RecurrentState
    ended: Tensor
    start: Tensor
    repeats: Tensor
    q: Tensor
    weights: Tensor


class BeamSearch(WideSearch):
    """Beam search behind the interface of `GreedySearch`."""

    def __init__(
        self,
        decoder: Decoder,
        config: DecoderConfig,
        space_id: int,
        beam: BeamConfig | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        self.beam = beam or BeamConfig()
        window = decoder.attention.chunk_width
        super().__init__(decoder, config, space_id, self.beam.width, self.beam.patience, window, fusion)

    def keys_of(self, memory: Tensor, phones: Tensor | None = None) -> Tensor:
        """The memory's part of the energies."""
        keys: Tensor = self.energies.memory_projection(memory)
        return keys

    def no_keys(self, batch_size: int, like: Tensor) -> Tensor:
        """Zeros."""
        return like.new_zeros(batch_size, self.key_window - 1, self.energies.memory_projection.out_features)

    def _follower(self, start: Tensor) -> tuple[()]:
        return ()

    def _frame(
        self, keys: Tensor, values: Tensor, labels: Tensor, state: WideState, symbols: list[Symbol], real: Tensor
    ) -> WideState:
        """As in `WideSearch`; segments end where the best hypothesis says so too."""
        state = super()._frame(keys, values, labels, state, symbols, real)
        best = best_of(state.hypotheses.score)
        ended = state.hypotheses.ended.gather(1, best[:, None])[:, 0] & real
        return self.close(ended, state, state.num_frames, symbols, keys, values) if ended.any() else state

    def _said(self, state: WideState, best: Tensor, count: Tensor, values: Tensor) -> tuple[Tensor, Tensor, tuple[()]]:
        row = torch.arange(len(best), device=best.device)
        return state.hypotheses.q[row, best], state.hypotheses.weights[row, best], ()

    def _fresh(self, start: Tensor, scorers: tuple[Any, ...]) -> OnlineHypotheses:
        nothing = self._nothing(start, scorers)
        count, p = nothing["length"], nothing["p"]
        return OnlineHypotheses(
            **nothing,
            decoder=self.decoder.init_state(len(count)),
            ended=count > 0,
            start=start.repeat_interleave(self.width),
            repeats=count.clone(),
            q=p.clone(),
            weights=p.new_zeros(*p.shape, self.window),
        )

    def _advance(
        self, active: OnlineHypotheses, keys: Tensor, values: Tensor, frame: Tensor, labels: Tensor
    ) -> OnlineHypotheses:
        """Let every hypothesis decide on this frame until none fires; the best `width` of each row."""
        width = self.width
        keys, values = keys.repeat_interleave(width, 0), values.repeat_interleave(width, 0)
        frames = frame.repeat_interleave(width)
        waiting: OnlineHypotheses | None = None
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

    def _prune(self, *groups: OnlineHypotheses) -> OnlineHypotheses:
        """The best `width` of each row's hypotheses, within the threshold."""
        width = self.width
        parts = [split_rows(g, width) for g in groups]
        joined: OnlineHypotheses = map_state(lambda *x: torch.cat(x, 1), *parts) if len(parts) > 1 else parts[0]
        score, index = joined.score.topk(width, dim=1)
        score = torch.where(score >= score[:, :1] - self.beam.threshold, score, -torch.inf)
        rows = torch.arange(len(score), device=score.device)[:, None] * joined.score.shape[1] + index
        return replace(gather_rows(flat_rows(joined), rows.flatten()), score=score.flatten())

    def _extend(
        self, parents: OnlineHypotheses, e: Tensor, keys: Tensor, values: Tensor, frames: Tensor
    ) -> OnlineHypotheses:
        """The best `width` one-symbol extensions of each row's firing hypotheses (algorithm 1, lines 8-13, 20-22)."""
        before = Follower(parents.decoder, parents.token, parents.last_emission, parents.start)
        context, weights, decoder = self.attend(before, keys, values, frames)
        parent, token, score, q = self._choose(decoder.hidden, context, parents)
        children: OnlineHypotheses = gather_rows(replace(parents, decoder=decoder), parent)
        repeats = torch.where(frames[parent] == children.last_emission, children.repeats, 0) + 1
        grown = append(children, token, frames=frames[parent], p=e.sigmoid()[parent], q=q, weights=weights[parent])
        return replace(
            grown,
            ended=token == Tokenizer.eos_id,
            score=score,
            scorers=self.fusion.advance(children.scorers, token),
            last_emission=frames[parent],
            repeats=repeats,
        )

    def _choose(
        self, hidden: Tensor, context: Tensor, parents: OnlineHypotheses
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(parent row, token, score, q), each [B W], of the best extensions of each stream's hypotheses."""
        width = self.width
        own = self.decoder.symbol_scores(hidden, context)
        total = own + self.fusion.scores(parents.scorers) + self.beam.length_bonus
        total = (total + parents.score[:, None]).nan_to_num(-torch.inf, neginf=-torch.inf)
        score, flat = total.view(-1, width * total.shape[1]).topk(width, dim=1)
        rows = torch.arange(len(score), device=score.device)[:, None] * width
        parent = (rows + flat // total.shape[1]).flatten()
        token = (flat % total.shape[1]).flatten()
        return parent, token, score.flatten(), own[parent, token].exp()

    def _finish(self, active: OnlineHypotheses, frames: Tensor) -> OnlineHypotheses:
        context = active.decoder.hidden.new_zeros(len(frames), self.energies.memory_size)
        nothing = context.new_zeros(len(frames), self.window)
        done = replace(active, score=active.score.masked_fill(~active.ended, -torch.inf))
        active = replace(active, score=active.score.masked_fill(active.ended, -torch.inf))
        for _ in range(self.config.max_emissions_at_end):
            decoder = self.decoder.step(active.token, context, active.decoder)
            parent, token, score, q = self._choose(decoder.hidden, context, active)
            children: OnlineHypotheses = gather_rows(replace(active, decoder=decoder), parent)
            children = append(children, token, frames=frames[parent], p=torch.zeros_like(score), q=q, weights=nothing)
            scorers = self.fusion.advance(children.scorers, token)
            active = replace(children, ended=token == Tokenizer.eos_id, score=score, scorers=scorers)
            done = self._prune(done, replace(active, score=active.score.masked_fill(~active.ended, -torch.inf)))
            active = replace(active, score=active.score.masked_fill(active.ended, -torch.inf))
        none = (split_rows(done, self.width).score == -torch.inf).all(1).repeat_interleave(self.width)
        return where_rows(none, active, done)  # cut short if no hypothesis ever ends
