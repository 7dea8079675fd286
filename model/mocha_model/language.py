"""A language model of words that is asked for characters: what beam search is fused with.

Probabilities of words are modified Kneser-Ney estimates over the two words before (Chen & Goodman 1999, section 3).
Words are numbered alphabetically, so all that begin with what is written so far are a range, and so are those of them
that go on with a given character: the probability of a character is that of a range by that of another, exactly, with
nothing to be guessed until a word is complete. An LSTM over all words before may be mixed with them (`word_ranges`).
Words outside the vocabulary are spelled by pairs of characters, at the price of an unknown word. Knows nothing of
attention or audio.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from mocha_model.checkpoint import write_whole
from mocha_model.prefix_tree import prefix_tree
from mocha_model.pronounced import Lexicon
from mocha_model.streaming import gather_rows, map_state, with_rows
from mocha_model.tokenizer import Tokenizer
from mocha_model.word_counts import Table, WordCounts
from mocha_model.word_lstm import END, OTHER, Recalled, WordLSTM
from mocha_model.word_ranges import WordRanges

IMPOSSIBLE = -30.0  # logarithm that stands for what cannot be
SURELY = 0.05  # an LSTM that is surer of the end of a sentence is taken to leave this to words
UNSUMMED = 0.05  # the least that is left to words that are not summed
LSTM_PREFIX = "recurrent.lstm."  # of its weights in a file


class LanguageModelError(ValueError):
    """A file that is not a language model for this vocabulary; the message says why and names the file."""


class VocabularyError(LanguageModelError):
    """A language model of other symbols than the recogniser's."""


@dataclass(frozen=True)
class Recurrent:
    """An LSTM that is mixed with the counts.

    Attributes:
        words: [N - 2] int64, which of the counts' words its numbers from `OTHER` + 1 on are.
        share: of its probability in the mixture.

    """

    lstm: WordLSTM
    words: NDArray[np.int64]
    share: float


@dataclass(frozen=True)
class LanguageState:
    """State of a `WordLanguageModel`, each [B] unless another shape is given.

    Attributes:
        node: int64, what is written of the present word.
        previous: int64, the word before it. context: int64, that and the one before, as a context of trigrams.
        last: int64, the symbol before. spelled: float32, log-probability of what is written as an unknown word.
        mass: float32, log-probability of all words that begin with what is written. rare: float32, how many times as
            probable as by their frequency the words are that the LSTM does not sum; 0 where there is none.
        next_scores: [B, S] float32.
        recalled: of the LSTM after the last complete word; nothing where there is none.

    """

    node: Tensor
    previous: Tensor
    context: Tensor
    last: Tensor
    spelled: Tensor
    mass: Tensor
    rare: Tensor
    next_scores: Tensor
    recalled: Recalled | tuple[()]


class WordLanguageModel:
    """A `Scorer` over the characters of a tokenizer; everything on the CPU, since nearly all of it is look-up."""

    FORMAT = "mocha-asr-lm/4"

    def __init__(
        self,
        counts: WordCounts,
        tokenizer: Tokenizer,
        recurrent: Recurrent | None = None,
        said: tuple[tuple[str, ...], ...] = (),
    ) -> None:
        """`said` are the phones of each of the counts' words, () where they are not known; () if of none."""
        if tokenizer.units != "characters":
            raise VocabularyError("a language model of words needs a recogniser of characters")
        self.counts, self.recurrent, self.said, self._space = counts, recurrent, said, tokenizer.space_id
        num_words, num_pairs = len(counts.words), len(counts.pairs)
        stride = num_words + 2
        self._end, self._start, self._unknown = num_words, num_words + 1, num_words + 2
        self._stride, self._no_context = stride, num_pairs
        self._unigrams = torch.from_numpy(np.concatenate([[0.0], np.cumsum(counts.unigrams, dtype=np.float64)]))
        self._bigrams = Table(*counts.bigrams, stride, stride)
        self._trigrams = Table(*counts.trigrams, num_pairs, stride)
        self._pairs = torch.from_numpy(np.append(counts.pairs, np.iinfo(np.int64).max))  # and one after all others
        self._spelling = torch.from_numpy(counts.spelling)
        self._recurrent_number = torch.full((num_words + 3,), OTHER)  # of each word, the unknown one included
        if recurrent:
            self._recurrent_number[recurrent.words] = torch.arange(len(recurrent.words)) + OTHER + 1
            own = torch.from_numpy(recurrent.words)
            self._ranges = WordRanges(recurrent.lstm, own, self._unigrams[: num_words + 1])
        self._lexicons: dict[tuple[str, ...], Lexicon | None] = {}
        spelled = [tokenizer.encode(word) for word in counts.words]
        self._children, self._bounds = prefix_tree(spelled, tokenizer.vocab_size)

    def prior(self) -> Tensor:
        """How much more frequent than others each character is in the text: log-probabilities [S] less their mean.

        The mean is that of the text's characters; symbols that are none have 0.
        """
        log_probs = torch.from_numpy(self.counts.characters)
        mean = (log_probs.exp() * log_probs).sum()
        return torch.where(log_probs < 0, log_probs - mean, 0.0)

    def lexicon(self, phones: tuple[str, ...]) -> Lexicon | None:
        """The words' `phones` as labels; None where they are not known, or most have others.

        The numbers from V on stand for no word, and have none.
        """
        if phones not in self._lexicons:
            self._lexicons[phones] = Lexicon.of((*self.said, (), (), ()), phones) if self.said else None
        return self._lexicons[phones]

    def known(self, symbols: Sequence[int]) -> tuple[int, int | None]:
        """How many of `symbols`, from the first on, some word begins with; and the number of the word that all are."""
        node, children = 0, self._children.numpy()
        for place, symbol in enumerate(symbols):
            if (node := children[node, symbol]) == len(children) - 1:
                return place, None
        first, following = self._bounds[node, :2].tolist()
        return len(symbols), first if first < following else None

    def spelling(self, symbols: Sequence[int], ends: bool) -> float:
        """Log-probability that an unknown word begins with `symbols`, or is all of them where it `ends`."""
        path = [self._space, *symbols, *[Tokenizer.blank_id] * ends]
        return float(self.counts.spelling[path[:-1], path[1:]].sum())

    def completed(self, before: LanguageState, after: LanguageState) -> Tensor:
        """Rows [B] bool that have just written the end of a word, which is then `after`'s `previous`."""
        return (after.last == self._space) & (before.last != self._space)

    def unfinished(self, state: LanguageState) -> Tensor:
        """The word [B] int64 that would be complete if it ended here, -1 where none has begun."""
        device = state.node.device
        return torch.where(state.last == self._space, -1, self._word(state.node.cpu()).to(device))

    def astray(self, state: LanguageState) -> Tensor:
        """Rows [B] bool that have written what no word begins with."""
        return state.node == len(self._bounds) - 1

    def init_state(self, batch_size: int, device: torch.device) -> LanguageState:
        """Before the first word of a sentence."""
        state: LanguageState = map_state(lambda x: x.repeat_interleave(batch_size, 0), self._beginning)
        return _to(device, state)

    @cached_property
    def _beginning(self) -> LanguageState:
        """Of one row, which others are copies of."""
        zero = torch.zeros(1, dtype=torch.int64)
        begin = self._after(zero + self._start, zero + self._start)
        recalled = self.recurrent.lstm.init_state(1) if self.recurrent else ()
        words = (zero, zero + self._start, begin, zero + self._space)
        nothing = (zero.float(), zero.float(), zero.float(), zero[:, None])
        return self._with_scores(LanguageState(*words, *nothing, recalled))

    def scores(self, state: LanguageState) -> Tensor:
        """Log-probabilities of the next character, [B, S] float32."""
        return state.next_scores

    def restart(self, state: LanguageState) -> LanguageState:
        """Before the first word of the next sentence."""
        return self.init_state(len(state.node), state.node.device)

    def advance(self, state: LanguageState, token: Tensor) -> LanguageState:
        """Write one character."""
        device = token.device
        state, token = _to(torch.device("cpu"), state), token.cpu()
        ends = token == self._space
        complete = ends & (state.last != self._space)
        word = self._word(state.node)
        previous = torch.where(complete, word, state.previous)
        context = torch.where(complete, self._after(state.previous, word), state.context)
        node = torch.where(ends, 0, self._children[state.node, token].long())
        spelled = torch.where(ends, 0.0, state.spelled + self._spelling[state.last, token])
        recalled = self._recall(state.recalled, complete.nonzero()[:, 0], word)
        mass = state.mass + state.next_scores.gather(1, token[:, None])[:, 0]
        new = LanguageState(node, previous, context, token, spelled, mass, state.rare, state.next_scores, recalled)
        return _to(device, self._with_scores(new))

    def _recall(self, before: Recalled | tuple[()], rows: Tensor, word: Tensor) -> Recalled | tuple[()]:
        """What the LSTM recalls when it has read `word` [B] in `rows`."""
        if not isinstance(before, Recalled) or not self.recurrent or not len(rows):
            return before
        read = self.recurrent.lstm.advance(gather_rows(before, rows), self._recurrent_number[word[rows]])
        return with_rows(before, rows, read)

    def _with_scores(self, state: LanguageState) -> LanguageState:
        """`state` with its `next_scores`; blank has the score of an end of a word, and is never asked for."""
        bounds = self._bounds[state.node].long()  # [B, S + 1]
        below, rest = self._below(state.previous, state.context, bounds)
        known = below.diff(dim=1).clamp(min=0)  # [B, S]; the blank is the word that ends here
        unknown = (rest + state.spelled).exp()[:, None] * self._spelling[state.last].exp()
        word, begins = self._word(state.node), state.last == self._space
        mass = torch.where(begins, (known + unknown).sum(1).log().float(), state.mass)
        state, expected, completes = self._mixed(state, word, begins, known, bounds)
        scores = (expected + unknown).log() - mass[:, None]
        ended = self._end_of_sentence(
            torch.where(begins, state.previous, word),
            torch.where(begins, state.context, self._after(state.previous, word)),
        )
        finish = torch.where(begins, 0.0, (completes + unknown[:, Tokenizer.blank_id]).log() - mass)
        scores[:, Tokenizer.eos_id] = finish + ended.log()
        scores[:, self._space] = torch.where(begins, -torch.inf, finish + torch.log1p(-ended))
        return replace(state, mass=mass, next_scores=scores.clamp(min=IMPOSSIBLE).float())

    def _mixed(
        self, state: LanguageState, word: Tensor, begins: Tensor, known: Tensor, bounds: Tensor
    ) -> tuple[LanguageState, Tensor, Tensor]:
        """Masses by the mixture of words between `bounds` [B, S + 1], whose masses by the counts are `known` [B, S].

        Returns `state`, with its `rare` in rows [B] where a word `begins`; the masses [B, S] as far as words are
        summed; and that of the `word` [B] that ends here, which is exact. Whether the sentence ends is for the counts
        to say: the LSTM is asked which word follows if it does not. Complete words that it has no number for keep what
        they have.
        """
        complete = known[:, Tokenizer.blank_id]
        if self.recurrent is None or not isinstance(state.recalled, Recalled):
            return state, known, complete
        lstm, share, recalled = self.recurrent.lstm, self.recurrent.share, state.recalled
        goes_on = 1 - self._end_of_sentence(state.previous, state.context)
        ends = lstm.log_probs(recalled, torch.full_like(state.node, END)).double().exp()
        factor = goes_on / (1 - ends).clamp(min=SURELY)  # of the LSTM's probabilities
        summed = factor[:, None] * self._ranges.masses(recalled, bounds)
        left = (goes_on - summed.sum(1)).clamp(min=UNSUMMED) / self._ranges.share_of_rare
        state = replace(state, rare=torch.where(begins, left.float(), state.rare))
        expected = torch.lerp(known, summed + state.rare[:, None] * known * self._ranges.rare(bounds), share)
        number = self._recurrent_number[word]
        rows = (number > OTHER).nonzero()[:, 0]
        p = lstm.log_probs(gather_rows(recalled, rows), number[rows]).double().exp() * factor[rows]
        own = torch.lerp(complete[rows], torch.minimum(p, goes_on[rows]), share)
        return state, expected, complete.index_copy(0, rows, own)

    def _word(self, node: Tensor) -> Tensor:
        """The word [B] that is complete at `node`."""
        bounds = self._bounds[node, :2].long()
        return torch.where(bounds[:, 0] < bounds[:, 1], bounds[:, 0], self._unknown)

    def _after(self, first: Tensor, second: Tensor) -> Tensor:
        """The context of trigrams [B] that two words are."""
        key = first * self._stride + second
        at = torch.searchsorted(self._pairs, key)
        known = (self._pairs[at] == key) & (second != self._unknown)
        return torch.where(known, at, self._no_context)

    def _below(self, previous: Tensor, context: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """How probable the words below each of `words` [B, K] are, and the log-probability [B] of an unknown one."""
        after_one, after_two = self._bigrams.rest[previous], self._trigrams.rest[context]
        shorter = self._bigrams.below(previous, words) + after_one[:, None] * self._unigrams[words]
        below = self._trigrams.below(context, words) + after_two[:, None] * shorter
        return below, (after_two * after_one * (1 - self._unigrams[-1])).log()

    def _end_of_sentence(self, previous: Tensor, context: Tensor) -> Tensor:
        """Its probability [B] after these."""
        place = torch.tensor([self._end, self._end + 1]).expand(len(previous), 2).contiguous()
        return self._below(previous, context, place)[0].diff(dim=1)[:, 0].clamp(1e-9, 1 - 1e-9)

    def save(self, path: Path, tokenizer: Tokenizer, provenance: dict[str, Any]) -> None:
        """One .safetensors file, like a recogniser's checkpoint; atomically. Masses are kept as float16 logarithms."""
        c = self.counts
        tensors: dict[str, NDArray[Any]] = {
            "words": np.frombuffer("\n".join(c.words).encode(), dtype=np.uint8),
            "unigrams": c.unigrams,
            "spelling": c.spelling,
            "characters": c.characters,
            "pairs": c.pairs,
        }
        for name, (keys, masses) in (("bigrams", c.bigrams), ("trigrams", c.trigrams)):
            word = keys % self._stride
            tensors[f"{name}.words"] = word.astype(np.uint16 if self._stride <= 1 << 16 else np.int32)
            tensors[f"{name}.sizes"] = np.bincount(keys // self._stride).astype(np.int32)
            with np.errstate(divide="ignore"):  # what has no mass of its own has -inf
                tensors[f"{name}.masses"] = np.log(masses).astype(np.float16)
        if self.recurrent:
            weights = {name: weight.half().numpy() for name, weight in self.recurrent.lstm.state_dict().items()}
            tensors |= {f"{LSTM_PREFIX}{name}": weight for name, weight in weights.items()}
            tensors["recurrent.words"] = self.recurrent.words.astype(np.int32)
        if self.said:
            tensors["said"] = np.frombuffer("\n".join(map(" ".join, self.said)).encode(), dtype=np.uint8)
        metadata = {
            "format": self.FORMAT,
            "vocabulary": json.dumps(tokenizer.symbols, ensure_ascii=False),
            "provenance": json.dumps(provenance, ensure_ascii=False),
            "share": str(self.recurrent.share if self.recurrent else 0),
        }
        write_whole(path, save(tensors, metadata))

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer) -> "WordLanguageModel":
        """Read a model of the recogniser's vocabulary; raises LanguageModelError."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != cls.FORMAT:
                    raise LanguageModelError(f"{path}: not a {cls.FORMAT} file")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise LanguageModelError(f"{path}: no such language model") from error
        except (SafetensorError, OSError) as error:
            raise LanguageModelError(f"{path}: not a readable safetensors file ({error})") from error
        try:
            if tuple(json.loads(metadata["vocabulary"])) != tokenizer.symbols:
                raise VocabularyError(f"{path}: made for another vocabulary than the recogniser's")
            counts = _counts(tensors, tokenizer.vocab_size)
            recurrent = _recurrent(tensors, len(counts.words), float(metadata["share"]))
            return cls(counts, tokenizer, recurrent, _said(tensors, len(counts.words)))
        except LanguageModelError:
            raise
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise LanguageModelError(f"{path}: its parts do not fit together ({error})") from error


def _counts(tensors: dict[str, NDArray[Any]], vocab_size: int) -> WordCounts:
    """What is counted, of a file's tensors; raises LookupError, TypeError or ValueError where they do not fit."""
    words = tuple(tensors["words"].tobytes().decode().split("\n"))
    names = ("unigrams", "pairs", "spelling", "characters")
    unigrams, pairs, spelling, characters = (tensors[name] for name in names)
    if (unigrams.shape, spelling.shape, characters.shape) != ((len(words) + 1,), (vocab_size,) * 2, (vocab_size,)):
        raise ValueError(f"counts of other words than {len(words)}, or other symbols than {vocab_size}")
    stride, tables = len(words) + 2, {}
    for name, num_contexts in (("bigrams", stride), ("trigrams", len(pairs))):
        sizes, last, masses = (tensors[f"{name}.{part}"] for part in ("sizes", "words", "masses"))
        if not (len(sizes) <= num_contexts and sizes.sum() == len(last) == len(masses) and (last < stride).all()):
            raise ValueError(f"{name} of other words")
        keys = np.repeat(np.arange(len(sizes)), sizes) * stride + last
        tables[name] = (keys, np.exp(masses.astype(np.float32)))
    return WordCounts(words, unigrams, **tables, pairs=pairs, spelling=spelling, characters=characters)


def _recurrent(tensors: dict[str, NDArray[Any]], num_words: int, share: float) -> Recurrent | None:
    """The LSTM among a file's tensors; raises KeyError, ValueError or RuntimeError where they do not fit together."""
    weights = {
        name.removeprefix(LSTM_PREFIX): torch.from_numpy(weight).float()
        for name, weight in tensors.items()
        if name.startswith(LSTM_PREFIX)
    }
    if not weights:
        return None
    (count, vector_size), (_, hidden_size) = weights["vectors.weight"].shape, weights["query.weight"].shape
    with torch.random.fork_rng(devices=[]):  # what is drawn is for nothing; on "meta" it would take a second
        lstm = WordLSTM(count, vector_size, hidden_size)
    lstm.load_state_dict(weights, assign=True)
    own = tensors["recurrent.words"].astype(np.int64)
    if own.shape != (count - OTHER - 1,) or not (own.min() >= 0 and own.max() < num_words):
        raise ValueError("the LSTM is of other words than the counts")
    if not 0 <= share <= 1:
        raise ValueError(f"the LSTM has a share of {share}")
    return Recurrent(lstm.eval().requires_grad_(False), own, share)


def _said(tensors: dict[str, NDArray[Any]], num_words: int) -> tuple[tuple[str, ...], ...]:
    """The words' phones among a file's tensors; raises ValueError where they are not those of as many words."""
    if "said" not in tensors:
        return ()
    said = tuple(tuple(line.split()) for line in tensors["said"].tobytes().decode().split("\n"))
    if len(said) != num_words:
        raise ValueError(f"{len(said)} words have phones, not {num_words}")
    return said


def _to(device: torch.device, state: LanguageState) -> LanguageState:
    moved: LanguageState = map_state(lambda x: x.to(device), state)
    return moved
