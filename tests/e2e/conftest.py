"""What every client is compared with: the native protocol's text of the same audio, from the same server.

And how its exchange with the server once went: tests/fixtures/exchanges.
"""

import io
import json
import os
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.chromium import Opener, pages
from tests.exchanges import Exchange, course, read
from websockets.sync.client import connect

FIXTURES = Path(__file__).parents[1] / "fixtures"
RATE = 16_000


@pytest.fixture
async def open_page(lively_server: Any) -> AsyncIterator[Opener]:
    """Opens the page in Chromium."""
    async with pages(lively_server) as opened:
        yield opened


@dataclass(frozen=True)
class Clip:
    """Audio as clients want it, 16-bit mono at 16 kHz."""

    samples: NDArray[np.int16]

    @property
    def pcm(self) -> bytes:
        return self.samples.tobytes()

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE

    @property
    def wav(self) -> bytes:
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(self.pcm)
        return out.getvalue()

    def pieces(self, size: int = 8_000) -> list[bytes]:
        return [self.pcm[at : at + size] for at in range(0, len(self.pcm), size)]


@dataclass(frozen=True)
class Heard:
    """What the native protocol says."""

    text: str
    segments: list[dict[str, Any]]

    @property
    def words(self) -> list[dict[str, Any]]:
        return [word for segment in self.segments for word in segment["words"]]


def native(url: str, pcm: bytes, **start: Any) -> Heard:
    with connect(url) as socket:
        socket.send(json.dumps({"type": "start", **start}))
        for at in range(0, len(pcm), 8_000):
            socket.send(pcm[at : at + 8_000])
        socket.send('{"type":"finish"}')
        said = [json.loads(message) for message in socket]
    assert said[-1]["type"] == "end"
    segments = [m for m in said if m["type"] == "segment"]
    return Heard(" ".join(s["text"] for s in segments), segments)


def _samples(name: str) -> NDArray[np.int16]:
    with wave.open(str(FIXTURES / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16)


@pytest.fixture(scope="session")
def speech() -> Clip:
    """Two synthesized sentences with a pause between them, so that there is more than one segment."""
    pause = np.zeros(2 * RATE, np.int16)
    return Clip(np.concatenate([_samples("weather.wav"), pause, _samples("suit.wav")]))


@pytest.fixture(scope="session", params=["server", "lively_server"], ids=["bundled", "lively"])
def any_server(request: pytest.FixtureRequest) -> Any:
    """A server with the bundled model, and one with a small model that emits at random."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def heard() -> Callable[..., Heard]:
    """The native protocol's result for a server and audio."""
    known: dict[tuple[str, int, str], Heard] = {}

    def ask(server: Any, pcm: bytes, **start: Any) -> Heard:
        key = (server.url, hash(pcm), str(start))
        if key not in known:
            known[key] = native(server.url, pcm, **start)
        return known[key]

    return ask


@contextmanager
def exchange(name: str, server: Any) -> Iterator[Exchange]:
    """What a client says to `server` within goes as in the recorded exchange of that name.

    MOCHA_WRITE_EXCHANGES=1 in the environment records it anew instead. Only the bundled model's exchanges are.
    """
    bundled = server.app.state.live.greedy.info.name != "lively"
    path = FIXTURES / "exchanges" / f"{name}.jsonl"
    server.recorder.exchange = found = Exchange()
    try:
        yield found
    finally:
        server.recorder.exchange = None
    found.wait()
    if bundled and os.environ.get("MOCHA_WRITE_EXCHANGES") == "1":
        found.write(path)
    if bundled:
        assert course(found.lines) == course(read(path))
