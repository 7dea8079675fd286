"""Captions in a file while a stream is live: SubRip or WebVTT, complete and valid at every moment."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from mocha_client.client import Event
from mocha_client.continuity import words_of
from mocha_server.messages import Character, Segment, Text
from mocha_server.subtitles import srt, vtt

FORMATS: dict[str, Callable[[Iterable[Segment]], str]] = {".srt": srt, ".vtt": vtt}
PERIOD_S = 0.5  # of audio between two writings of an open segment


class Captions:
    """Push events in; the file has every word so far, that of the open segment included, within half a second.

    The file is replaced as a whole, so a reader finds either the last state or the one before. Cues only grow.
    """

    def __init__(self, path: Path, frame_s: float) -> None:
        """Write a file without cues; raises OSError where that cannot be, KeyError for other names than srt and vtt."""
        self._path, self._frame_s = path, frame_s
        self._render = FORMATS[path.suffix.lower()]
        self._segments: list[Segment] = []
        self._open: list[Character] = []
        self._written_s = 0.0
        self._write()

    def push(self, event: Event) -> None:
        """Take an event of the stream; raises OSError."""
        if isinstance(event, Segment):
            self._segments.append(event)
            self._open = []
            self._write()
        elif isinstance(event, Text):
            self._open += event.characters
            if self._open and self._open[-1].time >= self._written_s + PERIOD_S:
                self._write()

    def _write(self) -> None:
        segments = list(self._segments)
        if words := words_of(self._open, self._frame_s):
            self._written_s = self._open[-1].time
            text, start, end = " ".join(w.word for w in words), words[0].start, words[-1].end
            segments.append(Segment(segment=len(segments), text=text, start=start, end=end, words=words))
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(self._render(segments), encoding="utf-8")
        os.replace(part, self._path)
