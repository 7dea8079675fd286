"""The free English voices that are programs (espeak-ng, flite, festival), found when asked for.

Knows nothing of sentences, or of voices that are networks (`neural_voices`, `piper_voices`).
"""

import shutil
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from mocha_training.distortion import Audio
from mocha_training.manifests import CorpusError, decode_audio

PACKAGES = "espeak-ng, flite, festival with festvox-kallpc16k, festvox-kdlpc16k and festvox-us-slt-hts"
LIST_FESTIVAL = (
    '(mapcar (lambda (v) (format t "%s %l\\n" v (assoc \'language (cadr (voice.description v))))) (voice.list))'
)
ONLY_THE_TIME = "awb_time"  # a voice of flite that can say nothing else
TIMEOUT_S = 60
WORDS_PER_MINUTE = 170  # of espeak-ng at rate 1


class Program(StrEnum):
    """What speaks: a program, or a network."""

    ESPEAK = "espeak-ng"
    FLITE = "flite"
    FESTIVAL = "festival"
    HIBARI = "hibari"
    KOKORO = "kokoro"
    PIPER = "piper"


class SynthesisError(RuntimeError):
    """No voice is installed, or nothing can be read."""


class Voice(Protocol):
    """Whoever reads aloud; the same voice reads the same text at the same rate alike, but for Piper's."""

    @property
    def program(self) -> Program:
        """What speaks."""

    @property
    def name(self) -> str:
        """Which voice of it."""

    def speak(self, text: str, rate: float) -> Audio:
        """Samples [N] float32 at 16 kHz of `text` at `rate` times the usual speed; raises SynthesisError."""


@dataclass(frozen=True)
class ProgramVoice:
    """A voice of a program, by the name that the program knows it by."""

    program: Program
    name: str

    def speak(self, text: str, rate: float) -> Audio:
        """Samples [N] float32 at 16 kHz of `text` at `rate` times the usual speed; raises SynthesisError."""
        stretch = f"{1 / rate:.3f}"
        if self.program is Program.ESPEAK:
            speed = f"{WORDS_PER_MINUTE * rate:.0f}"
            command = ["espeak-ng", "-v", self.name, "-s", speed, "--stdout", "--", text]
        elif self.program is Program.FLITE:
            command = ["flite", "-voice", self.name, "--setf", f"duration_stretch={stretch}"]
            command += ["-t", text, "-o", "/dev/stdout"]
        else:
            voice = f"(begin (voice_{self.name}) (Parameter.set 'Duration_Stretch {stretch}))"
            command = ["text2wave", "-eval", voice]
        try:
            done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=TIMEOUT_S, check=True)
            return decode_audio(done.stdout, f"{self.program} {self.name}").astype(np.float32) / 32768.0
        except (OSError, subprocess.SubprocessError, CorpusError) as error:
            raise SynthesisError(f"{self.program} {self.name}: {error}") from error


def _printed(command: list[str]) -> list[str]:
    """Lines that a program prints; none if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return []
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return []
    return done.stdout.splitlines()


def program_voices() -> list[ProgramVoice]:
    """Every English voice of the programs that are installed."""
    accents = [line.split()[1] for line in _printed(["espeak-ng", "--voices=en"])[1:] if " mb/" not in line]
    variants = [line.split("!v/")[1].strip() for line in _printed(["espeak-ng", "--voices=variant"])[1:]]
    names = [name for a in dict.fromkeys(accents) for name in (a, *(f"{a}+{v}" for v in variants))]
    voices = [ProgramVoice(Program.ESPEAK, name) for name in names]
    listed = [name for line in _printed(["flite", "-lv"]) for name in line.partition(":")[2].split()]
    voices += [ProgramVoice(Program.FLITE, name) for name in dict.fromkeys(listed) if name != ONLY_THE_TIME]
    for line in _printed(["festival", "-b", LIST_FESTIVAL]):
        name, _, description = line.partition(" ")
        if "english" in description and shutil.which("text2wave"):
            voices.append(ProgramVoice(Program.FESTIVAL, name))
    return voices
