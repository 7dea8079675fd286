"""Files that claim far more than they hold: a typed error soon, and no memory."""

import io
import struct
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from mocha_server import audio, media, mp4_index
from mocha_server.audio import AudioError, decode_file
from mocha_server.messages import ErrorCode
from mocha_server.mp4_index import promises_too_much

FIXTURES = Path(__file__).parents[1] / "fixtures"
MANY = 100_000_000


def heard(data: bytes) -> NDArray[np.float32]:
    return np.concatenate(list(decode_file(io.BytesIO(data), 16_000)))


def refusal(data: bytes) -> str:
    with pytest.raises(AudioError) as refused:
        heard(data)
    assert refused.value.code in (ErrorCode.UNSUPPORTED_MEDIA, ErrorCode.EMPTY_AUDIO)
    return str(refused.value)


def changed(data: bytes, kind: bytes, offset: int, *numbers: int) -> bytes:
    """An MP4 file with other numbers in its first box of a kind, that many bytes after the box's name."""
    at = data.index(kind) + 4 + offset
    return data[:at] + struct.pack(f">{len(numbers)}I", *numbers) + data[at + 4 * len(numbers) :]


def encoded(codec: str, samples: NDArray[np.int16], name: str = "mp4", **options: str) -> bytes:
    """`samples` [N] at 16 kHz in a file of the format `name`."""
    file = io.BytesIO()
    with av.open(file, "w", format=name, options=options) as container:
        stream = container.add_stream(codec, rate=16_000, layout="mono")
        for at in range(0, len(samples), 1 << 16):
            frame = av.AudioFrame.from_ndarray(samples[None, at : at + (1 << 16)], format="s16", layout="mono")
            frame.sample_rate, frame.pts = 16_000, at
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def test_an_index_of_far_more_samples_than_there_can_be():
    whole = (FIXTURES / "weather.m4a").read_bytes()
    assert len(heard(whole)) > 50_000
    assert "far more" in refusal(changed(whole, b"stsz", 4, 1, MANY))
    nested = whole.replace(b"moov", b"skip", 1) + b"".join(struct.pack(">I4s", 0, b"moov") for _ in range(20_000))
    assert refusal(nested)


def test_fragments_of_far_more_samples_than_there_can_be():
    tone = (9000 * np.sin(np.arange(64_000) / 9)).astype(np.int16)
    whole = encoded("aac", tone, movflags="frag_keyframe+empty_moov")
    assert len(heard(whole)) > 60_000 and whole.count(b"trun") >= 1
    assert "far more" in refusal(changed(whole, b"trun", 4, MANY))


def test_sound_that_is_not_compressed_may_have_many_samples(monkeypatch: pytest.MonkeyPatch):
    whole = encoded("pcm_s16le", np.zeros(5_000_000, np.int16), "mov")
    assert not promises_too_much(io.BytesIO(whole))
    assert len(heard(whole)) == 5_000_000
    assert "far more" in refusal(changed(whole, b"stsc", 12, 0xFFFF_FFFF))
    monkeypatch.setattr(mp4_index, "MOST_RUNS", 0)  # which then are not looked at
    assert promises_too_much(io.BytesIO(whole))


@pytest.mark.parametrize("name", ["weather.flac", "weather.m4a", "weather.webm", "weather.wav"])
def test_what_is_no_mp4_file_promises_nothing(name: str):
    with (FIXTURES / name).open("rb") as file:
        assert not promises_too_much(file) and file.tell() == 0
    assert not promises_too_much(io.BytesIO(b"")) and not promises_too_much(io.BytesIO(b"\0\0\0\1moov\0"))


def test_packets_of_more_samples_than_a_packet_may_have(monkeypatch: pytest.MonkeyPatch):
    tone = (9000 * np.sin(np.arange(64_000) / 9)).astype(np.int16)
    lossless = encoded("alac", tone)
    assert len(heard(lossless)) == 64_000
    monkeypatch.setattr(media, "MOST_SAMPLES", 1000)
    assert "no audio that can be decoded" in refusal(lossless)


def test_long_packets_are_heard_piece_by_piece(monkeypatch: pytest.MonkeyPatch):
    for name in ("weather.flac", "weather.ogg"):
        whole = heard((FIXTURES / name).read_bytes())
        monkeypatch.setattr(media, "PIECE_SAMPLES", 100)
        assert np.array_equal(heard((FIXTURES / name).read_bytes()), whole)
        monkeypatch.undo()


@pytest.mark.parametrize("rate", [500, 99_999_989])
def test_rates_of_no_speech(rate: int):
    wav = (FIXTURES / "weather.wav").read_bytes()
    at = wav.index(b"fmt ") + 12
    assert refusal(wav[:at] + struct.pack("<II", rate, 2 * rate) + wav[at + 8 :]) == f"{rate} Hz is no rate of speech"


def test_a_text_that_says_what_to_hear_is_no_audio():
    assert "not a file of a known audio format" in refusal(b"on: 200+10/80 300+1/10\nNOW on\n")


def test_audio_without_end(monkeypatch: pytest.MonkeyPatch):
    silence = encoded("flac", np.zeros(60 * 16_000, np.int16), "flac")
    assert len(heard(silence)) == 60 * 16_000
    monkeypatch.setattr(audio, "LEAST_S", 1)
    monkeypatch.setattr(audio, "LEAST_BYTES_PER_S", len(silence))
    assert refusal(silence) == "more audio than so few bytes can hold"
