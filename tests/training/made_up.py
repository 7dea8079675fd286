"""Made-up recordings, and the training commands as a user types them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

from mocha_training import cli

needs_voice = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="phones are what espeak-ng says")

app = typer.Typer()
for command in (cli.prepare, cli.train, cli.evaluate, cli.average, cli.calibrate, cli.report, cli.align):
    app.command()(command)
for command in (cli.synthesize, cli.train_lm):
    app.command()(command)


def said(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    return done.exit_code, " ".join(done.output.split())


def run(*arguments: object) -> str:
    status, output = said(*arguments)
    assert status == 0, output
    return output


def tones(symbols: list[str], samples_each: int) -> NDArray[np.int16]:
    """A tone of its own for each symbol, one after another."""
    time = np.arange(samples_each) / 16_000
    pitches = [200 + 97 * (sum(map(ord, s)) % 61) for s in symbols]
    return np.concatenate([(8000 * np.sin(2 * np.pi * f * time)).astype(np.int16) for f in pitches])


def write_sphere(path: Path, samples: NDArray[np.int16]) -> None:
    """A NIST SPHERE file, which is what TIMIT's .WAV files are."""
    fields = {
        "sample_count": len(samples),
        "sample_n_bytes": 2,
        "channel_count": 1,
        "sample_rate": 16_000,
        "sample_byte_format": "01",
        "sample_sig_bits": 16,
        "sample_coding": "pcm",
    }
    lines = [f"{k} -s{len(v)} {v}" if isinstance(v, str) else f"{k} -i {v}" for k, v in fields.items()]
    header = "\n".join(["NIST_1A", "   1024", *lines, "end_head", ""])
    path.write_bytes(header.encode().ljust(1024) + samples.tobytes())
