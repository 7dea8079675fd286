"""Joint search: prefixes of the CTC branch, scored by language models, and the MoChA decoder, as they grow.

CTC prefix search (Graves et al. 2006, section 3.2; Hannun et al. 2014) says at which frame a symbol may be written; the
decoder attends to the chunk that ends there, as it was trained to along the CTC path, and says which (triggered
attention: Moritz, Hori & Le Roux 2019, algorithm 1, with both scores at once). So it needs no energy to reach p = 0.5,
and a language model may overrule either. Streaming and stable like `beam`, whose bookkeeping it shares.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mocha_model.beam import BeamConfig, BeamSearch, BeamState
from mocha_model.config import DecoderConfig
from mocha_model.decoder import Decoder
from mocha_model.encoder import RecurrentState
from mocha_model.hypotheses import MAX_UNSTABLE, Hypotheses
from mocha_model.scorers import Fusion
from mocha_model.search import Symbol
from mocha_model.streaming import gather_rows, map_state, scatter_rows, where_rows
from mocha_model.tokenizer import Tokenizer

SILENT = -0.02  # log-probability of blank from which on nothing is written at a frame
WRITTEN = slice(len((Tokenizer.blank_id, Tokenizer.sos_id, Tokenizer.eos_id, Tokenizer.unk_id)), None)


@dataclass(frozen=True)
class JointConfig:
    """How wide, and what counts how much beside the CTC branch.

    Attributes:
        width: prefixes kept per stream.
        threshold: prefixes this much worse than the best one (natural logarithm) are dropped.
        decoder_weight: of the decoder's log-probabilities; 0 beside a language model, which then reads better.
        length_bonus: added per symbol.
        patience: as of `BeamConfig`.

    """

    width: int = 32
    threshold: float = 12.0
    decoder_weight: float = 0.0
    length_bonus: float = 1.0
    patience: int | None = None


@dataclass(frozen=True)
class Prefixes(Hypotheses):
    """Hypotheses of a joint search. Score is ``logaddexp(blank, label) + added``.

    p is the highest probability that the CTC branch gave a symbol while it was the newest, q the decoder's for it.

    Attributes:
        blank, label: float32, CTC log-probability of all alignments so far that end in a blank, or in the last symbol.
        added: float32, what decoder, scorers and bonus add.
        name, stem: int64, hashes of the symbols, and of all but the last.

    """

    blank: Tensor
    label: Tensor
    added: Tensor
    name: Tensor
    stem: Tensor


@dataclass(frozen=True)
class _Answer:
    """The decoder's, about A prefixes: log-probabilities [A, V], attention weights [A, w] and its states after."""

    scores: Tensor
    weights: Tensor
    decoder: RecurrentState


class JointSearch(BeamSearch):
    """Behind the interface of `GreedySearch`."""

    def __init__(
        self,
        decoder: Decoder,
        config: DecoderConfig,
        space_id: int,
        joint: JointConfig | None = None,
        fusion: Fusion | None = None,
    ) -> None:
        self.joint = joint or JointConfig()
        limits = BeamConfig(self.joint.width, self.joint.threshold, patience=self.joint.patience)
        super().__init__(decoder, config, space_id, limits, fusion)

    def _fresh(self, start: Tensor, scorers: tuple[Any, ...]) -> Prefixes:
        h = super()._fresh(start, scorers)
        nothing = torch.zeros_like(h.score)
        zero = torch.zeros_like(h.start)
        return Prefixes(
            **vars(h), blank=h.score.clone(), label=nothing - torch.inf, added=nothing, name=zero, stem=zero - 1
        )

    def _advance(  # type: ignore[override]
        self, active: Prefixes, keys: Tensor, values: Tensor, frame: Tensor, labels: Tensor
    ) -> Prefixes:
        """One frame: every prefix stays, or goes on by one symbol; the best `width` of each row."""
        log_probs = labels.float().log_softmax(dim=1)  # [B, V]
        active = self._level(active)
        each = log_probs.repeat_interleave(self.joint.width, 0)
        reached = torch.logaddexp(active.blank, active.label)
        last = active.token[:, None]
        again = each.gather(1, last)
        after_label = active.blank[:, None] + again
        frames = frame.repeat_interleave(self.joint.width)
        newest = torch.arange(MAX_UNSTABLE, device=last.device) == active.length[:, None] - 1
        likelier = newest & (again.exp() > active.p)
        stayed = replace(
            active,
            blank=reached + each[:, Tokenizer.blank_id],
            label=active.label + again[:, 0],
            p=torch.where(likelier, again.exp(), active.p),
            frames=torch.where(likelier, frames[:, None], active.frames),
        )
        silent = log_probs[:, Tokenizer.blank_id] > SILENT
        if silent.all():
            stayed = _scored(stayed)
            return replace(stayed, score=self._strict(stayed.score.view(-1, self.joint.width)))
        # [B W, V]: alignments that now write a symbol; the last one again only after a blank.
        written = (reached[:, None] + each).scatter(1, last, after_label)
        written[:, : WRITTEN.start] = -torch.inf
        written[silent.repeat_interleave(self.joint.width)] = -torch.inf
        stayed, written = self._meet(stayed, written, again.exp(), frames)
        return self._grow(active, _scored(stayed), written, each, keys, values, frames)

    def _level(self, h: Prefixes) -> Prefixes:
        """`h` with 0 for the best prefix of each row, so that numbers stay small; what has no score has nothing."""
        dead, width = h.score == -torch.inf, self.joint.width
        best = h.score.view(-1, width).argmax(dim=1, keepdim=True)

        def above(x: Tensor) -> Tensor:
            return x - x.view(-1, width).gather(1, best).repeat_interleave(width)

        reached = torch.logaddexp(h.blank, h.label)
        offset = above(reached) - reached
        blank, label = ((x + offset).masked_fill(dead, -torch.inf) for x in (h.blank, h.label))
        return replace(h, blank=blank, label=label, added=above(h.added.masked_fill(dead, 0.0)))

    def _meet(self, h: Prefixes, written: Tensor, p: Tensor, frames: Tensor) -> tuple[Prefixes, Tensor]:
        """Where a prefix and one more symbol are another prefix of the row, the alignments are that one's.

        If they are likelier than its own, so are its symbols' times; `p` [B W, 1] is that of its last at `frames`.
        """
        width = self.joint.width
        name, stem, last = (x.view(-1, width) for x in (h.name, h.stem, h.token))
        same = stem[:, :, None] == name[:, None, :]  # [B, prefix, prefix without its last symbol]
        alive = (h.blank > -torch.inf) | (h.label > -torch.inf)
        row, into, source = (same & alive.view(-1, 1, width) & alive.view(-1, width, 1)).nonzero().unbind(1)
        source, symbol, into = row * width + source, last[row, into], row * width + into
        better = written[source, symbol] > torch.logaddexp(h.blank, h.label)[into]
        label = h.label.clone()
        label[into] = torch.logaddexp(label[into], written[source, symbol])
        written[source, symbol] = -torch.inf
        h, source, into = replace(h, label=label), source[better], into[better]
        if not len(into):
            return h, written
        place, newest = torch.arange(MAX_UNSTABLE, device=into.device), h.length[into, None] - 1

        def timed(own: Tensor, now: Tensor) -> Tensor:
            """`own` [B W, L] of prefixes, where they are likelier as others that go on `now` [B W, 1]."""
            renewed = torch.where(place < newest, own[source], torch.where(place == newest, now[into], own[into]))
            return own.index_copy(0, into, renewed)

        return replace(h, p=timed(h.p, p), frames=timed(h.frames, frames[:, None])), written

    def _grow(
        self,
        before: Prefixes,
        h: Prefixes,
        written: Tensor,
        each: Tensor,
        keys: Tensor,
        values: Tensor,
        frames: Tensor,
    ) -> Prefixes:
        """Choose among the prefixes `h` as they are and all that `written` [B W, V] makes of them as they were.

        The decoder's scores are never above 0. Where they count, it is asked about those prefixes that could come among
        the best if it were certain; where they do not, about those that were chosen to grow.
        """
        width, vocab, weight = self.joint.width, written.shape[1], self.joint.decoder_weight
        added = h.added[:, None].expand_as(written) + self.joint.length_bonus + self.fusion.scores(h.scorers)
        grown = (written + added).nan_to_num(-torch.inf, neginf=-torch.inf)
        hopeful = (grown.amax(dim=1) > self._least(h.score)).nonzero()[:, 0]
        if not len(hopeful):
            return replace(h, score=self._strict(h.score.view(-1, width)))
        if weight:
            asked, answer = hopeful, self._ask(h, hopeful, keys, values, frames)
            own = torch.full_like(written, -torch.inf).index_copy(0, asked, answer.scores)
            added = added + weight * own
            grown = (written + added).nan_to_num(-torch.inf, neginf=-torch.inf)
        candidates = torch.cat([h.score.view(-1, width), grown.view(-1, width * vocab)], dim=1)
        score, index = candidates.topk(width, dim=1)
        score = self._strict(score)
        grows = (index >= width).flatten() & (score > -torch.inf)
        first = torch.arange(len(index), device=index.device)[:, None] * width
        source = (first + torch.where(index >= width, (index - width) // vocab, index)).flatten()
        token = ((index - width) % vocab).flatten()
        if not weight:
            asked = torch.unique(source[grows])
            answer = self._ask(h, asked, keys, values, frames)
        stayed: Prefixes = gather_rows(h, source)
        heard = torch.zeros_like(h.token).index_copy(0, asked, torch.arange(len(asked), device=asked.device))[source]
        p, q = each[source, token].exp(), answer.scores[heard, token].exp()
        grown_from = replace(stayed, p=before.p[source], frames=before.frames[source])
        longer = self._append(grown_from, token, frames, p, q, answer.weights[heard])
        longer = replace(
            longer,
            decoder=gather_rows(answer.decoder, heard),
            last_emission=frames,
            blank=torch.full_like(stayed.blank, -torch.inf),
            label=written[source, token],
            added=added[source, token],
            name=stayed.name * 1_000_003 + token,
            stem=stayed.name,
        )
        new: Prefixes = where_rows(grows, longer, stayed)
        at = grows.nonzero()[:, 0]
        scatter_rows(new.scorers, at, self.fusion.advance(gather_rows(stayed.scorers, at), token[at]))
        return replace(new, score=score)

    def _ask(self, h: Prefixes, asked: Tensor, keys: Tensor, values: Tensor, frames: Tensor) -> _Answer:
        """What the decoder says of the prefixes `asked` [A] of `h` at `frames` [B W]."""
        of = asked // self.joint.width
        context, weights, decoder = self._attend(gather_rows(h, asked), keys[of], values[of], frames[asked])
        return _Answer(self.decoder.symbol_scores(decoder.hidden, context), weights, decoder)

    def _least(self, score: Tensor) -> Tensor:
        """What a new prefix must score more than to be among the best, [B W]; `score` [B W] is of those there are."""
        each = score.view(-1, self.joint.width)
        least = torch.maximum(each.amin(dim=1), each.amax(dim=1) - self.joint.threshold)
        return least.repeat_interleave(self.joint.width)

    def _strict(self, score: Tensor) -> Tensor:
        """`score` [B, W] without what is too much worse than the best of its row, [B W]."""
        good = score >= score.max(dim=1, keepdim=True).values - self.joint.threshold
        return torch.where(good, score, -torch.inf).flatten()

    def close(self, rows: Tensor, state: BeamState, frame: Tensor, symbols: list[Symbol]) -> BeamState:
        """As in `BeamSearch`, of prefixes that may end a sentence here."""
        h = state.hypotheses
        worth = self.fusion.scores(map_state(lambda x: x.flatten(0, 1), h.scorers))
        if isinstance(worth, Tensor):
            h = replace(h, score=h.score + worth[:, Tokenizer.eos_id].view_as(h.score))
        return super().close(rows, replace(state, hypotheses=where_rows(rows, h, state.hypotheses)), frame, symbols)

    def _finish(self, active: Hypotheses, frames: Tensor) -> Hypotheses:
        return active  # what the CTC branch heard is all there is


def _scored(h: Prefixes) -> Prefixes:
    return replace(h, score=torch.logaddexp(h.blank, h.label) + h.added)
