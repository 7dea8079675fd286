"""What a recogniser emits, and its assembly into words and text. Imports no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mocha_model.confidence import Calibration, word_confidence


@dataclass(frozen=True, slots=True)
class Emission:
    """One emitted symbol, or the end of a segment. Never taken back.

    Attributes:
        text: the character, or the word with a space after it; "" for the end of a segment.
        frame: encoder frame t_i it was emitted at, counted from the start of the stream.
        p: selection probability at that frame; 0.0 where none fired (flush, trailing silence). In joint search, which
            does not wait for selections, the highest probability that the CTC branch gave the character.
        q: probability of the character once the frame was selected.
        end_of_segment: whether this closes the segment.
        chunk: softmax weights over frames ``frame - w + 1 ... frame``.
        certain: frame whose audio made it certain, later than `frame` in beam search; None if that is `frame`.
        revises: whether it belongs to the settled text of its segment, beside what was emitted live.

    """

    text: str
    frame: int
    p: float
    q: float
    end_of_segment: bool
    chunk: tuple[float, ...]
    certain: int | None = None
    revises: bool = False


def final(emissions: Iterable[Emission]) -> list[Emission]:
    """What stands in the end: of each segment what revises it, if there is that, else what was emitted live."""
    found: list[Emission] = []
    live: list[Emission] = []
    revised: list[Emission] = []
    for emission in (*emissions, None):
        if emission is None or emission.end_of_segment:
            found += revised if any(e.text.strip() for e in revised) else live
            found += [emission] if emission else []
            live, revised = [], []
        else:
            (revised if emission.revises else live).append(emission)
    return found


def text_of(emissions: Iterable[Emission]) -> str:
    """The transcript: what is final, one space between segments."""
    segments = "".join("\n" if e.end_of_segment else e.text for e in final(emissions)).split("\n")
    return " ".join(segment.strip() for segment in segments if segment.strip())


@dataclass(frozen=True, slots=True)
class SpokenWord:
    """A word with the times (seconds from the start of the stream) of its first and last character's frames.

    `confidence` is the probability that the word is right (see `confidence`).
    """

    word: str
    start_s: float
    end_s: float
    confidence: float


class WordAssembler:
    """Push emissions in, get completed words out. Holds the characters of one word."""

    def __init__(self, frame_s: float, calibration: Calibration | None = None) -> None:
        """`frame_s` is the hop of the encoder in seconds; `calibration` that of the words' confidence."""
        self._frame_s, self._calibration = frame_s, calibration
        self._held: list[Emission] = []

    def push(self, emission: Emission) -> list[SpokenWord]:
        """The word that `emission` completes, if any: from its first character's frame to its last one's end."""
        if emission.text.strip():
            self._held.append(emission)
        complete = emission.end_of_segment or emission.text.endswith(" ")
        if not complete or not self._held:
            return []
        held, self._held = self._held, []
        confidence = word_confidence([e.p for e in held], [e.q for e in held], self._calibration)
        return [
            SpokenWord(
                "".join(e.text for e in held).strip(),
                held[0].frame * self._frame_s,
                (held[-1].frame + 1) * self._frame_s,
                confidence,
            )
        ]


class SpeechGate:
    """Holds a segment back until its words sound like speech on average; one that never does is dropped whole.

    A search with a language model reads noise and music as words, few at a time and each of them unlikely.
    """

    def __init__(self, least_evidence: float) -> None:
        """`least_evidence` is that of the words so far, on average (see `confidence`); with -inf all is let through."""
        self._least = least_evidence
        self._words = WordAssembler(0.0)
        self._begin()

    def _begin(self) -> None:
        self._open = self._least == -math.inf
        self._excess = 0.0  # of the words' evidence over so much for each
        self._held: list[Emission] = []

    def push(self, emissions: Iterable[Emission]) -> list[Emission]:
        """What `emissions` let through, in order; ends of segments always are."""
        passed: list[Emission] = []
        for emission in emissions:
            self._held.append(emission)
            for word in () if self._open else self._words.push(emission):
                self._excess += math.log(word.confidence) - self._least
                self._open = self._excess >= 0
            if self._open:
                passed += self._held
                self._held = []
            if emission.end_of_segment:
                passed += self._held[-1:]
                self._begin()
        return passed
