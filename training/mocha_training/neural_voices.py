"""Voices that are networks, which speak far more like people than those that are programs.

*Kokoro-82M* (hexgrad 2025) reads phones in the style of a voice; styles are vectors, so what lies between voices is a
voice too. Those that speak Mandarin and other languages read English with an accent. A directory has the network
(``*.onnx``) and ``voices/NAME.bin`` (styles [510, 256] float32, one for each number of phones). *hibari* is one of its
voices learned by a network a tenth as large, which is forty times as fast and puts out a source and its filters, so
that the voice may become another's; the package hibari-tts brings it, and says how words sound to both. Knows nothing
of sentences.
"""

import threading
import zlib
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.util import find_spec
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

from mocha_model.config import SAMPLE_RATE
from mocha_training.accents import with_accent
from mocha_training.distortion import Audio
from mocha_training.voices import Program, SynthesisError

STYLE_SIZE = 256
MIXED_VOICES = 400  # of Kokoro, beside those that there are
CHANGED_VOICES = 400  # of hibari
ENGLISH, MANDARIN = "ab", "z"  # what the names of voices begin with
STRONGEST_ACCENT = 0.7  # of voices of Mandarin; half as strong of other languages
# The phones that Kokoro has learned to read, by number (0 is the silence around).
SYMBOLS = {
    **{";": 1, ":": 2, ",": 3, ".": 4, "!": 5, "?": 6, "—": 9, "…": 10, '"': 11, "(": 12, ")": 13, "“": 14, "”": 15},
    **{" ": 16, "A": 24, "I": 25, "O": 31, "Q": 33, "S": 35, "T": 36, "W": 39, "Y": 41, "ᵊ": 42, "a": 43, "b": 44},
    **{"d": 46, "e": 47, "f": 48, "h": 50, "i": 51, "j": 52, "k": 53, "l": 54, "m": 55, "n": 56, "o": 57, "p": 58},
    **{"r": 60, "s": 61, "t": 62, "u": 63, "v": 64, "w": 65, "x": 66, "z": 68, "ɑ": 69, "ɐ": 70, "ɒ": 71, "æ": 72},
    **{"ɔ": 76, "ð": 81, "ʤ": 82, "ə": 83, "ɚ": 85, "ɛ": 86, "ɜ": 87, "ɡ": 92, "ɪ": 102, "ŋ": 112, "θ": 119},
    **{"ɹ": 123, "ɾ": 125, "ʃ": 131, "ʧ": 133, "ʊ": 135, "ʌ": 138, "ʒ": 147, "ʔ": 148, "ˈ": 156, "ˌ": 157, "ː": 158},
    "ᵻ": 177,
}


def at_16_khz(samples: NDArray[np.float32], rate: int = 24_000) -> Audio:
    """What `samples` [N] of `rate` Hz, that of the networks here, are at 16 kHz, within [-1, 1]."""
    every = gcd(SAMPLE_RATE, rate)
    audio: Audio = np.clip(resample_poly(samples, SAMPLE_RATE // every, rate // every), -1, 1).astype(np.float32)
    return audio


def opened(network: Path) -> Any:
    """A session of a network of one thread, since sentences are spoken beside each other; raises SynthesisError."""
    try:
        import onnxruntime
    except ImportError as error:
        raise SynthesisError("voices that are networks need the extra `synthesis` of mocha-asr") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of no type that the package makes public
        raise SynthesisError(f"{network}: not a network that can be run ({error})") from error


@cache
def _hibari() -> Any:
    """The network and the pronunciations of hibari-tts; raises SynthesisError where it is not installed."""
    try:
        from hibari import Hibari
    except ImportError as error:
        raise SynthesisError("Kokoro and hibari need the extra `synthesis` of mocha-asr") from error
    return Hibari()


_PRONOUNCING = threading.Lock()  # what says how words sound keeps state


def pronounced(text: str) -> str:
    """How `text` sounds, in Kokoro's symbols."""
    with _PRONOUNCING:
        return " ".join(_hibari().phonemize(text))


@dataclass(frozen=True)
class HibariVoice:
    """The voice that hibari-tts brings, with another pitch and vocal tract (factors), and an accent of 0 to 1."""

    pitch: float = 1.0
    tract: float = 1.0
    accent: float = 0.0
    program: Program = Program.HIBARI

    @property
    def name(self) -> str:
        """What is changed, e.g. ``heart, pitch 0.60, tract 1.12, accent 0.25``."""
        changed = ("pitch", self.pitch, 1), ("tract", self.tract, 1), ("accent", self.accent, 0)
        return ", ".join(["heart", *(f"{what} {value:.2f}" for what, value, usual in changed if value != usual)])

    def speak(self, text: str, rate: float) -> Audio:
        """Samples [N] float32 at 16 kHz of `text` at `rate` times the usual speed; raises SynthesisError."""
        from hibari import dsp

        rng = np.random.default_rng(zlib.crc32(f"{self.name} {text}".encode()))
        numbers = _hibari().ids(with_accent(pronounced(text), self.accent, rng))
        if len(numbers) < 3:
            raise SynthesisError(f"hibari: nothing can be spoken of {text!r}")
        inputs = {"ids": np.array([numbers], dtype=np.int64), "speed": np.array([rate], dtype=np.float32)}
        harmonics, phases, noise, rest, rest_phases, f0 = (part[0] for part in _hibari().sess.run(None, inputs))
        filters = (_longer_tract(part, self.tract) for part in (harmonics, phases, noise, rest))
        return at_16_khz(dsp.synth(*filters, rest_phases, f0 * np.float32(self.pitch), rng))


def _longer_tract(spectrum: NDArray[np.float32], factor: float) -> NDArray[np.float32]:
    """A filter [bins, frames] whose formants are lower by `factor`, as of a vocal tract that is so much longer."""
    at = np.minimum(np.arange(len(spectrum)) * factor, len(spectrum) - 1)
    below = np.minimum(at.astype(np.int64), len(spectrum) - 2)
    between = (at - below).astype(np.float32)[:, None]
    moved: NDArray[np.float32] = spectrum[below] * (1 - between) + spectrum[below + 1] * between
    return moved


def hibari_voices(seed: int = 0) -> list[HibariVoice]:
    """The voice of hibari-tts as it is, of men, women and children, with and without accents; none if not installed."""
    if not (find_spec("hibari") and find_spec("onnxruntime")):
        return []
    rng = np.random.default_rng(seed)
    voices = [HibariVoice()]
    for _ in range(CHANGED_VOICES):
        size = rng.uniform()  # from a child's, high and short, to a large man's
        pitch = np.exp(np.interp(size, (0, 1), np.log((1.4, 0.5))) + rng.normal(0, 0.12))
        tract = np.interp(size, (0, 1), (0.8, 1.22)) * np.exp(rng.normal(0, 0.04))
        accent = rng.uniform(0, STRONGEST_ACCENT) if rng.random() < 0.5 else 0.0
        voices.append(HibariVoice(float(round(pitch, 2)), float(round(tract, 2)), float(round(accent, 2))))
    return voices


class Kokoro:
    """The network and the voices in a directory. Threads may share it."""

    def __init__(self, directory: Path) -> None:
        """Raises SynthesisError where there is not one network, or no voices."""
        networks, voices = sorted(directory.glob("*.onnx")), sorted(directory.glob("voices/*.bin"))
        if len(networks) != 1 or not voices:
            raise SynthesisError(f"{directory} has to have Kokoro's network, one *.onnx, and voices/*.bin")
        self._network, self._loading = networks[0], threading.Lock()
        try:
            self.styles = {path.stem: np.fromfile(path, "<f4").reshape(-1, STYLE_SIZE) for path in voices}
        except ValueError as error:
            raise SynthesisError(f"{directory}/voices: not styles of {STYLE_SIZE} numbers ({error})") from error

    @cached_property
    def _session(self) -> Any:
        return opened(self._network)

    def speak(self, phones: str, style: NDArray[np.float32], rate: float) -> Audio:
        """Samples [N] float32 at 16 kHz of `phones`, at most as many as `style` [510, 256] has rows."""
        numbers = [SYMBOLS[p] for p in phones if p in SYMBOLS]
        if not 0 < len(numbers) <= len(style):
            raise SynthesisError(f"kokoro: 1 to {len(style)} phones can be spoken at once, not {len(numbers)}")
        with self._loading:
            session = self._session
        inputs = {
            "tokens": np.array([[0, *numbers, 0]], dtype=np.int64),
            "style": style[None, len(numbers) - 1],
            "speed": np.array([rate], dtype=np.float32),
        }
        return at_16_khz(session.run(None, inputs)[0].ravel())


@dataclass(frozen=True)
class KokoroVoice:
    """A voice of `network`, or a mix of several by their shares, with an accent of 0 to 1."""

    network: Kokoro = field(repr=False, compare=False)
    mix: tuple[tuple[str, float], ...]
    accent: float = 0.0
    program: Program = Program.KOKORO

    @property
    def name(self) -> str:
        """What it is mixed of, e.g. ``zm_yunxi 0.70 af_heart 0.30, accent 0.25``."""
        mix = " ".join(name if share == 1 else f"{name} {share:.2f}" for name, share in self.mix)
        return f"{mix}, accent {self.accent:.2f}" if self.accent else mix

    def speak(self, text: str, rate: float) -> Audio:
        """Samples [N] float32 at 16 kHz of `text` at `rate` times the usual speed; raises SynthesisError."""
        rng = np.random.default_rng(zlib.crc32(f"{self.name} {text}".encode()))
        phones = with_accent(pronounced(text), self.accent, rng)
        style = sum(np.float32(share) * self.network.styles[name] for name, share in self.mix)
        return self.network.speak(phones, np.asarray(style), rate)


def kokoro_voices(network: Kokoro, seed: int = 0) -> list[KokoroVoice]:
    """Every voice of `network`, then mixes of two or three; those that speak Mandarin or others have accents."""
    rng = np.random.default_rng(seed)
    names = sorted(network.styles)
    groups = [[n for n in names if n[0] in ENGLISH], [n for n in names if n[0] == MANDARIN], names]
    groups = [group for group in groups if group]
    mixes: list[tuple[tuple[str, float], ...]] = [((name, 1.0),) for name in names]
    for _ in range(MIXED_VOICES):
        group = groups[rng.integers(len(groups))]
        chosen = dict.fromkeys([group[rng.integers(len(group))], *rng.choice(names, rng.integers(1, 3))])
        shares = np.sort(rng.dirichlet(np.ones(len(chosen))))[::-1]
        mixes.append(tuple((str(n), float(round(s, 2))) for n, s in zip(chosen, shares, strict=True)))
    return [KokoroVoice(network, mix, _accent(mix, rng)) for mix in mixes]


def _accent(mix: tuple[tuple[str, float], ...], rng: np.random.Generator) -> float:
    """How strong the accent of a mix is, by the share of its voices that speak something else than English."""
    foreign = sum(share * (1.0 if name[0] == MANDARIN else 0.5) for name, share in mix if name[0] not in ENGLISH)
    return float(round(rng.uniform(0, STRONGEST_ACCENT) * foreign, 2)) if foreign > 0.2 else 0.0
