"""Made-up recordings, and the training commands as a user types them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

from mocha_model.config import tiny
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import cli, losses
from mocha_training.augment import Augmenter
from mocha_training.data import Batch, Corpus
from mocha_training.recipes import plain
from mocha_training.trainer import Trainer

FIXTURES = Path(__file__).parents[1] / "fixtures"
TEXTS = {"weather": "The weather is fine today.", "suit": "She had your dark suit"}

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


def make_trainer(corpus: Corpus, directory: Path, **changes: object) -> Trainer:
    tokenizer = Tokenizer.from_texts(u.text for u in corpus.utterances)
    torch.manual_seed(0)
    config = plain().model_copy(update={"batch_seconds": 8.0, "save_every": 10_000, "warmup_steps": 5} | changes)
    augmenter = Augmenter(config.augment, corpus)
    return Trainer(config, SpeechModel(tiny(tokenizer.vocab_size)), tokenizer, augmenter, None, directory)


def path_parts(trainer: Trainer, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory, its lengths, CTC log-probabilities and the frames of the tokens, as the trainer has them."""
    with torch.no_grad():
        memory, num_memory = trainer.model.encode(*trainer.model.features(batch.samples, batch.num_samples))
        log_probs = trainer.model.ctc_log_probs(memory)
    ends = losses.ctc_boundaries(log_probs, num_memory, batch.tokens, batch.num_tokens)
    return memory, num_memory, log_probs, ends
