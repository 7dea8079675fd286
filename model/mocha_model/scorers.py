"""What a beam search may add to the decoder's own scores: language models and boosted phrases.

A scorer is stateful and batched like everything else: it is told the symbols of many hypotheses one at a time and says
what each next symbol is worth. Knows nothing of attention or audio.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from mocha_model.tokenizer import Tokenizer


class Scorer(Protocol):
    """Anything that can be fused; state is a tree of batch-first tensors (see `streaming`)."""

    def init_state(self, batch_size: int, device: torch.device) -> Any:
        """State before the first symbol of a segment."""
        ...

    def scores(self, state: Any) -> Tensor:
        """What each next symbol adds to a hypothesis' score: [B, V] float32, natural logarithm."""
        ...

    def advance(self, state: Any, token: Tensor) -> Any:
        """State after the symbols `token` [B] int64."""
        ...


@dataclass(frozen=True)
class Fusion:
    """A weighted sum of scorers; of none, nothing."""

    parts: tuple[tuple[float, Scorer], ...]

    def init_state(self, batch_size: int, device: torch.device) -> tuple[Any, ...]:
        """The states of all scorers."""
        return tuple(scorer.init_state(batch_size, device) for _, scorer in self.parts)

    def scores(self, state: tuple[Any, ...]) -> Tensor | float:
        """[B, V], or 0 without scorers."""
        return sum((w * s.scores(part) for (w, s), part in zip(self.parts, state, strict=True)), start=0.0)

    def advance(self, state: tuple[Any, ...], token: Tensor) -> tuple[Any, ...]:
        """All scorers hear the same symbols."""
        return tuple(s.advance(part, token) for (_, s), part in zip(self.parts, state, strict=True))


@dataclass(frozen=True)
class LanguageState:
    """State of a `CharacterLanguageModel`: LSTM output and cell [B, S], log-probabilities of the next symbol [B, V]."""

    hidden: Tensor
    cell: Tensor
    next_scores: Tensor


class LanguageModelError(ValueError):
    """A file that is not a language model for this vocabulary; the message says why and names the file."""


class CharacterLanguageModel(nn.Module):
    """Embedding, one LSTM, softmax over the recogniser's own symbols (Mikolov et al. 2010 with an LSTM)."""

    FORMAT = "mocha-asr-lm/1"

    def __init__(self, vocab_size: int, size: int = 256, embedding_size: int = 32) -> None:
        super().__init__()
        self.sizes = (vocab_size, size, embedding_size)
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.lstm = nn.LSTM(embedding_size, size, batch_first=True)
        self.output = nn.Linear(size, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, U, V] of the symbol after each of `tokens` [B, U] int64, which begin with start-of-sequence."""
        logits: Tensor = self.output(self.lstm(self.embedding(tokens))[0])
        return logits

    def init_state(self, batch_size: int, device: torch.device) -> LanguageState:
        """After start-of-sequence."""
        zeros = torch.zeros(batch_size, self.lstm.hidden_size, device=device)
        start = torch.full((batch_size,), Tokenizer.sos_id, device=device)
        nothing = torch.zeros(batch_size, self.embedding.num_embeddings, device=device)
        return self.advance(LanguageState(zeros, zeros.clone(), nothing), start)

    def scores(self, state: LanguageState) -> Tensor:
        """Log-probabilities."""
        return state.next_scores

    def advance(self, state: LanguageState, token: Tensor) -> LanguageState:
        """One step of the LSTM."""
        before = (state.hidden[None], state.cell[None])
        y, (hidden, cell) = self.lstm(self.embedding(token)[:, None], before)
        return LanguageState(hidden[0], cell[0], self.output(y[:, 0]).float().log_softmax(1))

    def save(self, path: Path, tokenizer: Tokenizer, provenance: dict[str, Any]) -> None:
        """One .safetensors file, like a recogniser's checkpoint."""
        metadata = {
            "format": self.FORMAT,
            "sizes": json.dumps(self.sizes),
            "vocabulary": json.dumps(tokenizer.symbols, ensure_ascii=False),
            "provenance": json.dumps(provenance, ensure_ascii=False),
        }
        save_file({name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}, path, metadata)

    @classmethod
    def load(cls, path: Path, tokenizer: Tokenizer) -> "CharacterLanguageModel":
        """Read a model of the recogniser's vocabulary; raises LanguageModelError."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise LanguageModelError(f"{path}: not a readable safetensors file ({error})") from error
        if metadata.get("format") != cls.FORMAT:
            raise LanguageModelError(f"{path}: not a {cls.FORMAT} file")
        if tuple(json.loads(metadata["vocabulary"])) != tuple(tokenizer.symbols):
            raise LanguageModelError(f"{path}: made for another vocabulary than the recogniser's")
        model = cls(*json.loads(metadata["sizes"]))
        model.load_state_dict(weights)
        return model.eval()


@dataclass(frozen=True)
class PhraseState:
    """State of a `PhraseBooster`: node [B] int64 of the trie."""

    node: Tensor


class PhraseBooster:
    """Favours given phrases, character by character; a phrase that is begun and not finished pays back its bonus.

    A trie of the phrases, each of which may begin where a word may. Node n has earned `earned[n]`; a symbol that leads
    from n to m is worth ``earned[m] - earned[n]``, unless it completes a phrase, whose bonus is kept.
    """

    def __init__(self, phrases: list[str], tokenizer: Tokenizer, bonus: float = 1.0) -> None:
        """`bonus` is per character of a phrase; raises ValueError where the units are words."""
        if tokenizer.units != "characters":
            raise ValueError("phrases are boosted character by character, and these units are words")
        space, vocab = tokenizer.space_id, tokenizer.vocab_size
        children: list[dict[int, int]] = [{}, {}]  # node 0: inside another word, node 1: where a word may begin
        depth, complete = [0, 0], [False, False]
        for phrase in phrases:
            node = 1
            for token in [*tokenizer.encode(phrase), space]:
                if token not in children[node]:
                    children[node][token] = len(children)
                    children.append({})
                    depth.append(depth[node] + 1)
                    complete.append(False)
                node = children[node][token]
            complete[node] = True
        earned = [0.0 if done else bonus * d for d, done in zip(depth, complete, strict=True)]
        self.next_node = torch.zeros(len(children), vocab, dtype=torch.int64)
        self.worth = torch.zeros(len(children), vocab)
        for node, below in enumerate(children):
            # The last space of a complete phrase is also where the next word, and another phrase, may begin.
            onwards = children[1] | below if complete[node] else below
            for token in range(vocab):
                into = onwards.get(token, 1 if token == space else 0)
                gain = bonus * depth[into] if token in onwards else earned[into]
                self.next_node[node, token], self.worth[node, token] = into, gain - earned[node]

    def init_state(self, batch_size: int, device: torch.device) -> PhraseState:
        """Where a word may begin."""
        return PhraseState(torch.ones(batch_size, dtype=torch.int64, device=device))

    def scores(self, state: PhraseState) -> Tensor:
        """Bonuses and what is paid back."""
        return self.worth.to(state.node.device)[state.node]

    def advance(self, state: PhraseState, token: Tensor) -> PhraseState:
        """Follow one symbol."""
        return PhraseState(self.next_node.to(state.node.device)[state.node, token])
