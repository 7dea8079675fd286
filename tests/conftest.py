"""Fixtures for all tests: synthesized clips, a recogniser that emits plenty, and a real server on a free port."""

import asyncio
import json
import os
import socket
import threading
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mocha_model.config import ModelConfig, tiny
from mocha_model.encoder import LSTMLayer
from mocha_model.model import SpeechModel
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer
from mocha_server import serving
from mocha_server.app import create_app
from mocha_server.settings import Settings
from mocha_training.data import Corpus, load_corpus
from tests.exchanges import Recorder

torch.set_num_threads(1)  # the models here are small; more threads only fight each other

FIXTURES = Path(__file__).parent / "fixtures"
NUM_RECORDED = 60  # 20 have 229 words: read 0.9 points better between pauses by one model, 5.7 worse by another


def read_wav(path: Path) -> NDArray[np.int16]:
    with wave.open(str(path)) as file:
        assert file.getframerate() == 16_000 and file.getnchannels() == 1
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


@pytest.fixture(scope="session")
def clip() -> NDArray[np.int16]:
    """About four seconds of synthesized speech, int16 at 16 kHz."""
    return read_wav(FIXTURES / "weather.wav")


def lively_recognizer(config: ModelConfig | None = None) -> Recognizer:
    """A small untrained model whose attention fires often, at irregular frames, with all kinds of layers."""
    torch.manual_seed(1)
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz"])
    model = SpeechModel(config or tiny(tokenizer.vocab_size)).train()
    with torch.no_grad():
        layers = [layer for layer in model.encoder.stack if isinstance(layer, LSTMLayer)]
        for weight in (
            model.decoder.attention.energies.memory_projection.weight,
            model.decoder.output.weight,
            *([layers[0].projection.weight] if layers[0].projection else [n.lstm.weight_ih_l0 for n in layers]),
        ):
            weight.mul_(8)
        for ahead in model.encoder.look_ahead:
            torch.nn.init.normal_(ahead.later.weight, std=0.5)  # which begins with 0
        if layers[0].projection is None:  # nor batch norm
            raw, _ = model.features.raw(torch.randn(1, 30_000) * 0.1, torch.tensor([30_000]))
            model.features.set_normalization(raw[0].mean(0), raw[0].std(0) * 3)
        for _ in range(30):  # batch norm statistics
            samples = torch.randn(4, 30_000) * 0.1 * torch.linspace(0, 1, 30_000)
            memory, _ = model.encode(*model.features(samples, torch.tensor([30_000, 20_000, 30_000, 25_000])))
        energies = model.eval().decoder.attention.energies
        if energies.kind == "additive":
            energies.direction.mul_(6 / energies.direction.norm(dim=1, keepdim=True))
        else:
            energies.gain.fill_(6.0)
        nothing = torch.zeros(4, model.decoder.cell.hidden_size)
        e = energies(nothing, energies.memory_projection(memory), energies.directions())[..., 0]
        if energies.kind != "additive":
            energies.bias[0] -= e.quantile(0.75)
    return Recognizer(model, tokenizer, {"name": "lively"})


def sound(count: int) -> torch.Tensor:
    """Samples [count] of noise that comes and goes."""
    noise = torch.randn(count, generator=torch.Generator().manual_seed(3)) * 0.1
    return noise * (torch.arange(count) / 5000).sin().abs()


@pytest.fixture(scope="session")
def lively() -> Recognizer:
    return lively_recognizer()


@pytest.fixture(scope="session")
def bundled() -> Recognizer:
    return Recognizer.load()


class Server:
    """A real uvicorn on a free port in a thread of its own."""

    def __init__(self, recognizer: Recognizer, **settings: object) -> None:
        # A slow machine refuses nobody, and has few shapes of steps to prepare for; all are read greedily.
        given = {"max_lag_ms": 600_000, "max_streams": 32, "file_beam": 0, "live_beam": 0} | settings
        self.key = settings.get("api_key")
        self.app = create_app(Settings(**given), recognizer)  # type: ignore[arg-type]
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.recorder = Recorder(self.app)
        self._server = serving.server(self.recorder)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/stream"

    @property
    def num_streams(self) -> int:
        return sum(engine.num_streams for engine in self.app.state.live)

    async def streams_left(self, expected: int = 0) -> int:
        """Streams once there are `expected`, or after 10 seconds: a client sees its end before the server does."""
        for _ in range(1000):
            if self.num_streams == expected:
                break
            await asyncio.sleep(0.01)
        return self.num_streams

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="session")
def server(bundled: Recognizer) -> Iterator[Server]:
    running = Server(bundled, max_streams=64, idle_s=5, wyoming_port=0)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def lively_server(lively: Recognizer) -> Iterator[Server]:
    running = Server(lively, max_streams=64, wyoming_port=0)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def speech_directory() -> Path:
    """Real recorded speech; tests that need it skip plainly where there is none."""
    path = Path(os.environ.get("MOCHA_SPEECH", Path(__file__).parents[2] / "shared" / "speech"))
    if not (path / "dev.jsonl").is_file():
        pytest.skip(f"needs recorded speech: no dev.jsonl in {path} (set MOCHA_SPEECH)")
    return path


@pytest.fixture(scope="session")
def keyed_server(lively: Recognizer) -> Iterator[Server]:
    """One that wants a key, and lets pages of https://app.example in."""
    running = Server(lively, api_key="s3cret-k.e~y", allow_origins="https://app.example/, https://other.example")
    yield running
    running.stop()


@pytest.fixture(scope="session")
def recorded(speech_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Sixty recordings of the dev split, spread over all of it; the others are not decoded."""
    lines = (speech_directory / "dev.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // NUM_RECORDED][:NUM_RECORDED]]
    directory = tmp_path_factory.mktemp("recorded")
    within = [row | {"shard": str(speech_directory / row["shard"])} for row in rows]
    (directory / "dev.jsonl").write_text("\n".join(map(json.dumps, within)))
    return load_corpus(directory / "dev.jsonl", directory)


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """Servers with settings of their own, stopped after the test."""
    running: list[Server] = []

    def make(recognizer: Recognizer, **settings: object) -> Server:
        running.append(Server(recognizer, **settings))
        return running[-1]

    yield make
    for server in running:
        server.stop()
