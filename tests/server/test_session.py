"""The native protocol without sockets: every message and every mistake."""

import json
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from mocha_model.emissions import Emission
from mocha_server.audio import as_float
from mocha_server.messages import End, Error, ErrorCode, Ready, Segment, Start, Text
from mocha_server.protocols.live import Refused
from mocha_server.protocols.openai_realtime import RealtimeTranslator
from mocha_server.protocols.vosk import parse
from mocha_server.protocols.wyoming import Transcribe
from mocha_server.session import MAX_EXPLANATION, MAX_VALUES, Session, State, parsed
from mocha_server.transcript import LONGEST_SEGMENT, ModelInfo, Transcript

INFO = ModelInfo("test", 16_000, 640, 400, 4)


def started(**fields: object) -> Session:
    session = Session("s1", INFO)
    received = session.receive(json.dumps({"type": "start", **fields}))
    assert isinstance(received.messages[0], Ready), received
    return session


def fatal(session: Session, data: str | bytes) -> Error:
    (error,) = session.receive(data).messages
    assert isinstance(error, Error) and error.fatal and session.state is State.CLOSED
    return error


def spell(text: str, frame: int = 0) -> list[Emission]:
    return [Emission(c, frame + k, 0.75, 0.5, False, (0.1, 0.2, 0.3, 0.4)) for k, c in enumerate(text)]


END = Emission("", 99, 0.0, 1.0, True, (0.0,) * 4)


def test_ready_tells_the_models_sizes():
    (ready,) = Session("s1", INFO).receive('{"type":"start"}').messages
    told = Ready(
        session="s1", model="test", sample_rate=16_000, frame_ms=40, latency_ms=25, chunk_width=4, pause_ms=800
    )
    assert ready == told


def test_ready_tells_how_far_the_recogniser_looks_ahead():
    (ready,) = Session("s1", replace(INFO, look_ahead_samples=3_200)).receive('{"type":"start"}').messages
    assert isinstance(ready, Ready) and (ready.latency_ms, ready.look_ahead_ms) == (25, 200)


def test_a_pause_is_counted_in_frames():
    received = Session("s1", INFO).receive('{"type":"start","pause_ms":310}')
    (ready,) = received.messages
    assert isinstance(ready, Ready) and (received.pause, ready.pause_ms) == (8, 320)


def test_ready_tells_how_patient_the_recogniser_is():
    (ready,) = Session("s1", replace(INFO, patience_samples=8_000)).receive('{"type":"start"}').messages
    assert isinstance(ready, Ready) and ready.patience_ms == 500


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ('{"type":"start","patient":true}', True),
        ('{"type":"start","patient":false}', False),
        ('{"type":"start","patient":null}', None),
        ('{"type":"start"}', None),
        ('{"type":"finish"}', None),
        ('{"type":"start","patient":true,"x":1}', None),
        ("patient", None),
        (b"patient", None),
    ],
)
def test_what_a_first_message_says_of_patience(data: str | bytes, wanted: bool | None):
    message = parsed(data)
    assert (message.patient if isinstance(message, Start) else None) is wanted
    (first,), (of_data,) = (Session("s1", INFO).receive(x).messages for x in (message, data))
    assert first == of_data  # why it is refused, too


@pytest.mark.parametrize(
    "data", [b"\0\0", "hello", "{}", '{"type":"finish"}', "[]", '{"type":"start","encoding":"flac"}']
)
def test_anything_but_a_good_start_is_refused(data: str | bytes):
    assert fatal(Session("s1", INFO), data).code is ErrorCode.START_EXPECTED


@pytest.mark.parametrize(
    "fields", [{"sample_rate": 7999}, {"sample_rate": 48001}, {"channels": 0}, {"channels": 9}, {"x": 1}]
)
def test_limits_of_start(fields: dict[str, int]):
    assert fatal(Session("s1", INFO), json.dumps({"type": "start", **fields})).code is ErrorCode.START_EXPECTED


def test_text_where_audio_is_due_and_a_second_start():
    assert fatal(started(), "hello").code is ErrorCode.INVALID_MESSAGE
    assert fatal(started(), '{"type":"start"}').code is ErrorCode.INVALID_MESSAGE


@pytest.mark.parametrize("more", [b"\0\0", '{"type":"finish"}'])
def test_audio_and_another_finish_after_finish(more: bytes | str):
    session = started()
    session.receive('{"type":"finish"}')
    assert fatal(session, more).code is ErrorCode.INVALID_MESSAGE


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_floats_that_are_no_audio(bad: float):
    session = started(encoding="pcm_f32le")
    assert fatal(session, np.array([0, bad], "<f4").tobytes()).code is ErrorCode.INVALID_AUDIO


def test_samples_cut_across_messages_are_joined():
    session, samples = started(), np.arange(-500, 500, dtype="<i2")
    data = samples.tobytes()
    got = [session.receive(data[k : k + 3]).samples for k in range(0, len(data), 3)]
    np.testing.assert_array_equal(as_float(np.concatenate(got)), samples.astype(np.float32) / 32768)


def test_an_odd_last_byte_is_a_warning_and_loses_nothing_else():
    session = started()
    assert len(session.receive(b"\0\0\0").samples) == 1
    received = session.receive('{"type":"finish"}')
    (warning,) = received.messages
    assert isinstance(warning, Error) and not warning.fatal and warning.code is ErrorCode.INVALID_AUDIO
    assert received.finished


def test_deltas_are_the_transcript_and_segments_hold_words():
    session = started()
    session.receive(bytes(2 * 160_000))
    messages = (
        session.emitted(spell("hi you", 10)) + session.emitted([END, *spell("then", 60)]) + session.emitted([END])
    )
    deltas = "".join(m.delta for m in messages if isinstance(m, Text))
    segments = [m for m in messages if isinstance(m, Segment)]
    assert deltas == "hi you then"
    assert [s.text for s in segments] == ["hi you", "then"]
    assert [(w.word, w.start, w.end) for w in segments[0].words] == [("hi", 0.4, 0.48), ("you", 0.52, 0.64)]
    first = next(m for m in messages if isinstance(m, Text)).characters[0]
    assert (first.frame, first.time, first.p, first.chunk) == (10, 0.425, 0.75, [0.1, 0.2, 0.3, 0.4])
    assert session.ended() == End(segments=2, duration=10.0)


def test_nothing_is_said_after_the_end_of_the_audio():
    session = started()
    session.receive(bytes(2 * 16_000))
    text, segment = session.emitted([*spell("hi you", 22), END])  # what comes at once after 1 s is of the last frames
    assert isinstance(text, Text) and isinstance(segment, Segment)
    assert [c.time for c in text.characters] == [0.905, 0.945, 0.985, 1.0, 1.0, 1.0]
    assert [(w.start, w.end) for w in segment.words] == [(0.88, 0.96), (0.96, 1.0)] and segment.end == 1.0


def test_a_segment_without_end_is_ended_with_a_word():
    def said(info: ModelInfo, long: str = ("a longer word " * 100).strip()) -> tuple[str, list[Segment]]:
        transcript = Transcript(info)
        found = [m for e in [*spell(long), END] for m in transcript.push([e], 10**9)]
        deltas = "".join(m.delta for m in found if isinstance(m, Text))
        segments = [m for m in found if isinstance(m, Segment)]
        assert deltas == long and [s.segment for s in segments] == list(range(len(segments)))
        return long, segments

    long, segments = said(INFO)
    assert [s.cut for s in segments] == [True, False] and " ".join(s.text for s in segments) == long
    assert LONGEST_SEGMENT <= len(segments[0].text) + 1 < LONGEST_SEGMENT + len("longer ")
    _, segments = said(INFO, "abcd " * (LONGEST_SEGMENT // 5))
    assert [s.cut for s in segments] == [False], "nothing follows the word that is one too many"
    long, segments = said(replace(INFO, settles=True))  # all of it may have to be replaced
    assert [(s.text, s.cut) for s in segments] == [(long, False)]


def test_a_segment_that_goes_on_from_one_that_was_cut_begins_after_it():
    cut, (*_, space, letter) = spell("x" * (LONGEST_SEGMENT - 1)), spell("xx a", LONGEST_SEGMENT - 3)
    transcript, found = Transcript(INFO), []
    for emission in (*cut, replace(space, frame=cut[-1].frame), replace(letter, frame=cut[-1].frame), END):
        found += [m for m in transcript.push([emission], 10**9) if isinstance(m, Segment)]
    first, second = found
    assert second.start == second.words[0].start == first.end


def test_words_whose_symbols_share_a_frame_follow_each_other():
    transcript, (_, space, *rest) = Transcript(INFO), spell("a bc", 10)
    shared = [replace(space, text="a"), space, *(replace(e, frame=e.frame - 1) for e in rest), END]
    (segment,) = (m for e in shared for m in transcript.push([e], 10**6) if isinstance(m, Segment))
    assert [(w.word, w.start, w.end) for w in segment.words] == [("a", 0.44, 0.48), ("bc", 0.48, 0.52)]


@pytest.mark.parametrize(("num_samples", "times"), [(9999, (0.08, 0.16)), (1280, (0.04, 0.08)), (640, (0.04, 0.04))])
def test_a_word_that_ends_the_audio_keeps_a_frame_where_there_is_room(num_samples: int, times: tuple[float, float]):
    transcript = Transcript(INFO)
    found = [m for e in [*spell("a bc"), END] for m in transcript.push([e], num_samples)]
    (segment,) = (m for m in found if isinstance(m, Segment))
    assert [(w.start, w.end) for w in segment.words] == [(0, 0.04), times]
    assert segment.end == times[1]


@pytest.mark.parametrize(
    "text",
    [
        '{"type":"start","phrases":[' + "1," * 9_999 + "1]}",
        '{"type":"start",' + ",".join(f'"{n}":1' for n in range(9_999)) + "}",
        '{"type":"start","phrases":' + "[" * 9_999,
    ],
)
def test_a_message_of_far_too_many_values_is_not_looked_at(text: str):
    """Each of these would be an error of its own, a hundred times as large as its bytes."""
    session = Session("s1", INFO)
    assert parsed(text) is text
    assert fatal(session, text).message == f"the message has more than {MAX_VALUES} values"
    with pytest.raises(Refused, match="more than"):
        parse('{"config":{"phrase_list":[' + "1," * 9_999 + "1]}}")
    (mistake,) = (
        RealtimeTranslator(INFO).received('{"type":"session.update","session":{"x":[' + "1," * 9_999 + "1]}}").replies
    )
    assert "more than" in json.loads(mistake)["error"]["message"]


def test_what_is_wrong_is_told_shortly():
    name = "x" * 100_000
    assert len(fatal(Session("s1", INFO), json.dumps({"type": name})).message) <= MAX_EXPLANATION
    (mistake,) = RealtimeTranslator(INFO).received(json.dumps({"type": name, "event_id": name})).replies
    assert len(mistake) < 1000
    with pytest.raises(ValidationError) as wrong:
        Transcribe(transcript_names=[1] * 9_999)  # type: ignore[list-item]
    assert wrong.value.error_count() == 1


def test_all_phrases_that_may_be_given_are_taken():
    phrases = ["日本: [a], {b}, " + "ö" * 40] * 200
    started(phrases=phrases)
    assert parse(json.dumps({"config": {"phrase_list": phrases}})).config


def test_duration_counts_samples_heard():
    session = started(sample_rate=8000, encoding="mulaw")
    session.receive(b"\xff" * 8000)
    session.receive('{"type":"finish"}')
    assert session.ended().duration == pytest.approx(1.0, abs=0.01)
