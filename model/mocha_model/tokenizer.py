"""Text to ids and back. Units are characters; the vocabulary is data and travels in the checkpoint.

One vocabulary serves the CTC head and the decoder. Knows no tensors.
"""

import unicodedata
from collections.abc import Iterable, Sequence

BLANK, SOS, EOS, UNKNOWN = "<blank>", "<s>", "</s>", "<unk>"
SPECIALS = (BLANK, SOS, EOS, UNKNOWN)


def normalize_text(text: str) -> str:
    """Lower case, NFC, no punctuation but the apostrophe inside words, single spaces. Any script."""
    text = unicodedata.normalize("NFC", text.lower()).replace("\u2019", "'")
    kept = (c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    words = (word.strip("'") for word in "".join(kept).split())
    return " ".join(word for word in words if word)


class Tokenizer:
    """Maps characters to ids: 0 blank (also padding), 1 start, 2 end of sequence, 3 unknown, then the characters."""

    blank_id, sos_id, eos_id, unk_id = range(4)

    def __init__(self, symbols: Sequence[str]) -> None:
        """`symbols` are all symbols in order of id, the four special ones first; raises ValueError otherwise."""
        if tuple(symbols[:4]) != SPECIALS:
            raise ValueError(f"a vocabulary starts with {SPECIALS}, not {tuple(symbols[:4])}")
        if len(set(symbols)) != len(symbols):
            raise ValueError("a vocabulary has each symbol once")
        self.symbols = tuple(symbols)
        self._ids = {symbol: index for index, symbol in enumerate(symbols)}

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> "Tokenizer":
        """The sorted characters of `texts` (already normalised), with space and apostrophe always among them."""
        characters = set(" '").union(*(set(text) for text in texts))
        return cls((*SPECIALS, *sorted(characters)))

    @property
    def vocab_size(self) -> int:
        """Number of symbols, the special ones included."""
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        """Ids of the characters, without start or end; what the vocabulary lacks becomes `unk_id`."""
        return [self._ids.get(character, self.unk_id) for character in text]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special symbols have none."""
        return "".join(self.symbol(index) for index in ids)

    def symbol(self, index: int) -> str:
        """The character of one id, or "" for a special symbol."""
        return self.symbols[index] if index >= len(SPECIALS) else ""
