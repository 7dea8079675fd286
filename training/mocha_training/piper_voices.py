"""Voices of Piper (VITS, Kim et al. 2021), of which there are some hundreds in English; some networks have many.

A directory has networks, each ``NAME.onnx`` with ``NAME.onnx.json`` beside it, as Piper's voices are published. The
package piper-tts runs them; its licence is the GPL, so of our extras only `test` has it. How long a sound is, and
how it sounds, Piper draws anew each time. Knows nothing of sentences.
"""

import json
import threading
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from mocha_training.distortion import Audio
from mocha_training.neural_voices import at_16_khz, opened
from mocha_training.voices import Program, SynthesisError


class PiperNetwork:
    """A network of Piper and what is written beside it. Threads may share it."""

    def __init__(self, path: Path) -> None:
        """Raises SynthesisError where what is beside `path` does not describe a voice."""
        self.path, self._loading, described = path, threading.Lock(), path.with_name(f"{path.name}.json")
        try:
            self.config: dict[str, Any] = json.loads(described.read_text(encoding="utf-8"))
            self.english = self.config["espeak"]["voice"].startswith("en")
            self.speakers = {number: name for name, number in self.config.get("speaker_id_map", {}).items()} or {0: ""}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SynthesisError(f"{described}: does not describe a voice of Piper ({error!r})") from error

    def voice(self) -> Any:
        """What piper-tts makes of it; raises SynthesisError where that fails."""
        with self._loading:
            return self._voice

    @cached_property
    def _voice(self) -> Any:
        from piper import PiperConfig, PiperVoice

        session = opened(self.path)
        try:
            return PiperVoice(session=session, config=PiperConfig.from_dict(self.config))
        except Exception as error:  # of no type that the packages make public
            raise SynthesisError(f"{self.path}: no voice that Piper can run ({error})") from error


@dataclass(frozen=True)
class PiperVoiceOf:
    """A speaker of `network`."""

    network: PiperNetwork = field(repr=False, compare=False)
    name: str
    speaker: int = 0
    program: Program = Program.PIPER

    def speak(self, text: str, rate: float) -> Audio:
        """Samples [N] float32 at 16 kHz of `text` at `rate` times the usual speed; raises SynthesisError."""
        from piper import SynthesisConfig

        voice = self.network.voice()
        wanted = SynthesisConfig(speaker_id=self.speaker, length_scale=voice.config.length_scale / rate)
        try:
            parts = [part.audio_float_array for part in voice.synthesize(text, wanted)]
        except Exception as error:  # of no type that the packages make public
            raise SynthesisError(f"piper {self.name}: {error}") from error
        return at_16_khz(np.concatenate([*parts, np.zeros(0, np.float32)]), voice.config.sample_rate)


def piper_voices(directory: Path) -> list[PiperVoiceOf]:
    """Every speaker of every English network in `directory` and what is in it; SynthesisError where there is none."""
    if not (find_spec("piper") and find_spec("onnxruntime")):
        raise SynthesisError("voices of Piper need the package piper-tts")
    networks = [PiperNetwork(path) for path in sorted(directory.rglob("*.onnx"))]
    english = [network for network in networks if network.english]
    if not english:
        raise SynthesisError(f"{directory} has no English voice of Piper: NAME.onnx with NAME.onnx.json beside it")
    return [
        PiperVoiceOf(network, f"{network.path.stem} {speaker}".strip(), number)
        for network in english
        for number, speaker in sorted(network.speakers.items())
    ]
