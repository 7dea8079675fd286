"""Emissions to wire messages: append-only text, segments, words with times. No sockets, no torch.

Every protocol and the command line assemble text here, so that they cannot differ.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pydantic import Field

from mocha_model.confidence import Calibration
from mocha_model.emissions import Emission, SpeechGate, SpokenWord, WordAssembler
from mocha_server.messages import Character, Segment, Text, Word

LONGEST_SEGMENT = 1000  # characters, about a minute; then it ends with the word, so that none grows for ever


@dataclass(frozen=True)
class ModelInfo:
    """What the outside needs to know of a recogniser: sizes in samples of `sample_rate` Hz, widths in frames."""

    name: str
    sample_rate: int
    frame_samples: int
    latency_samples: int
    chunk_width: int
    pause_frames: int = 20  # without a character that end a segment, unless a stream has a number of its own
    calibration: Calibration | None = None
    settled_calibration: Calibration | None = None  # where a segment's text is settled when it ends
    patience_samples: int = 0  # after its frame, a character is emitted at the latest
    least_evidence: float = -math.inf  # of segments that are not passed over: see `SpeechGate`
    look_ahead_samples: int = 0  # after its frame's audio is complete, a character is emitted at the earliest
    settles: bool = False  # whether other text may take the place of a segment's when it ends

    @property
    def frame_s(self) -> float:
        """Seconds from one encoder frame to the next."""
        return self.frame_samples / self.sample_rate

    @property
    def models(self) -> dict[str, bool | None]:
        """Names by which clients may ask for this model, and whether with patience; None as the server is set."""
        return {self.name: None, f"{self.name}-greedy": False, f"{self.name}-patient": True}

    def pause_for(self, pause_ms: int | None) -> int:
        """The frames of a pause that ends a segment, for a stream that asks for one of `pause_ms`, or for none."""
        return self.pause_frames if pause_ms is None else max(1, round(pause_ms / 1000 / self.frame_s))

    def time_s(self, frame: int) -> float:
        """Seconds from the start of the stream when the audio of `frame` was complete."""
        return (frame * self.frame_samples + self.latency_samples) / self.sample_rate


class SpokenText(Text):
    """New characters, and the words that spaces among them complete, which are not on the wire."""

    words: list[Word] = Field([], exclude=True)


class _Reading:
    """One text of the open segment: its characters so far, and its words."""

    def __init__(self, frame_s: float, calibration: Calibration | None, offset_s: float) -> None:
        self._assembler, self._frame_s, self._offset_s = WordAssembler(frame_s, calibration), frame_s, offset_s
        self.text, self.words = "", list[Word]()
        self._earliest_s = 0.0  # of the next word: the end of the one before, of whatever segment

    def push(self, emission: Emission, until_s: float) -> None:
        for word in self._assembler.push(emission):
            self.words.append(self._wire_word(word, until_s))
        self.text += emission.text

    def _wire_word(self, word: SpokenWord, until_s: float) -> Word:
        """Its times, after the word before and not later than `until_s`, a frame at least if there is room."""
        end_s, earliest_s = min(word.end_s + self._offset_s, until_s), self._earliest_s
        start_s = min(max(word.start_s + self._offset_s, earliest_s), max(earliest_s, end_s - self._frame_s), end_s)
        self._earliest_s = round(end_s, 3)
        confidence = round(word.confidence, 4)
        return Word(word=word.word, start=round(start_s, 3), end=self._earliest_s, confidence=confidence)

    def clear(self) -> None:
        self.text, self.words = "", []


class Transcript:
    """Push emissions in, get `SpokenText` and `Segment` messages out. Holds one open segment.

    A segment has the text that was emitted, or the one that revises it if there is one. It ends where the recogniser
    says so, or before the character that follows the word that makes it `LONGEST_SEGMENT`, unless all of it may be
    revised.
    """

    def __init__(self, info: ModelInfo, offset_samples: int = 0) -> None:
        """Times are those of the recogniser plus `offset_samples` at the model's rate."""
        self._info, self._offset_s = info, offset_samples / info.sample_rate
        self._live = _Reading(info.frame_s, info.calibration, self._offset_s)
        self._settled = _Reading(info.frame_s, info.settled_calibration, self._offset_s)
        self._gate = SpeechGate(info.least_evidence)
        self._needs_space = False
        self._num_told = 0  # words of the open segment, as it was emitted
        self.num_segments = 0

    def push(self, emissions: Iterable[Emission], num_samples: int) -> list[SpokenText | Segment]:
        """Messages for newly emitted characters and closed segments, in order.

        No time in them is later than the `num_samples` heard so far, though the recogniser adds silence at the end.
        """
        self._until_s = self._offset_s + num_samples / self._info.sample_rate
        messages: list[SpokenText | Segment] = []
        pending: list[Emission] = []
        for emission in self._gate.push(emissions):
            if emission.revises:
                self._settled.push(emission, self._until_s)
                continue
            cut = self._is_long() and not emission.end_of_segment
            if cut or emission.end_of_segment:
                messages += self._delta(pending)
                pending = []
            if cut:
                messages += self._ended(cut=True)
            self._live.push(emission, self._until_s)
            if not emission.end_of_segment:
                pending.append(emission)
                continue
            self._settled.push(emission, self._until_s)
            messages += self._ended(cut=False)
        return messages + self._delta(pending)

    def _is_long(self) -> bool:
        """Whether the segment ends where it is if anything follows in it."""
        return len(self._live.text) >= LONGEST_SEGMENT and self._live.text.endswith(" ") and not self._info.settles

    def _ended(self, cut: bool) -> list[Segment]:
        """The message of a segment's end, if anything was said in it."""
        reading = self._settled if self._settled.text.strip() else self._live
        ended = [self._close(reading, cut)] if reading.text.strip() else []
        self._live.clear()
        self._settled.clear()
        self._num_told = 0
        return ended

    def _delta(self, emissions: list[Emission]) -> list[SpokenText | Segment]:
        if not emissions:
            return []
        joined = "".join(e.text for e in emissions)
        delta = f" {joined}" if self._needs_space else joined
        self._needs_space = False
        characters = [
            Character(text=e.text, frame=e.frame, time=self._time_s(e), p=e.p, q=e.q, chunk=list(e.chunk))
            for e in emissions
        ]
        words, self._num_told = self._live.words[self._num_told :], len(self._live.words)
        return [SpokenText(segment=self.num_segments, delta=delta, characters=characters, words=words)]

    def _time_s(self, emission: Emission) -> float:
        return min(self._offset_s + self._info.time_s(emission.frame), self._until_s)

    def _close(self, reading: _Reading, cut: bool) -> Segment:
        if self._live.text:
            self._needs_space = not self._live.text.endswith(" ")
        segment = Segment(
            segment=self.num_segments,
            text=reading.text.strip(),
            start=reading.words[0].start,
            end=reading.words[-1].end,
            words=reading.words,
            cut=cut,
        )
        self.num_segments += 1
        return segment
