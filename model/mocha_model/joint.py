"""Joint search: prefixes of the CTC branch, scored by language models; the MoChA decoder follows what is decided.

CTC prefix search (Graves et al. 2006, section 3.2; Hannun et al. 2014) says at which frame a symbol may be written, and
a language model may overrule the CTC branch, whose posteriors may be divided by a prior. Once a symbol is certain the
decoder attends to the chunk that ends at its frame, as it was trained to along the CTC path (triggered attention:
Moritz, Hori & Le Roux 2019), and says how likely it is. Where the model has a head of phones, each word is scored by
how it sounds as well, when it is complete (`pronounced`). Streaming and stable like `beam`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mocha_model.config import DecoderConfig
from mocha_model.decoder import Decoder
from mocha_model.hypotheses import MAX_UNSTABLE, Hypotheses, append
from mocha_model.language import WordLanguageModel
from mocha_model.phrases import PhraseBook, Wording
from mocha_model.pronounced import ASTRAY, LEAST_LOG_PROB, REACH, WordReader
from mocha_model.scorers import Fusion
from mocha_model.search import Symbol
from mocha_model.streaming import gather_rows, map_state, scatter_rows
from mocha_model.tokenizer import Tokenizer
from mocha_model.wide import Follower, WideSearch, WideState

SILENT = -0.02  # log-probability of blank from which on nothing is written at a frame


@dataclass(frozen=True)
class JointConfig:
    """How wide, and what counts how much beside the CTC branch.

    Attributes:
        width: prefixes kept per stream.
        threshold: prefixes this much worse than the best one (natural logarithm) are dropped.
        length_bonus: added per symbol.
        patience: frames, as of `BeamConfig`, but always a number; a stream keeps the memory of so many.
        caution: per frame. A symbol that may wait for n more frames is emitted already where the prefixes without it
            have less than exp(-caution n) of the probability, and these are dropped; inf: where there are none.
        least_evidence: of a segment's words on average, for whoever passes over others (`emissions.SpeechGate`).

    """

    width: int = 256
    threshold: float = 20.0
    length_bonus: float = 0.0
    patience: int = 200
    caution: float = math.inf
    least_evidence: float = -math.inf


@dataclass(frozen=True)
class Prefixes(Hypotheses):
    """Hypotheses of a joint search. Score is ``logaddexp(blank, label) + added``.

    p is the highest probability that the CTC branch, without a prior, gave a symbol while it was the newest, at the
    frame in `frames`.

    Attributes:
        blank, label: float32, CTC log-probability, less the prior, of all alignments so far that end in a blank, or in
            the last symbol.
        added: float32, what scorers and bonus add.
        name, stem: int64, hashes of the symbols, and of all but the last.
        sounds: `Heard` of the words so far; nothing without a head of phones.

    """

    blank: Tensor
    label: Tensor
    added: Tensor
    name: Tensor
    stem: Tensor
    sounds: Any


def wording(fusion: Fusion, tokenizer: Tokenizer) -> Wording | None:
    """What a search with `fusion` makes of the words of phrases; None if it does not ask how words sound."""
    return Wording(*_asked(fusion), fusion.parts[0][0], tokenizer) if fusion.words else None


class JointSearch(WideSearch):
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
        width, patience = self.joint.width, self.joint.patience
        window = patience + decoder.attention.chunk_width
        words = fusion.words if fusion else None
        reach = REACH + 1 if words else 0
        super().__init__(decoder, config, space_id, width, patience, window, fusion, self.joint.caution, reach)
        prior, device = self.fusion.prior, decoder.output.weight.device
        self._prior = 0.0 if prior is None else prior.to(device)

    def keys_of(self, memory: Tensor, phones: Tensor | None = None) -> Tensor:
        """The phones' log-probabilities, if words are scored by them: the decoder projects what it attends to."""
        if self.fusion.words is None:
            return memory[..., :0]
        assert phones is not None, "words are scored by phones that are not given"
        return phones

    def no_keys(self, batch_size: int, like: Tensor) -> Tensor:
        """Blanks."""
        words = self.fusion.words
        nothing = like.new_full((batch_size, self.key_window - 1, words.num_labels if words else 0), LEAST_LOG_PROB)
        nothing[..., : Tokenizer.blank_id + 1] = 0
        return nothing

    def _fresh(self, start: Tensor, scorers: tuple[Any, ...]) -> Prefixes:
        nothing = self._nothing(start, scorers)
        score, name = nothing["score"], torch.zeros_like(nothing["length"])
        none = torch.zeros_like(score)
        words = self.fusion.words
        sounds = words.init_state(start.repeat_interleave(self.width)) if words else ()
        own = {"blank": score.clone(), "label": none - torch.inf, "added": none, "name": name, "stem": name - 1}
        return Prefixes(**nothing, **own, sounds=sounds)

    def _follower(self, start: Tensor) -> Follower:
        first = torch.full_like(start, Tokenizer.sos_id)
        return Follower(self.decoder.init_state(len(start)), first, start - 1, start.clone())

    def _finish(self, active: Prefixes, frames: Tensor) -> Prefixes:
        return active  # what the CTC branch heard is all there is

    def _said(self, state: WideState, best: Tensor, count: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Follower]:
        """One symbol of every row at a time, as the decoder reads them."""
        most, width = int(count.max()) if len(count) else 0, self.attention.chunk_width
        row = torch.arange(len(best), device=best.device)
        tokens, frames = state.hypotheses.tokens[row, best], state.hypotheses.frames[row, best]
        q, weights = values.new_zeros(len(best), most), values.new_zeros(len(best), most, width)
        newest, reach = state.num_frames - 1, torch.arange(1 - width, 1, device=best.device)
        follower = gather_rows(state.follower, row)  # a copy, changed in place
        for n in range(most):
            at = (count > n).nonzero()[:, 0]
            token, frame = tokens[at, n], frames[at, n]
            last = values.shape[1] - 1 - (newest[at] - frame)
            chunk = values[at[:, None], last[:, None] + reach]
            keys = self.energies.memory_projection(chunk)
            own = gather_rows(follower, at)
            context, weights[at, n], decoder = self.attend(own, keys, chunk, frame)
            q[at, n] = self.decoder.symbol_scores(decoder.hidden, context).gather(1, token[:, None])[:, 0].exp()
            scatter_rows(follower, at, Follower(decoder, token, frame, own.start))
        return q, weights, follower

    def _advance(self, active: Prefixes, keys: Tensor, values: Tensor, frame: Tensor, labels: Tensor) -> Prefixes:
        """One frame: every prefix stays, or goes on by one symbol; the best `width` of each row."""
        log_posteriors = labels.float().log_softmax(dim=1)  # [B, V]
        heard = log_posteriors.exp()
        active = self._level(active)
        each = (log_posteriors - self._prior).repeat_interleave(self.width, 0)
        reached = torch.logaddexp(active.blank, active.label)
        last = active.token[:, None]
        again = each.gather(1, last)
        heard_again = heard.gather(1, active.token.view(-1, self.width)).view(-1, 1)
        after_label = active.blank[:, None] + again
        frames = frame.repeat_interleave(self.width)
        newest = torch.arange(MAX_UNSTABLE, device=last.device) == active.length[:, None] - 1
        likelier = newest & (heard_again > active.p)
        stayed = replace(
            active,
            blank=reached + each[:, Tokenizer.blank_id],
            label=active.label + again[:, 0],
            p=torch.where(likelier, heard_again, active.p),
            frames=torch.where(likelier, frames[:, None], active.frames),
        )
        silent = log_posteriors[:, Tokenizer.blank_id] > SILENT
        if silent.all():
            stayed = _scored(stayed)
            return replace(stayed, score=self._strict(stayed.score.view(-1, self.width)))
        # [B W, V]: alignments that now write a symbol; the last one again only after a blank.
        written = (reached[:, None] + each).scatter(1, last, after_label)
        written[:, : Tokenizer.first_id] = -torch.inf
        written[silent.repeat_interleave(self.width)] = -torch.inf
        stayed, written = self._meet(active, stayed, written, heard_again, frames)
        return self._grow(active, _scored(stayed), written, heard, frames, keys)

    def _level(self, h: Prefixes) -> Prefixes:
        """`h` with 0 for the best prefix of each row, so that numbers stay small; what has no score has nothing."""
        dead, width = h.score == -torch.inf, self.width
        best = h.score.view(-1, width).argmax(dim=1, keepdim=True)

        def above(x: Tensor) -> Tensor:
            return x - x.view(-1, width).gather(1, best).repeat_interleave(width)

        reached = torch.logaddexp(h.blank, h.label)
        offset = above(reached) - reached
        blank, label = ((x + offset).masked_fill(dead, -torch.inf) for x in (h.blank, h.label))
        return replace(h, blank=blank, label=label, added=above(h.added.masked_fill(dead, 0.0)))

    def _meet(
        self, before: Prefixes, h: Prefixes, written: Tensor, p: Tensor, frames: Tensor
    ) -> tuple[Prefixes, Tensor]:
        """Where a prefix and one more symbol are another prefix of the row, the alignments are that one's.

        If they are likelier than its own, so are its symbols' times, as they were `before` this frame; `p` [B W, 1] is
        that of its last at `frames`.
        """
        width = self.width
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

        def timed(own: Tensor, past: Tensor, now: Tensor) -> Tensor:
            """`own` [B W, L] of prefixes, where they are likelier as others of the `past` that go on `now` [B W, 1]."""
            renewed = torch.where(place < newest, past[source], torch.where(place == newest, now[into], own[into]))
            return own.index_copy(0, into, renewed)

        p, frames = timed(h.p, before.p, p), timed(h.frames, before.frames, frames[:, None])
        return replace(h, p=p, frames=frames), written

    def _grow(
        self, before: Prefixes, h: Prefixes, written: Tensor, heard: Tensor, frames: Tensor, keys: Tensor
    ) -> Prefixes:
        """Choose among the prefixes `h` as they are and all that `written` [B W, V] makes of them as they were.

        `heard` [B, V] are the CTC branch's own probabilities, `keys` [B, w, P] those of phones, as logarithms.
        """
        width, vocab = self.width, written.shape[1]
        added = h.added[:, None].expand_as(written) + self.joint.length_bonus + self.fusion.scores(h.scorers)
        grown = (written + added).nan_to_num(-torch.inf, neginf=-torch.inf)
        candidates = torch.cat([h.score.view(-1, width), grown.view(-1, width * vocab)], dim=1)
        score, index = candidates.topk(width, dim=1)
        score = self._strict(score)
        grows = (index >= width).flatten() & (score > -torch.inf)
        first = torch.arange(len(index), device=index.device)[:, None] * width
        source = (first + torch.where(index >= width, (index - width) // vocab, index)).flatten()
        token = ((index - width) % vocab).flatten()
        new: Prefixes = replace(gather_rows(h, source), score=score)  # a copy, changed in place
        if not len(at := grows.nonzero()[:, 0]):
            return new
        own, symbol, now = source[at], token[at], frames[at]
        shorter: Prefixes = gather_rows(new, at)
        times = replace(shorter, p=before.p[own], frames=before.frames[own])
        longer = replace(
            append(times, symbol, frames=now, p=heard[own // width, symbol]),
            scorers=self.fusion.advance(shorter.scorers, symbol),
            last_emission=now,
            blank=torch.full_like(shorter.blank, -torch.inf),
            label=written[own, symbol],
            added=added[own, symbol],
            name=shorter.name * 1_000_003 + symbol,
            stem=shorter.name,
        )
        scatter_rows(new, at, self._sounded(longer, shorter, keys, at // width) if self.fusion.words else longer)
        return new

    def _sounded(self, longer: Prefixes, shorter: Prefixes, keys: Tensor, stream: Tensor) -> Prefixes:
        """Prefixes [R, ...] of `stream` [R], `longer` by a symbol than `shorter`, with what they gain by their sounds.

        The sounds of `longer` are changed in place.
        """
        words, language = _asked(self.fusion)
        before, after = shorter.scorers[0], longer.scorers[0]
        gain = torch.where(language.astray(after), ASTRAY, torch.zeros_like(longer.added))
        if len(ends := language.completed(before, after).nonzero()[:, 0]):
            read = (gather_rows(longer.sounds, ends), after.previous[ends], keys[:, -REACH:], stream[ends])
            named = self._phrases(longer.scorers, ends)
            sounds, gain[ends] = words.read(*read, longer.last_emission[ends], named)
            scatter_rows(longer.sounds, ends, sounds)
        return replace(longer, added=longer.added + gain, score=longer.score + gain)

    def _phrases(self, scorers: tuple[Any, ...], rows: Tensor | None = None, ended: bool = True) -> Tensor | None:
        """See `PhraseBook.sounds`; of all rows, or of `rows` [K]."""
        last = self.fusion.parts[-1][1]
        if not isinstance(last, PhraseBook):
            return None
        return last.sounds(scorers[-1] if rows is None else gather_rows(scorers[-1], rows), ended)

    def _strict(self, score: Tensor) -> Tensor:
        """`score` [B, W] without what is too much worse than the best of its row, [B W]."""
        good = score >= score.max(dim=1, keepdim=True).values - self.joint.threshold
        return torch.where(good, score, -torch.inf).flatten()

    def close(
        self, rows: Tensor, state: WideState, frame: Tensor, symbols: list[Symbol], keys: Tensor, values: Tensor
    ) -> WideState:
        """As in `WideSearch`, of prefixes that may end a sentence here."""
        at = rows.nonzero()[:, 0]
        h: Prefixes = map_state(lambda x: x[at].flatten(0, 1), state.hypotheses)
        score = h.score
        if self.fusion.words and len(at):
            words, language = _asked(self.fusion)
            newest, stream = (x.repeat_interleave(self.width) for x in ((state.num_frames - 1)[at], at))
            word, named = language.unfinished(h.scorers[0]), self._phrases(h.scorers, ended=False)
            score = score + words.close(h.sounds, word, keys[:, -REACH:], stream, newest, named)
        worth = self.fusion.scores(h.scorers)
        if isinstance(worth, Tensor):
            score = score + worth[:, Tokenizer.eos_id]
        scores = state.hypotheses.score.index_copy(0, at, score.view(-1, self.width))
        state = replace(state, hypotheses=replace(state.hypotheses, score=scores))
        return super().close(rows, state, frame, symbols, keys, values)


def _asked(fusion: Fusion) -> tuple[WordReader, WordLanguageModel]:
    """What is asked how words sound, and what knows the words."""
    language = fusion.parts[0][1]
    assert fusion.words is not None and isinstance(language, WordLanguageModel)
    return fusion.words, language


def _scored(h: Prefixes) -> Prefixes:
    return replace(h, score=torch.logaddexp(h.blank, h.label) + h.added)
