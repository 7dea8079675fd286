"""Several processes on one port, as an operator starts them."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from mocha_client.bench.processes import listeners
from mocha_client.client import StreamingClient
from mocha_server.messages import End, Segment

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def place() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`serve --workers 2` and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("mocha-asr")), "serve", "--port", str(port), "--workers", "2"]
    process = subprocess.Popen(command, env=os.environ | {"MOCHA_MAX_LAG_MS": "600000"})
    until(lambda: answers(port))
    yield process, port
    process.terminate()
    process.wait()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


def streams(port: int) -> int:
    return int(httpx.get(f"http://127.0.0.1:{port}/health").json()["streams"])


async def heard(port: int, audio: bytes) -> str:
    async with StreamingClient(f"ws://127.0.0.1:{port}/v1/stream") as client:
        await client.send(audio)
        await client.finish()
        events = [event async for event in client]
    assert isinstance(events[-1], End)
    return " ".join(event.text for event in events if isinstance(event, Segment))


async def test_workers_share_port_and_capacity_and_are_replaced(
    place: tuple[subprocess.Popen[bytes], int], clip: NDArray[np.int16]
):
    process, port = place
    alone = await heard(port, clip.tobytes())
    assert set(await asyncio.gather(*(heard(port, clip.tobytes()) for _ in range(12)))) == {alone}
    async with StreamingClient(f"ws://127.0.0.1:{port}/v1/stream"):
        seen = {await asyncio.to_thread(streams, port) for _ in range(12)}
    assert seen == {1}  # whichever process answers

    workers = set(listeners(port)) - {process.pid}
    assert len(workers) == 2
    victim = workers.pop()
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(set(listeners(port)) - {process.pid, victim}) == 2)
    assert set(await asyncio.gather(*(heard(port, clip.tobytes()) for _ in range(6)))) == {alone}

    process.terminate()
    assert process.wait(30) == 0
    until(lambda: not listeners(port))
