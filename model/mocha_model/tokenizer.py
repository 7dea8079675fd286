"""Text to ids and back. Units are characters or words; the vocabulary is data and travels in the checkpoint.

One vocabulary serves the CTC head and the decoder. Knows no tensors.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

BLANK, SOS, EOS, UNKNOWN = "<blank>", "<s>", "</s>", "<unk>"
SPECIALS = (BLANK, SOS, EOS, UNKNOWN)

Units = Literal["characters", "words"]  # words: whatever stands between spaces, such as phones


def normalize_text(text: str, units: Units = "characters") -> str:
    """Lower case, NFC, no punctuation but the apostrophe inside words, single spaces. Any script.

    Where whole words are the units they are symbols ("h#", "ax-h"): only the spaces between them are made single.
    """
    if units == "words":
        return " ".join(text.split())
    text = "".join(c for c in text.lower() if unicodedata.category(c) != "Cf")  # such as soft hyphens inside words
    text = unicodedata.normalize("NFC", text).replace("\u2019", "'")
    kept = (c if c == "'" or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    words = (word.strip("'") for word in "".join(kept).split())
    return " ".join(word for word in words if word)


def split_text(text: str, units: Units) -> list[str]:
    """The units of a normalised text, in order; a space is a unit among characters and none among words."""
    return list(text) if units == "characters" else text.split()


class Tokenizer:
    """Maps units to ids: 0 blank (also padding), 1 start, 2 end of sequence, 3 unknown, then the units."""

    blank_id, sos_id, eos_id, unk_id, first_id = range(5)  # `first_id` is the first unit's

    def __init__(self, symbols: Sequence[str], units: Units = "characters") -> None:
        """`symbols` are all symbols in order of id, the four special ones first; raises ValueError otherwise."""
        if not all(isinstance(symbol, str) for symbol in symbols):
            raise ValueError("symbols are strings")
        if tuple(symbols[:4]) != SPECIALS:
            raise ValueError(f"a vocabulary starts with {SPECIALS}, not {tuple(symbols[:4])}")
        if len(set(symbols)) != len(symbols):
            raise ValueError("a vocabulary has each symbol once")
        if units not in get_args(Units):
            raise ValueError(f"units are one of {get_args(Units)}, not {units!r}")
        self.units: Units = units
        self.symbols = tuple(symbols)
        self._ids = {symbol: index for index, symbol in enumerate(symbols)}

    @classmethod
    def from_texts(cls, texts: Iterable[str], units: Units = "characters") -> "Tokenizer":
        """The sorted units of `texts` (already normalised); space and apostrophe are always among characters."""
        always = " '" if units == "characters" else ""
        found = set(always).union(*(split_text(text, units) for text in texts))
        return cls((*SPECIALS, *sorted(found)), units)

    @property
    def vocab_size(self) -> int:
        """Number of symbols, the special ones included."""
        return len(self.symbols)

    @property
    def space_id(self) -> int:
        """Id of the space, -1 where the units are words: no symbol then."""
        return self._ids.get(" ", -1)

    def encode(self, text: str) -> list[int]:
        """Ids of the units, without start or end; what the vocabulary lacks becomes `unk_id`."""
        return [self._ids.get(unit, self.unk_id) for unit in split_text(text, self.units)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; special symbols have none."""
        return "".join(self.symbol(index) for index in ids).rstrip(" " if self.units == "words" else "")

    def symbol(self, index: int) -> str:
        """What one id adds to a text: its character, or its word and a space; "" for a special symbol."""
        if index < len(SPECIALS):
            return ""
        return self.symbols[index] + (" " if self.units == "words" else "")
