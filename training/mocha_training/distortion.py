"""What becomes of a voice on its way to the recogniser: its speed, rooms, noise, microphones, lines, codecs, overload.

Each takes one recording [N] float32 in [-1, 1] at 16 kHz and returns another; chance is handed in. Knows nothing of
corpora or of how often anything happens.
"""

import math
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import av
import numpy as np
import torch
from av.audio.codeccontext import AudioCodecContext
from av.filter import Graph
from numpy.typing import NDArray
from scipy import fft, signal
from torchaudio.functional import mu_law_decoding, mu_law_encoding

from mocha_model.config import SAMPLE_RATE

Audio = NDArray[np.float32]
Codec = Literal["opus", "amr"]

NUM_ROOMS = 500  # of training; there is a room for every other number too
LONGEST_RESPONSE_S = 0.8


def change_speed(audio: Audio, factor: float) -> Audio:
    """Play `factor` times as fast, by linear interpolation: rate, pitch and formants change together."""
    if abs(factor - 1) < 1e-3:
        return audio
    at = np.arange(0, len(audio) - 1, factor)
    before = np.minimum(at.astype(np.int32), len(audio) - 2)  # rounding can put the last one at the end
    earlier: Audio = audio[before]
    between: Audio = earlier + (at - before).astype(np.float32) * (audio[before + 1] - earlier)
    return between


def change_tempo(audio: Audio, factor: float) -> Audio:
    """Speak `factor` times as fast in the same voice (overlap and add of like waveforms, FFmpeg's ``atempo``)."""
    if abs(factor - 1) < 1e-3:
        return audio
    graph = Graph()
    source = graph.add_abuffer(sample_rate=SAMPLE_RATE, format="flt", layout="mono", time_base=Fraction(1, SAMPLE_RATE))
    graph.link_nodes(source, graph.add("atempo", str(factor)), graph.add("abuffersink")).configure()
    frame = _frame(audio, "flt")
    frame.pts = 0
    graph.push(frame)
    graph.push(None)
    pieces = []
    while True:
        try:
            pieces.append(graph.pull().to_ndarray()[0])
        except (av.error.BlockingIOError, av.error.EOFError):
            return np.concatenate(pieces) if pieces else audio[:0]


@lru_cache(maxsize=2 * NUM_ROOMS)
def room_response(number: int) -> Audio:
    """Impulse response from a voice to a microphone in the room of this `number`, from the direct sound on.

    A rectangular room of 10 to 200 m3 whose walls take up 15 to 70 % of the energy, by the image method (Allen &
    Berkley 1979); energy 1.
    """
    import pyroomacoustics  # only where rooms are wanted

    rng = np.random.default_rng(number)
    size = rng.uniform((2.5, 2.0, 2.3), (9.0, 6.0, 3.7))
    absorbed = rng.uniform(0.15, 0.7)
    order = min(20, math.ceil(math.log(1e-4) / math.log(1 - absorbed)))
    room = pyroomacoustics.ShoeBox(
        size, fs=SAMPLE_RATE, materials=pyroomacoustics.Material(float(absorbed)), max_order=order
    )
    room.add_source(rng.uniform(0.3, size - 0.3))
    room.add_microphone(rng.uniform(0.3, size - 0.3))
    room.compute_rir()
    response = np.asarray(room.rir[0][0], np.float32)
    response = response[np.abs(response).argmax() :][: int(LONGEST_RESPONSE_S * SAMPLE_RATE)]
    return response / np.float32(np.sqrt(np.sum(response**2)))


def reverberate(audio: Audio, response: Audio) -> Audio:
    """`audio` as heard where `response` was measured, at the same length."""
    heard: Audio = signal.fftconvolve(audio, response)[: len(audio)]
    return heard


def add_noise(audio: Audio, noise: Audio, snr_db: float, rng: np.random.Generator) -> Audio:
    """Mix in `noise` (looped from a random place) at `snr_db` relative to the whole recording's power."""
    level = float(np.sqrt(np.mean(audio**2) + 1e-12) * 10 ** (-snr_db / 20))
    mixed: Audio = audio + repeated(noise, len(audio), level, rng)
    return mixed


def repeated(noise: Audio, length: int, level: float, rng: np.random.Generator) -> Audio:
    """`length` samples of `noise`, looped from a random place, with a root mean square of `level`."""
    looped = np.resize(np.roll(noise, int(rng.integers(len(noise)))), length)
    as_loud: Audio = (looped * (level / np.sqrt(np.mean(looped**2) + 1e-12))).astype(np.float32)
    return as_loud


def coloured_noise(length: int, rng: np.random.Generator) -> Audio:
    """Noise with a power spectrum of 1 / f^k, k drawn from 0 ... 2."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    spectrum /= np.maximum(np.arange(len(spectrum)), 1) ** (rng.uniform(0, 2) / 2)
    return np.fft.irfft(spectrum, length).astype(np.float32)


def chords(length: int, rng: np.random.Generator) -> Audio:
    """Music of a kind: chords of one to four tones of 80 to 1000 Hz, each of up to eight partials that die away."""
    played = np.zeros(length, np.float32)
    begin = 0
    while begin < length:
        time = np.arange(min(length - begin, int(rng.uniform(0.15, 1.2) * SAMPLE_RATE)), dtype=np.float32) / SAMPLE_RATE
        root, steepness = 80 * 2 ** rng.uniform(0, 2.5), rng.uniform(0.5, 2)
        for semitones in rng.choice(13, rng.integers(1, 5), replace=False):
            for partial in range(1, int(rng.integers(1, 9)) + 1):
                tone = np.sin(np.float32(2 * math.pi * root * 2 ** (semitones / 12) * partial) * time)
                played[begin : begin + len(time)] += np.float32(partial**-steepness) * tone
        played[begin : begin + len(time)] *= np.exp(np.float32(-rng.uniform(0, 6)) * time)
        begin += len(time)
    return played


def through_microphone(audio: Audio, rng: np.random.Generator) -> Audio:
    """As loud as before, through a microphone that hears some pitches louder than others, by up to 20 dB.

    The response is drawn from - 10 ... + 10 dB at 100 and 300 Hz, 1, 3 and 8 kHz, with straight lines (of dB over
    octaves) between, and below 100 Hz what it is there. Single samples may be louder than before, and beyond 1.
    """
    size = fft.next_fast_len(2 * len(audio), real=True)
    hertz = fft.rfftfreq(size, 1 / SAMPLE_RATE)
    places = np.log([100, 300, 1_000, 3_000, 8_000])
    response_db = np.interp(np.log(np.maximum(hertz, 1)), places, rng.uniform(-10, 10, len(places)))
    heard = fft.irfft(fft.rfft(audio, size) * 10 ** (response_db / 20), size)[: len(audio)]
    level = np.sqrt(np.mean(audio**2) / (np.mean(heard**2) + 1e-12))
    through: Audio = (heard * level).astype(np.float32)
    return through


def over_telephone(audio: Audio, rng: np.random.Generator) -> Audio:
    """What is left after a telephone line: a band of it, drawn around 0.2 to 3.6 kHz, in 8 bits of mu-law."""
    size = fft.next_fast_len(len(audio), real=True)
    spectrum = fft.rfft(audio, size)
    hertz = fft.rfftfreq(size, 1 / SAMPLE_RATE)
    spectrum[(hertz < rng.uniform(50, 350)) | (hertz > rng.uniform(3300, 3950))] = 0
    band = torch.from_numpy(fft.irfft(spectrum, size)[: len(audio)].clip(-1, 1))
    line: Audio = mu_law_decoding(mu_law_encoding(band, 256), 256).numpy()
    return line


def through_codec(audio: Audio, codec: Codec, bit_rate: int) -> Audio:
    """Coded and decoded, at the same length: Opus at `bit_rate` bits per second, or AMR of GSM telephones (8 kHz).

    AMR takes 4750, 5150, 5900, 6700, 7400, 7950, 10200 and 12200 bits per second.
    """
    names, rate = {"opus": (("libopus", "libopus"), SAMPLE_RATE), "amr": (("libopencore_amrnb", "amrnb"), 8_000)}[codec]
    encoder: Any = AudioCodecContext.create(names[0], "w")
    encoder.sample_rate, encoder.layout, encoder.format = rate, "mono", "s16"
    encoder.bit_rate, encoder.time_base = bit_rate, Fraction(1, rate)
    if codec == "opus":
        encoder.options = {"compression_level": "3"}  # how long it searches; the bits stay the same
    encoder.open()
    decoder: Any = AudioCodecContext.create(names[1], "r")
    decoder.sample_rate, decoder.layout = rate, "mono"
    decoder.extradata = encoder.extradata
    down = av.AudioResampler(format="s16", layout="mono", rate=rate, frame_size=encoder.frame_size)
    up = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
    frames = [*down.resample(_frame((audio.clip(-1, 1) * 32767).astype(np.int16), "s16")), *down.resample(None)]
    packets = [packet for frame in (*frames, None) for packet in encoder.encode(frame)]
    decoded = [frame for packet in packets for frame in decoder.decode(packet)]
    wide = [frame for narrow in (*decoded, None) for frame in up.resample(narrow)]
    heard = np.concatenate([frame.to_ndarray()[0] for frame in wide]).astype(np.float32) / 32768
    return np.pad(heard[: len(audio)], (0, max(0, len(audio) - len(heard))))


def overload(audio: Audio, share: float) -> Audio:
    """Cut off what is louder than all but `share` of the samples, as an input does that is turned up too far."""
    limit = np.quantile(np.abs(audio), 1 - share)
    return audio.clip(-limit, limit)


def _frame(samples: NDArray[Any], sample_format: str) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(samples[None], format=sample_format, layout="mono")
    frame.sample_rate, frame.time_base = SAMPLE_RATE, Fraction(1, SAMPLE_RATE)
    return frame
