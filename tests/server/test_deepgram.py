"""Deepgram's protocol without sockets: the order of results."""

import hashlib
import json
from types import SimpleNamespace
from typing import Any

from starlette.datastructures import QueryParams

from mocha_server.messages import Character, End, Segment, Text, Word
from mocha_server.protocols.deepgram import DeepgramTranslator
from mocha_server.protocols.deepgram_options import live_options
from mocha_server.transcript import ModelInfo

OPTIONS = "encoding=linear16&sample_rate=16000&interim_results=true&vad_events=true"


def text(number: int, word: str, frame: int) -> Text:
    characters = [
        Character(text=c, frame=frame + n, time=(frame + n) * 0.04, p=0.9, q=0.9, chunk=[]) for n, c in enumerate(word)
    ]
    return Text(segment=number, delta=word, characters=characters)


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


def test_metadata_is_of_all_the_audio():
    live: Any = SimpleNamespace(heard_s=3.0)
    info = ModelInfo("m", 16_000, 640, 400, 4)
    translator = DeepgramTranslator(live_options(QueryParams(OPTIONS)), info, live, "request")
    for message in (b"some", b"audio", '{"type":"CloseStream"}'):
        translator.received(message)
    (metadata,) = map(json.loads, translator.said(End(segments=0, duration=3)))
    assert metadata["type"] == "Metadata" and (metadata["duration"], metadata["channels"]) == (3.0, 1)
    assert metadata["sha256"] == hashlib.sha256(b"someaudio").hexdigest()
