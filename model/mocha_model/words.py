"""Characters to words with times, incrementally. A word ends at a space or at the end of its segment."""

from dataclasses import dataclass

from mocha_model.recognizer import Emission


@dataclass(frozen=True, slots=True)
class Word:
    """A word with the times (seconds from the start of the stream) of its first and last character's frames."""

    word: str
    start_s: float
    end_s: float
    p: float


class WordAssembler:
    """Push emissions in, get completed words out. Holds the characters of one word."""

    def __init__(self, frame_samples: int, sample_rate: int) -> None:
        """`frame_samples` is the hop of the encoder in samples of `sample_rate` Hz."""
        self._frame_s = frame_samples / sample_rate
        self._held: list[Emission] = []

    def push(self, emission: Emission) -> list[Word]:
        """The word that `emission` completes, if any: its start is its first frame's, its end is its last one's."""
        if not emission.end_of_segment and emission.text != " ":
            self._held.append(emission)
            return []
        if not self._held:
            return []
        held, self._held = self._held, []
        word = "".join(e.text for e in held)
        p = sum(e.p for e in held) / len(held)
        return [Word(word, held[0].frame * self._frame_s, (held[-1].frame + 1) * self._frame_s, p)]
