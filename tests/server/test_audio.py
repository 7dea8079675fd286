"""Decoding of raw encodings and files: exact tables, chunk-invariant resampling, typed errors."""

import io
import wave
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import signal

from mocha_server.audio import ALAW, MULAW, AudioError, RawDecoder, decode_file
from mocha_server.messages import Encoding, ErrorCode

FIXTURES = Path(__file__).parents[1] / "fixtures"
FORMATS = ["weather.wav", "weather.flac", "weather.mp3", "weather.ogg", "weather.opus", "weather.m4a", "weather.webm"]


def test_g711_tables_are_its_decoders_output_values():
    """ITU-T G.711, of 14 bits in the mu-law and 13 in the A-law, as 16-bit values."""
    for code in range(256):
        inverted = code ^ 0xFF
        exponent, mantissa = inverted >> 4 & 7, inverted & 15
        size = 4 * ((2 * mantissa + 33) * 2**exponent - 33)
        assert MULAW[code] * 32768 == (-size if inverted & 0x80 else size), f"mu-law {code:#x}"
        toggled = code ^ 0x55
        exponent, mantissa = toggled >> 4 & 7, toggled & 15
        size = 8 * ((2 * mantissa + 33) * 2 ** (exponent - 1) if exponent else 2 * mantissa + 1)
        assert ALAW[code] * 32768 == (size if toggled & 0x80 else -size), f"A-law {code:#x}"


def test_samples_beyond_full_scale_are_clipped():
    loud = np.array([2, -3, 0.5], "<f4")
    decoder = RawDecoder(Encoding.PCM_F32LE, 16_000, 1, 16_000)
    assert decoder.push(loud.tobytes()).tolist() == [1, -1, 0.5]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 5000), max_size=10), st.sampled_from([8000, 11025, 24000, 44100, 48000]))
def test_resampling_does_not_depend_on_the_cuts(cuts: list[int], rate: int):
    data = (np.sin(np.arange(12_000) * 0.05) * 9000).astype("<i2").tobytes()

    def run(pieces: list[bytes]) -> NDArray[np.float32]:
        decoder = RawDecoder(Encoding.PCM_S16LE, rate, 1, 16_000)
        parts = [decoder.push(piece) for piece in pieces]
        return np.concatenate([*parts, decoder.finish()])

    pieces, at = [], 0
    for cut in cuts:
        pieces.append(data[at : at + cut])
        at += cut
    np.testing.assert_array_equal(run([*pieces, data[at:]]), run([data]))
    assert abs(len(run([data])) - 12_000 * 16_000 / rate) <= 2


def test_channels_are_averaged():
    decoder = RawDecoder(Encoding.PCM_S16LE, 16_000, 2, 16_000)
    samples = decoder.push(np.array([[1000, 3000], [-500, 500]], "<i2").tobytes())
    np.testing.assert_allclose(samples * 32768, [2000, 0])


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_speech(name: str, clip: NDArray[np.int16]):
    samples = np.concatenate(list(decode_file(str(FIXTURES / name), 16_000)))
    assert abs(len(samples) - len(clip)) < 2500  # codecs pad
    reference = clip.astype(np.float32) / 32768
    spectrum = np.abs(np.fft.rfft(samples, 1 << 17)) * np.abs(np.fft.rfft(reference, 1 << 17))
    energy = np.sqrt(
        (np.abs(np.fft.rfft(samples, 1 << 17)) ** 2).sum() * (np.abs(np.fft.rfft(reference, 1 << 17)) ** 2).sum()
    )
    assert spectrum.sum() / energy > 0.8


def mp3(samples: NDArray[np.int16], layout: str, rate: int) -> bytes:
    """`samples` at 16 kHz as an MP3 file of that layout and rate."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp3") as container:
        stream = container.add_stream("mp3", rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        frame.sample_rate = 16_000
        resampler = av.AudioResampler(stream.format.name, layout, rate, frame_size=1152)
        for piece in [*resampler.resample(frame), *resampler.resample(None), None]:
            container.mux(stream.encode(piece))
    return file.getvalue()


def test_files_whose_samples_are_no_numbers_or_beyond_full_scale_are_heard():
    file, wild = io.BytesIO(), np.array([2, -3, 0.5, np.nan, np.inf, -np.inf], np.float32)
    with av.open(file, "w", format="wav") as container:
        stream = container.add_stream("pcm_f32le", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(wild[None], format="flt", layout="mono")
        frame.sample_rate = 16_000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    (samples,) = decode_file(io.BytesIO(file.getvalue()), 16_000)
    assert samples.tolist() == [1, -1, 0.5, 0, 1, -1]


def test_rate_and_channels_may_change_in_the_middle(clip: NDArray[np.int16]):
    pieces = [mp3(clip, layout, rate) for layout, rate in (("mono", 16_000), ("stereo", 16_000), ("stereo", 44_100))]
    each = [np.concatenate(list(decode_file(io.BytesIO(piece), 16_000))) for piece in pieces]
    joined = np.concatenate(list(decode_file(io.BytesIO(b"".join(pieces)), 16_000)))
    assert len(joined) == pytest.approx(sum(map(len, each)), abs=3 * 1152)
    loudest = signal.correlate(joined, clip[8000:24000] / 32768, "valid", "fft")
    for third in np.array_split(loudest, 3):  # the clip is heard in each part
        assert third.max() > 0.8 * np.square(clip[8000:24000] / 32768).sum()


def wav(samples: NDArray[np.int16]) -> bytes:
    """`samples` [N, channels] at 16 kHz as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((samples.shape[1], 2, 16_000, 0, "NONE", ""))
        out.writeframes(samples.tobytes())
    return file.getvalue()


@pytest.mark.parametrize("channels", [9, 18, 32])  # for which FFmpeg has no layout
def test_any_number_of_channels_is_averaged(clip: NDArray[np.int16], channels: int):
    loud = np.arange(channels)[None] % 2 * clip[:16_000, None]
    samples = np.concatenate(list(decode_file(io.BytesIO(wav(loud.astype(np.int16))), 16_000)))
    np.testing.assert_allclose(samples, clip[:16_000] / 32768 * (channels // 2) / channels, atol=1e-4)


def test_too_many_channels():
    with pytest.raises(AudioError, match="mixed"):
        list(decode_file(io.BytesIO(wav(np.zeros((1600, 100), np.int16))), 16_000))


def test_tags_that_are_not_utf_8_are_no_obstacle(clip: NDArray[np.int16]):
    speech = (FIXTURES / "weather.mp3").read_bytes()
    tag = b"TAG" + "Frühstück".encode("cp1252").ljust(125, b"\0")  # ID3v1, as Windows writes it
    assert sum(map(len, decode_file(io.BytesIO(speech + tag), 16_000))) >= len(clip)


def test_an_upload_opens_nothing_else(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(FIXTURES)
    session = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=audio 45678 RTP/AVP 0\r\n"
    for data in (b"ffconcat version 1.0\nfile weather.wav\n", session):
        with pytest.raises(AudioError) as caught:
            list(decode_file(io.BytesIO(data), 16_000))
        assert caught.value.code is ErrorCode.UNSUPPORTED_MEDIA


def test_a_path_that_cannot_be_opened(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        list(decode_file(str(tmp_path / "none.wav"), 16_000))


def test_damaged_packets_are_passed_over():
    """Each decoder has its own errors for them, AAC's one that PyAV calls a lack of permission."""
    whole = (FIXTURES / "weather.m4a").read_bytes()
    for seed in range(16):
        rng, damaged = np.random.default_rng(seed), np.frombuffer(whole, np.uint8).copy()
        damaged[rng.integers(len(whole) // 4, 3 * len(whole) // 4, 6)] = rng.integers(0, 256, 6)
        samples = np.concatenate(list(decode_file(io.BytesIO(damaged.tobytes()), 16_000)))
        assert 3.2 < len(samples) / 16_000 < 3.6, f"seed {seed}"


def test_a_truncated_file_gives_what_could_be_decoded():
    samples = np.concatenate(list(decode_file(str(FIXTURES / "truncated.mp3"), 16_000)))
    assert 0.5 < len(samples) / 16_000 < 3


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.UNSUPPORTED_MEDIA),
        (b"\0" * 100, ErrorCode.UNSUPPORTED_MEDIA),
        ((FIXTURES / "document.wav").read_bytes(), ErrorCode.UNSUPPORTED_MEDIA),
        (b"RIFF", ErrorCode.UNSUPPORTED_MEDIA),
        (wav(np.zeros((0, 1), np.int16)), ErrorCode.EMPTY_AUDIO),
    ],
    ids=["nothing", "zeros", "a document", "the beginning of a header", "no samples"],
)
def test_files_that_are_no_audio(data: bytes, code: ErrorCode):
    with pytest.raises(AudioError) as caught:
        list(decode_file(io.BytesIO(data), 16_000))
    assert caught.value.code is code
