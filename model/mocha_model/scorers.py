"""What a search may add to the decoder's own scores.

A scorer is stateful and batched like everything else: it is told the symbols of many hypotheses one at a time and says
what each next symbol is worth. Knows nothing of attention or audio.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mocha_model.pronounced import WordReader


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
