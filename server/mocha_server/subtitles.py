"""Segments to SubRip and WebVTT."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mocha_server.messages import Segment, Word

MAX_WORDS, MAX_SECONDS = 12, 6.0  # of one cue


@dataclass(frozen=True)
class Subtitles:
    """How subtitles are written: `head`, then each cue with its number from 1 on, an empty line between them."""

    head: tuple[str, ...]
    cue: Callable[[list[Word], int], str]

    def __call__(self, segments: Iterable[Segment]) -> str:
        """All of `segments`."""
        return "\n".join([*self.head, *(self.cue(cue, number) for number, cue in enumerate(cues(segments), 1))])


def cues(segments: Iterable[Segment]) -> Iterator[list[Word]]:
    """The words that are shown together."""
    for segment in segments:
        cue: list[Word] = []
        for word in segment.words:
            if cue and (len(cue) == MAX_WORDS or word.end - cue[0].start > MAX_SECONDS):
                yield cue
                cue = []
            cue.append(word)
        if cue:
            yield cue


def _clock(seconds: float, comma: str) -> str:
    millis = round(seconds * 1000)
    return f"{millis // 3_600_000:02}:{millis // 60_000 % 60:02}:{millis // 1000 % 60:02}{comma}{millis % 1000:03}"


def _lines(cue: list[Word], comma: str) -> str:
    times = f"{_clock(cue[0].start, comma)} --> {_clock(cue[-1].end, comma)}"
    return f"{times}\n{' '.join(w.word for w in cue)}\n"


srt = Subtitles((), lambda cue, number: f"{number}\n{_lines(cue, ',')}")  # SubRip
vtt = Subtitles(("WEBVTT\n",), lambda cue, number: _lines(cue, "."))  # WebVTT
