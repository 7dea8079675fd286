"""What a stream needs to outlive its connection: audio not yet heard, and times that count on. No sockets, no clock.

The server keeps nothing of a lost connection, so a new one is a new session. It is given the audio from the end of the
last character's frame on, and its times, frames and segment numbers are shifted to follow. The segment that was open
ends where the connection was lost. Hence nothing received is taken back, and no audio that gave text is heard twice.
"""

from dataclasses import dataclass

from mocha_server.messages import Character, End, Ready, Segment, Start, Text, Word


@dataclass(frozen=True)
class Reconnected:
    """The connection was lost and is back.

    Attributes:
        time: seconds from the start of the stream at which the new session began to listen.
        missing: seconds before `time` that were no longer at hand and gave no text; 0.0 unless more audio was
            waiting than is kept.

    """

    time: float
    missing: float


class Continuity:
    """Give it all that is sent and received; after a loss it says what to send again."""

    def __init__(self, start: Start, keep_s: float) -> None:
        """Keep at most `keep_s` seconds of the audio that `start` describes."""
        self._bytes_per_sample = start.encoding.sample_bytes * start.channels
        self._rate = start.sample_rate
        self._keep_bytes = int(keep_s * start.sample_rate) * self._bytes_per_sample
        self._kept, self._kept_from = bytearray(), 0  # the position, in bytes since the start, of its first byte
        self._frame_s = 0.0
        self._offset_s = self._heard_s = 0.0  # of this session's start; of what gave text
        self._num_segments = self._first_segment = 0
        self._open: list[Character] = []  # of the open segment
        self._last = ""  # character received
        self._joins = False  # whether the next delta needs a space before it, as the server puts between segments

    @property
    def end(self) -> int:
        """Position in bytes of the next audio to be sent."""
        return self._kept_from + len(self._kept)

    def sent(self, audio: bytes) -> None:
        """Audio that the caller gave, sent or about to be."""
        self._kept += audio
        heard = round(self._heard_s * self._rate) * self._bytes_per_sample
        self._forget(max(heard, self.end - self._keep_bytes))

    def audio(self, position: int, size: int) -> bytes:
        """Up to `size` bytes from `position` on."""
        start = position - self._kept_from
        return bytes(self._kept[start : start + size])

    def ready(self, message: Ready) -> None:
        """A session has begun."""
        self._frame_s = message.frame_ms / 1000

    def received(self, message: Text | Segment | End) -> Text | Segment | End:
        """The same message, counted from the start of the stream."""
        if isinstance(message, Text):
            return self._text(message)
        if isinstance(message, End):
            return message.model_copy(update={"segments": self._num_segments, "duration": self._time(message.duration)})
        self._open, self._num_segments = [], self._first_segment + message.segment + 1
        words = [w.model_copy(update={"start": self._time(w.start), "end": self._time(w.end)}) for w in message.words]
        times = {"start": self._time(message.start), "end": self._time(message.end)}
        return message.model_copy(update={"segment": self._num_segments - 1, "words": words, **times})

    def _text(self, message: Text) -> Text:
        shift = round(self._offset_s / self._frame_s)
        characters = [
            c.model_copy(update={"frame": c.frame + shift, "time": self._time(c.time)}) for c in message.characters
        ]
        self._open += characters
        self._heard_s = max([self._heard_s, *((c.frame + 1) * self._frame_s for c in characters[-1:])])
        delta = f" {message.delta}" if self._joins else message.delta
        self._joins, self._last = False, delta[-1:]
        return message.model_copy(
            update={"segment": self._first_segment + message.segment, "delta": delta, "characters": characters}
        )

    def lost(self) -> Segment | None:
        """The connection is gone: the segment that was open ends here. None if it has no word."""
        characters, self._open = self._open, []
        words = words_of(characters, self._frame_s)
        text = "".join(c.text for c in characters)
        if not words:
            return None
        number, self._num_segments = self._num_segments, self._num_segments + 1
        times = {"start": words[0].start, "end": words[-1].end}
        return Segment(segment=number, text=text.strip(), **times, words=words, cut=True)

    def resume(self) -> tuple[Reconnected, int]:
        """A session begins anew: from when on it listens, and the position in bytes to send from."""
        first = round(self._heard_s * self._rate) * self._bytes_per_sample
        missing = max(0, self._kept_from - first) / self._bytes_per_sample / self._rate
        self._offset_s = self._heard_s + missing
        self._heard_s, self._first_segment = self._offset_s, self._num_segments
        self._joins = self._last not in ("", " ")
        whole = self.end - self.end % self._bytes_per_sample
        position = min(max(first, self._kept_from), whole)  # text at the very end may be of silence the server added
        return Reconnected(round(self._offset_s, 3), round(missing, 3)), position

    def _time(self, seconds: float) -> float:
        return round(seconds + self._offset_s, 6) if self._offset_s else seconds

    def _forget(self, position: int) -> None:
        """Drop audio before `position`, whole samples only."""
        position = min(position, self.end)
        position -= position % self._bytes_per_sample
        if position > self._kept_from:
            del self._kept[: position - self._kept_from]
            self._kept_from = position


def words_of(characters: list[Character], frame_s: float) -> list[Word]:
    """Words of an open segment: as the server makes them when it closes one."""
    groups: list[list[Character]] = [[]]
    for character in characters:
        if character.text.strip():
            groups[-1].append(character)
        if character.text.endswith(" "):
            groups.append([])
    return [
        Word(
            word="".join(c.text for c in group).strip(),
            start=round(group[0].frame * frame_s, 3),
            end=round((group[-1].frame + 1) * frame_s, 3),
            confidence=round(sum((c.p or 1.0) * c.q for c in group) / len(group), 4),  # not calibrated
        )
        for group in groups
        if group
    ]
