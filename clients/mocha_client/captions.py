"""Captions in a file while a stream is live: SubRip or WebVTT, complete and valid at every moment."""

import os
from pathlib import Path

from mocha_client.client import Event
from mocha_client.continuity import words_of
from mocha_server.messages import Character, Segment, Text
from mocha_server.subtitles import cues, srt, vtt

FORMATS = {".srt": srt, ".vtt": vtt}
PERIOD_S = 0.5  # of audio between two writings of an open segment


class Captions:
    """Push events in; the file has every word so far, that of the open segment included, within half a second.

    The file is replaced as a whole, so a reader finds either the last state or the one before. Cues only grow.
    """

    def __init__(self, path: Path, frame_s: float) -> None:
        """Write a file without cues; raises OSError where that cannot be, KeyError for other names than srt and vtt."""
        self._path, self._frame_s = path, frame_s
        self._format = FORMATS[path.suffix.lower()]
        self._closed: list[str] = []  # cues of closed segments, as they are written
        self._open: list[Character] = []
        self._written_s = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def push(self, event: Event) -> None:
        """Take an event of the stream; raises OSError."""
        if isinstance(event, Segment):
            self._closed += self._written(event)
            self._open = []
            self._write()
        elif isinstance(event, Text):
            self._open += event.characters
            if self._open and self._open[-1].time >= self._written_s + PERIOD_S:
                self._write()

    def _written(self, segment: Segment) -> list[str]:
        return [self._format.cue(cue, len(self._closed) + n) for n, cue in enumerate(cues([segment]), 1)]

    def _write(self) -> None:
        still_open: list[str] = []
        if words := words_of(self._open, self._frame_s):
            self._written_s = self._open[-1].time
            text, start, end = " ".join(w.word for w in words), words[0].start, words[-1].end
            still_open = self._written(Segment(segment=0, text=text, start=start, end=end, words=words))
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            part.write_text("\n".join([*self._format.head, *self._closed, *still_open]), encoding="utf-8")
            os.replace(part, self._path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
