"""Boosted phrases: a scorer of which each row may favour words and phrases of its own, such as names.

Knows nothing of attention or audio. What a search takes off words that it does not know, and how they sound, says
a `Wording`.
"""

import logging
import sys
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mocha_model.language import WordLanguageModel
from mocha_model.pronounced import ASTRAY, UNKNOWN, WordReader
from mocha_model.pronunciation import PronunciationError, pronounce
from mocha_model.streaming import map_state, scatter_rows
from mocha_model.tokenizer import Tokenizer, normalize_text

log = logging.getLogger(__name__)
PHRASE_BONUS = 0.5  # per character of a phrase, in live text
SPELLED = 0.5  # of what an unknown word's spelling costs, where a phrase has that word


@dataclass(frozen=True)
class PhraseState:
    """State of a `PhraseBook`: [B] int64 each, the node in its table, and where the row's phrases begin."""

    node: Tensor
    root: Tensor


@dataclass(frozen=True)
class Trie:
    """The phrases of a row, or of all.

    Attributes:
        next_node: [N, V] int32, where each symbol leads.
        worth: [N, V, 2] float32, what it adds: bonuses, and prices; [N, V, 1] where words have no price.
        labels: [N, P] int16, the phones of the word that is complete at a node, then zeros; of those that a search
            knows by itself, none.

    """

    next_node: Tensor
    worth: Tensor
    labels: Tensor


class Wording:
    """What a search that asks how words sound makes of the words of phrases."""

    def __init__(self, words: WordReader, language: WordLanguageModel, weight: float, tokenizer: Tokenizer) -> None:
        """`weight` is of `language`, which knows the words of `words`."""
        self.lexicon, self._language, self._weight, self._tokenizer = words.lexicon, language, weight, tokenizer
        self._lengths: list[int] = words.lexicon.lengths.tolist()

    def labels(self, words: Iterable[str]) -> dict[str, list[int]]:
        """Of `words` those whose phones the search does not know, as espeak-ng says them; none without it."""
        spelled = {word: self._tokenizer.encode(word) for word in words}
        known = ((w, self._language.known(s)[1]) for w, s in spelled.items() if Tokenizer.unk_id not in s)
        asked = tuple(sorted(word for word, number in known if number is None or not self._lengths[number]))
        try:
            said = _said(asked) if asked else {}
        except PronunciationError as error:
            _warn(f"names in lists of phrases are known by their spelling alone: {error}")
            return {}
        return {word: labels for word, phones in said.items() if (labels := self.lexicon.labels_of(phones))}

    def price(self, word: Sequence[int], ends: bool, sounds: bool) -> float:
        """What the search takes off for how a word begins, or for all of it where it `ends`.

        Half of what the language model takes off for how an unknown word is spelled: a phrase says that it may come.
        And what is taken off words without phones, unless it has been told how this one `sounds`.
        """
        begun, number = self._language.known(word)
        taken = -ASTRAY * (len(word) - begun)
        if ends and not sounds and (number is None or not self._lengths[number]):
            taken -= UNKNOWN
        if begun < len(word) or (ends and number is None):
            taken -= SPELLED * self._weight * self._language.spelling(word, ends)
        return taken


@lru_cache(maxsize=64)  # many streams have the same list
def _said(words: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return {word: tuple(map(sys.intern, phones)) for word, phones in pronounce(words).items()}


@lru_cache(maxsize=16)
def _warn(message: str) -> None:
    """Once, not for each stream."""
    log.warning(message)


class PhraseBook:
    """Favours phrases, character by character; each row may have its own.

    A phrase may begin where a word may, inside another one too, of which it may turn out that it is not said: what a
    row follows is the longest beginning of a phrase that its text ends with (Aho & Corasick 1975). Every symbol of it
    is worth the bonus, kept when a phrase is complete and else paid back. Of phrases that overlap, the one that is
    complete first is said; one that contains it adds the rest. The end of a segment completes a phrase as a space does.
    What its words cost in a search comes back in the same way. All tries lie in one table, the same phrases of several
    rows once; node 0 belongs to rows without phrases and is worth nothing.

    `add` may be called in any thread, beside one that searches and removes, and does not keep it waiting.
    """

    def __init__(self, tokenizer: Tokenizer, bonus: float = PHRASE_BONUS, wording: Wording | None = None) -> None:
        """`bonus` is per character of a phrase, beside the price that its words have in a search, of its `wording`."""
        self._tokenizer, self._bonus, self._wording = tokenizer, bonus, wording
        self._inserting, self._lock = threading.Lock(), threading.Lock()  # the second for moments, of what follows
        self._vacant: list[tuple[int, int]] = []  # (first node, how many) that are free, sorted
        self._sizes: dict[int, int] = {}  # nodes of the trie that begins at a node
        self._users: dict[int, int] = {}  # how often `add` gave a root that was not removed
        self._roots: dict[frozenset[str], int] = {}
        self._table = _table(1, tokenizer.vocab_size, wording)

    def __len__(self) -> int:
        """How many tries there are."""
        return len(self._sizes)

    def add(self, phrases: Sequence[str]) -> int:
        """The root of their trie, for `PhraseState.root`; 0 if there are no phrases.

        Words are normalised; phrases with a character that the search does not write are left out.
        """
        cleaned = [text for text in map(self._cleaned, phrases) if text]
        if not cleaned:
            return 0
        together = frozenset(cleaned)
        if root := self._shared(together):
            return root
        trie = _trie(cleaned, self._tokenizer, self._bonus, self._wording)
        with self._inserting:
            if root := self._shared(together):
                return root
            first = self._place(len(trie.worth))
            placed = replace(trie, next_node=trie.next_node + first)
            scatter_rows(self._table, torch.arange(first, first + len(trie.worth)), placed)
            root = first + 1  # where a word may begin
            with self._lock:
                self._sizes[first], self._roots[together], self._users[root] = len(trie.worth), root, 1
        return root

    def _shared(self, phrases: frozenset[str]) -> int:
        """The root of phrases that are there already, for one user more; else 0."""
        with self._lock:
            if root := self._roots.get(phrases, 0):
                self._users[root] += 1
        return root

    def _cleaned(self, phrase: str) -> str:
        """A phrase as the search may write it, without marks on letters if it writes none; else nothing."""
        text = normalize_text(phrase, self._tokenizer.units)
        if Tokenizer.unk_id in self._tokenizer.encode(text):
            bare = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
            text = normalize_text(bare, self._tokenizer.units)
        if Tokenizer.unk_id in self._tokenizer.encode(text):
            _warn("phrases with characters that the recogniser does not write are left out")
            return ""
        return text

    def remove(self, root: int) -> None:
        """Take back what `add` gave once, which that row may not use any longer; 0 does nothing."""
        with self._lock:
            if root and self._users[root] > 1:
                self._users[root] -= 1
            elif root:
                del self._users[root]
                self._roots = {phrases: at for phrases, at in self._roots.items() if at != root}
                self._vacate(root - 1, self._sizes.pop(root - 1))
                if not self._sizes and not self._inserting.locked():
                    self._vacant, self._table = [], _table(1, self._tokenizer.vocab_size, self._wording)

    def _vacate(self, first: int, count: int) -> None:
        """Free `count` nodes; what is free in a row is one vacancy, so that longer tries find room there. Locked."""
        vacant: list[tuple[int, int]] = []
        for at, size in sorted([*self._vacant, (first, count)]):
            if vacant and sum(vacant[-1]) == at:
                at, size = vacant[-1][0], vacant.pop()[1] + size
            vacant.append((at, size))
        self._vacant = vacant

    def _place(self, count: int) -> int:
        """The first of `count` nodes in a row that are free, and are not any longer; while nobody else inserts."""
        if (first := self._taken(count)) is None:
            size = len(self._table.worth)
            more = max(count, size)  # at least doubled, so that adding stays cheap; what nobody writes takes no memory
            longer = map_state(lambda x: _longer(x, more), self._table)
            with self._lock:
                self._table = longer
                self._vacate(size, more)
            first = self._taken(count)
        assert first is not None
        return first

    def _taken(self, count: int) -> int | None:
        with self._lock:
            for index, (first, size) in enumerate(self._vacant):
                if size >= count:
                    self._vacant[index : index + 1] = [(first + count, size - count)] if size > count else []
                    return first
        return None

    def init_state(self, batch_size: int, device: torch.device) -> PhraseState:
        """Rows without phrases."""
        nothing = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return PhraseState(nothing, nothing.clone())

    def at(self, roots: Tensor) -> PhraseState:
        """Rows at the beginning of the phrases of `roots` [B] int64."""
        return PhraseState(roots.clone(), roots.clone())

    def restart(self, state: PhraseState) -> PhraseState:
        """Where a word may begin."""
        return self.at(state.root)

    def scores(self, state: PhraseState) -> Tensor | float:
        """Bonuses, prices, and what is paid back of both; 0 where no row has phrases."""
        return self._worth(state).sum(2) if self._sizes else 0.0

    def bonuses(self, state: PhraseState) -> Tensor | float:
        """The same without prices."""
        return self._worth(state)[..., 0] if self._sizes else 0.0

    def _worth(self, state: PhraseState) -> Tensor:
        return self._table.worth[state.node.cpu()].to(state.node.device)

    def advance(self, state: PhraseState, token: Tensor) -> PhraseState:
        """Follow one symbol."""
        if not self._sizes:
            return state
        into = self._table.next_node[state.node.cpu(), token.cpu()].long()
        return PhraseState(into.to(token.device), state.root)

    def sounds(self, state: PhraseState, ended: bool = True) -> Tensor | None:
        """Phones [B, P] int64, then zeros, of the words that have just `ended`, or would if they did now.

        Zeros for words that are of no phrase, or known to the search; None where no row has phrases that sound.
        """
        if not self._sizes or not self._table.labels.shape[1]:
            return None
        node = state.node.cpu()
        at = node if ended else self._table.next_node[node, self._tokenizer.space_id].long()
        return self._table.labels[at].long().to(state.node.device)


class LivePhrases:
    """The phrases of `book` for another search of the same rows, one that takes nothing off words: bonuses alone."""

    def __init__(self, book: PhraseBook) -> None:
        self.init_state, self.advance, self.restart = book.init_state, book.advance, book.restart
        self.scores = book.bonuses


def _table(size: int, vocab_size: int, wording: Wording | None) -> Trie:
    """Of nodes that lead nowhere."""
    phones, kinds = (wording.lexicon.labels.shape[1], 2) if wording else (0, 1)
    worth, labels = torch.zeros(size, vocab_size, kinds), torch.zeros(size, phones, dtype=torch.int16)
    return Trie(torch.zeros(size, vocab_size, dtype=torch.int32), worth, labels)


def _longer(x: Tensor, more: int) -> Tensor:
    """Rows x [N, ...] and `more` of anything."""
    longer = x.new_empty(len(x) + more, *x.shape[1:])
    longer[: len(x)] = x
    return longer


@dataclass
class _Node:
    """What follows a beginning of phrases: nodes by symbol. Its own symbol gains a bonus and a price.

    `owed` is the price of what is written of its word, `labels` are the phones of the word that it completes.
    """

    gain: tuple[float, float]
    owed: float = 0.0
    labels: Sequence[int] = ()
    completes: bool = False
    below: dict[int, int] = field(default_factory=dict)


def _nodes(phrases: Sequence[str], tokenizer: Tokenizer, bonus: float, wording: Wording | None) -> list[_Node]:
    """Node 0 is inside another word, 1 before a word."""
    labels = wording.labels({word for phrase in phrases for word in phrase.split()}) if wording else {}
    nodes = [_Node((0.0, 0.0)), _Node((0.0, 0.0))]
    for phrase in phrases:
        at = 1
        for word in phrase.split():
            symbols, said = tokenizer.encode(word), labels.get(word, ())
            for place, symbol in enumerate([*symbols, tokenizer.space_id], 1):
                before, ends = nodes[at], place > len(symbols)
                at = before.below.setdefault(symbol, len(nodes))
                if at == len(nodes):
                    price = wording.price(symbols[:place], ends, bool(said)) if wording else 0.0
                    gain = bonus, price - before.owed
                    nodes.append(_Node(gain, 0.0 if ends else price, said if ends else ()))
        nodes[at].completes = True
    return nodes


def _trie(phrases: Sequence[str], tokenizer: Tokenizer, bonus: float, wording: Wording | None) -> Trie:
    """An automaton (Aho & Corasick 1975, algorithms 2 to 4) whose patterns begin and end with words.

    `tail` of a node is that of the longest other beginning that it ends with and that breaks no complete phrase;
    `earned` is what is paid back if none becomes complete, `kept` what no longer is from the node on.
    """
    nodes = _nodes(phrases, tokenizer, bonus, wording)
    trie = _table(len(nodes), tokenizer.vocab_size, wording)
    next_node, worth = trie.next_node.numpy(), trie.worth.numpy()
    gain = np.array([node.gain for node in nodes])[:, : worth.shape[2]]
    completes = np.array([node.completes for node in nodes])
    earned, kept, tail = np.zeros_like(gain), np.zeros_like(gain), np.zeros(len(nodes), dtype=np.int64)
    next_node[0, tokenizer.space_id] = 1
    level = np.array([1])  # all beginnings of one length; the tails of longer ones are shorter
    while len(level):
        next_node[level] = next_node[tail[level]]
        worth[level] = worth[tail[level]] + (earned[tail[level]] - earned[level])[:, None]
        edges = [(at, symbol, into) for at in level.tolist() for symbol, into in nodes[at].below.items()]
        at, symbol, level = np.array(edges, dtype=np.int64).reshape(-1, 3).T
        tail[level] = np.where(completes[level], 1, next_node[tail[at], symbol])
        full = earned[at] + gain[level]
        kept[level] = np.where(completes[level, None], full, kept[tail[level]])
        earned[level] = full - kept[level]
        next_node[at, symbol], worth[at, symbol] = level, gain[level]
        ends = symbol == tokenizer.space_id
        worth[at[ends], tokenizer.eos_id] = (kept[level] - earned[at])[ends]
    for number, node in enumerate(nodes):
        if node.labels:
            trie.labels[number, : len(node.labels)] = torch.tensor(node.labels)
    return trie
