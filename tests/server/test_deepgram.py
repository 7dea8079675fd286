"""Deepgram's protocol without sockets: the order of results."""

import hashlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.datastructures import QueryParams

from mocha_server.messages import Character, End, Segment, Word
from mocha_server.protocols.deepgram import DeepgramTranslator
from mocha_server.protocols.deepgram_options import live_options
from mocha_server.transcript import ModelInfo, SpokenText

OPTIONS = "encoding=linear16&sample_rate=16000&interim_results=true&vad_events=true"


def text(number: int, word: str, frame: int) -> SpokenText:
    """Characters of a word, which is complete if a space ends it."""
    characters = [
        Character(text=c, frame=frame + n, time=(frame + n) * 0.04, p=0.9, q=0.9, chunk=[]) for n, c in enumerate(word)
    ]
    end_s = characters[-1].time
    words = [Word(word=word[:-1], start=frame * 0.04, end=end_s, confidence=0.9)] if word.endswith(" ") else []
    return SpokenText(segment=number, delta=word, characters=characters, words=words)


def segment(number: int, word: str, start: float, end: float, cut: bool = False) -> Segment:
    words = [Word(word=word, start=start, end=end, confidence=0.9)]
    return Segment(segment=number, text=word, start=start, end=end, words=words, cut=cut)


def test_while_it_finalizes_a_segment_is_final_before_the_next_begins():
    live: Any = SimpleNamespace(heard_s=3.0)
    info = ModelInfo("m", 16_000, 640, 400, 4)
    translator = DeepgramTranslator(live_options(QueryParams(OPTIONS)), info, live, "request")
    translator.received('{"type":"Finalize"}')
    said = [text(0, "one", 10), segment(0, "one", 0.4, 0.5), text(1, "two", 50), segment(1, "two", 1.8, 1.9)]
    results = [json.loads(r) for message in [*said, End(segments=2, duration=3)] for r in translator.said(message)]
    assert [(r["type"], r.get("is_final"), r.get("from_finalize"), r.get("start")) for r in results] == [
        ("SpeechStarted", None, None, None),
        ("Results", False, False, 0.0),
        ("Results", True, False, 0.0),
        ("SpeechStarted", None, None, None),
        ("Results", False, False, 0.5),
        ("Results", True, True, 0.5),
    ]
    assert [r["timestamp"] for r in results if r["type"] == "SpeechStarted"] == [0.4, 2.0]
    # From the end of the result before to the end of the last word: 40 ms after a frame's beginning while it is open.
    assert [r["duration"] for r in results if r["type"] == "Results"] == [0.495, 0.5, 1.595, 1.4]


def test_a_segment_that_is_cut_ends_no_speech():
    info = ModelInfo("m", 16_000, 640, 400, 4)
    options = live_options(QueryParams(OPTIONS + "&utterance_end_ms=1000"))
    translator = DeepgramTranslator(options, info, SimpleNamespace(heard_s=3.0), "request")  # type: ignore[arg-type]
    said = [text(0, "one", 10), segment(0, "one", 0.4, 0.5, cut=True), text(1, "two", 20), segment(1, "two", 0.8, 0.9)]
    results = [json.loads(r) for message in said for r in translator.said(message)]
    assert [(r["type"], r.get("is_final"), r.get("speech_final")) for r in results] == [
        ("SpeechStarted", None, None),
        ("Results", False, False),
        ("Results", True, False),
        ("Results", False, False),
        ("Results", True, True),
        ("UtteranceEnd", None, None),
    ]


@pytest.mark.parametrize("interim", ["true", "false"])
def test_speech_without_a_pause_has_final_results_every_few_seconds(interim: str):
    info = ModelInfo("m", 16_000, 640, 400, 4)
    options = live_options(QueryParams(OPTIONS.replace("interim_results=true", f"interim_results={interim}")))
    translator = DeepgramTranslator(options, info, SimpleNamespace(heard_s=20.0), "request")  # type: ignore[arg-type]
    said = [text(0, f"word{n} ", 25 * n) for n in range(12)]  # one a second
    words = [word for message in said for word in message.words]
    whole = Segment(segment=0, text=" ".join(w.word for w in words), start=0, end=words[-1].end, words=words)
    results = [json.loads(r) for message in [*said, whole] for r in translator.said(message)]
    found = [r for r in results if r["type"] == "Results"]
    told = [r for r in found if r["is_final"]]
    assert [len(r["channel"]["alternatives"][0]["words"]) for r in told] == [6, 6, 0]
    assert " ".join(filter(None, (r["channel"]["alternatives"][0]["transcript"] for r in told))) == whole.text
    assert [r["speech_final"] for r in told] == [False, False, True]
    assert [(r["start"], r["duration"]) for r in told] == [(0.0, 5.2), (5.2, 6.04), (11.24, 0.0)]
    assert (len(found) > len(told)) == (interim == "true")
    assert all(len(r["channel"]["alternatives"][0]["words"]) <= 6 for r in found)


def test_metadata_is_of_all_the_audio():
    live: Any = SimpleNamespace(heard_s=3.0)
    info = ModelInfo("m", 16_000, 640, 400, 4)
    translator = DeepgramTranslator(live_options(QueryParams(OPTIONS)), info, live, "request")
    for message in (b"some", b"audio", '{"type":"CloseStream"}'):
        translator.received(message)
    (metadata,) = map(json.loads, translator.said(End(segments=0, duration=3)))
    assert metadata["type"] == "Metadata" and (metadata["duration"], metadata["channels"]) == (3.0, 1)
    assert metadata["sha256"] == hashlib.sha256(b"someaudio").hexdigest()
