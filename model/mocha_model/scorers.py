"""What a search may add to the decoder's own scores, and one such scorer: boosted phrases.

A scorer is stateful and batched like everything else: it is told the symbols of many hypotheses one at a time and says
what each next symbol is worth. Knows nothing of attention or audio.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mocha_model.pronounced import WordReader
from mocha_model.tokenizer import Tokenizer, normalize_text


class Scorer(Protocol):
    """Anything that can be fused; state is a tree of batch-first tensors (see `streaming`)."""

    def init_state(self, batch_size: int, device: torch.device) -> Any:
        """State before the first symbol of a segment."""
        ...

    def scores(self, state: Any) -> Tensor | float:
        """What each next symbol adds to a hypothesis' score: [B, V] float32, natural logarithm; or one number."""
        ...

    def advance(self, state: Any, token: Tensor) -> Any:
        """State after the symbols `token` [B] int64."""
        ...

    def restart(self, state: Any) -> Any:
        """State of the same rows before the first symbol of their next segment."""
        ...


@dataclass(frozen=True)
class Fusion:
    """A weighted sum of scorers; of none, nothing.

    Attributes:
        parts: the scorers with their weights.
        prior: [V] float32, what joint search takes off the CTC branch's log-probabilities at each frame.
        words: what joint search asks of the phones of each word that the first of `parts`, a `WordLanguageModel`, has
            read; None for nothing.

    """

    parts: tuple[tuple[float, Scorer], ...]
    prior: Tensor | None = None
    words: WordReader | None = None

    def init_state(self, batch_size: int, device: torch.device) -> tuple[Any, ...]:
        """The states of all scorers."""
        return tuple(scorer.init_state(batch_size, device) for _, scorer in self.parts)

    def scores(self, state: tuple[Any, ...]) -> Tensor | float:
        """[B, V], or 0 without scorers."""
        return sum((w * s.scores(part) for (w, s), part in zip(self.parts, state, strict=True)), start=0.0)

    def advance(self, state: tuple[Any, ...], token: Tensor) -> tuple[Any, ...]:
        """All scorers hear the same symbols."""
        return tuple(s.advance(part, token) for (_, s), part in zip(self.parts, state, strict=True))

    def restart(self, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """All scorers begin a new segment."""
        return tuple(s.restart(part) for (_, s), part in zip(self.parts, state, strict=True))


@dataclass(frozen=True)
class PhraseState:
    """State of a `PhraseBook`: [B] int64 each, the node in its table, and where the row's phrases begin."""

    node: Tensor
    root: Tensor


Trie = tuple[Tensor, Tensor]  # `next_node` and `worth` of its nodes, see `PhraseBook`
Price = Callable[[Sequence[int], bool], float]  # of what is written of a word, and whether it ends there


PHRASE_BONUS = 0.5  # per character of a phrase, in live text


class PhraseBook:
    """Favours phrases, character by character; each row may have its own.

    The phrases of a row are a trie, each of which may begin where a word may. Every symbol that follows it is worth the
    bonus; one that leaves it pays back what was earned since the last phrase that was complete. The end of a segment
    completes a phrase as a space does. All tries lie in one table of `worth` [N, V] and `next_node` [N, V]; node 0
    belongs to rows without phrases and is worth nothing.
    """

    def __init__(self, tokenizer: Tokenizer, bonus: float = PHRASE_BONUS, price: Price | None = None) -> None:
        """`bonus` is per character of a phrase, beside the `price` that its words have in a search."""
        self._tokenizer, self._bonus, self._price = tokenizer, bonus, price or _nothing
        self._vacant: list[tuple[int, int]] = []  # (first node, how many) that are free, sorted
        self._sizes: dict[int, int] = {}  # nodes of the trie at a root
        self._next_node = torch.zeros(1, tokenizer.vocab_size, dtype=torch.int64)
        self._worth = torch.zeros(1, tokenizer.vocab_size)

    def __len__(self) -> int:
        """How many tries there are."""
        return len(self._sizes)

    def add(self, phrases: Sequence[str]) -> int:
        """The root of a new trie, for `PhraseState.root`; 0 if there are no phrases. Words are normalised."""
        return self.insert(self.trie(phrases))

    def trie(self, phrases: Sequence[str]) -> Trie | None:
        """What `insert` takes. Nearly all the work, and may be done in any thread: it leaves the table alone."""
        cleaned = [text for text in (normalize_text(p, self._tokenizer.units) for p in phrases) if text]
        return _trie(cleaned, self._tokenizer, self._bonus, self._price) if cleaned else None

    def insert(self, trie: Trie | None) -> int:
        """See `add`."""
        if trie is None:
            return 0
        next_node, worth = trie
        first = self._place(len(worth))
        place = slice(first, first + len(worth))
        self._next_node[place], self._worth[place] = next_node + first, worth
        self._sizes[first] = len(worth)
        return first + 1  # where a word may begin

    def remove(self, root: int) -> None:
        """Forget the phrases at `root`, which no row may use any longer; 0 does nothing."""
        if root:
            self._vacate(root - 1, self._sizes.pop(root - 1))
            if not self._sizes:
                self._vacant, self._next_node, self._worth = [], self._next_node[:1], self._worth[:1]

    def _vacate(self, first: int, count: int) -> None:
        """Free `count` nodes; what is free in a row is one vacancy, so that longer tries find room there."""
        vacant: list[tuple[int, int]] = []
        for at, size in sorted([*self._vacant, (first, count)]):
            if vacant and sum(vacant[-1]) == at:
                at, size = vacant[-1][0], vacant.pop()[1] + size
            vacant.append((at, size))
        self._vacant = vacant

    def _place(self, count: int) -> int:
        """The first of `count` nodes in a row that are free."""
        for index, (first, size) in enumerate(self._vacant):
            if size >= count:
                self._vacant[index : index + 1] = [(first + count, size - count)] if size > count else []
                return first
        first = len(self._worth)
        more = max(count, first)  # at least doubled, so that adding stays cheap
        self._next_node = torch.cat([self._next_node, self._next_node.new_zeros(more, self._next_node.shape[1])])
        self._worth = torch.cat([self._worth, self._worth.new_zeros(more, self._worth.shape[1])])
        if more > count:
            self._vacant.append((first + count, more - count))
        return first

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
        """Bonuses and what is paid back; 0 where no row has phrases."""
        if not self._sizes:
            return 0.0
        return self._worth[state.node.cpu()].to(state.node.device)

    def advance(self, state: PhraseState, token: Tensor) -> PhraseState:
        """Follow one symbol."""
        if not self._sizes:
            return state
        return PhraseState(self._next_node[state.node.cpu(), token.cpu()].to(token.device), state.root)


def _nothing(word: Sequence[int], ends: bool) -> float:
    """A `Price`."""
    return 0.0


def _trie(phrases: Sequence[str], tokenizer: Tokenizer, bonus: float, price: Price) -> Trie:
    """`next_node` [N, V] int64 and `worth` [N, V] of a trie; node 0 is inside another word, 1 before a word."""
    space, vocab = tokenizer.encode(" ")[0], tokenizer.vocab_size
    children: list[dict[int, int]] = [{}, {}]
    gains, owed = [0.0, 0.0], [0.0, 0.0]  # on the way into a node; for what is written of its word
    complete: set[int] = set()
    for phrase in phrases:
        node, word = 1, list[int]()
        for token in [*tokenizer.encode(phrase), space]:
            before, ends = node, token == space
            word += [] if ends else [token]
            node = children[before].setdefault(token, len(children))
            if node == len(children):
                children.append({})
                total = price(word, ends)
                gains.append(bonus + total - owed[before])
                owed.append(0.0 if ends else total)
            word = [] if ends else word
        complete.add(node)
    edges: list[tuple[int, int, int, float]] = []  # node, token, node, worth
    earned = [0.0] * len(children)  # since the last complete phrase on the way to a node; parents come before children
    for node, below in enumerate(children):
        # The space that ends a phrase is also where the next word, and another phrase, may begin.
        onwards = children[1] | below if node in complete else below
        edges += [(node, token, into, gains[into]) for token, into in onwards.items()]
        if (end := below.get(space)) in complete:
            edges.append((node, tokenizer.eos_id, 0, gains[end]))
        for into in below.values():
            earned[into] = 0.0 if into in complete else earned[node] + gains[into]
    source, symbol, target, gain = (torch.tensor(column) for column in zip(*edges, strict=True))
    next_node = torch.zeros(len(children), vocab, dtype=torch.int64)
    next_node[:, space] = 1
    next_node[source, symbol] = target
    worth = -torch.tensor(earned)[:, None].repeat(1, vocab)
    worth[source, symbol] = gain
    return next_node, worth
