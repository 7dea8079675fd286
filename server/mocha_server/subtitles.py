"""Segments to SubRip and WebVTT."""

from collections.abc import Iterable, Iterator

from mocha_server.messages import Segment, Word

MAX_WORDS, MAX_SECONDS = 12, 6.0  # of one cue


def _cues(segments: Iterable[Segment]) -> Iterator[list[Word]]:
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


def srt(segments: Iterable[Segment]) -> str:
    """SubRip."""
    return "\n".join(f"{number}\n{_lines(cue, ',')}" for number, cue in enumerate(_cues(segments), 1))


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT."""
    return "\n".join(["WEBVTT\n", *(_lines(cue, ".") for cue in _cues(segments))])
