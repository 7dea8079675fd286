"""Several processes on one port, as an operator starts them."""

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from mocha_client.bench.processes import servers
from mocha_client.client import StreamingClient
from mocha_server.messages import End, Segment

GREEDY = {"MOCHA_LIVE_BEAM": "0", "MOCHA_FILE_BEAM": "0"}  # which begin sooner
ESTABLISHED = "01"  # in /proc/net/tcp
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`serve --workers 2`, for greedy live text alone where a test asks for `GREEDY` ones, and its port."""
    settings = {"MOCHA_MAX_LAG_MS": "600000"} | getattr(request, "param", {})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("mocha-asr")), "serve", "--port", str(port), "--workers", "2"]
    process = subprocess.Popen(command, env=os.environ | settings)
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


def connections(pid: int, port: int) -> int:
    """TCP connections to `port` that a process has accepted."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED}
    return sum(os.readlink(file) in ours for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink())


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

    workers = set(servers(port)) - {process.pid}
    assert len(workers) == 2
    victim = workers.pop()
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(set(servers(port)) - {process.pid, victim}) == 2)
    assert set(await asyncio.gather(*(heard(port, clip.tobytes()) for _ in range(6)))) == {alone}

    process.terminate()
    assert process.wait(30) == 0
    until(lambda: not servers(port))


@pytest.mark.parametrize("place", [GREEDY], indirect=True, ids=["greedy"])
async def test_a_connection_goes_to_the_worker_with_the_fewest_and_a_file_is_told_of_the_end(
    place: tuple[subprocess.Popen[bytes], int],
):
    process, port = place
    url = f"ws://127.0.0.1:{port}/v1/stream"
    one, other = set(servers(port)) - {process.pid}

    def held() -> tuple[int, int]:
        return connections(one, port), connections(other, port)

    with ExitStack() as probes:

        def both_accept() -> bool:
            probes.enter_context(socket.create_connection(("127.0.0.1", port)))
            return min(held()) > 0

        until(both_accept)
    until(lambda: sum(held()) == 0)
    async with AsyncExitStack() as stack:
        for _ in range(6):
            await stack.enter_async_context(StreamingClient(url))
        assert held() == (3, 3)
        async with AsyncExitStack() as more:
            clients = [await more.enter_async_context(StreamingClient(url)) for _ in range(6)]
            before = held()
            for client in clients[::2]:  # handed over in turn: these are one worker's
                await client.__aexit__(None, None, None)
            await asyncio.to_thread(until, lambda: sum(held()) == 9)
            assert before == (6, 6)
            assert sorted(held()) == [3, 6]
            for _ in range(3):
                await more.enter_async_context(StreamingClient(url))
            assert held() == (6, 6)
    until(lambda: streams(port) == 0)
    await a_file_is_told_of_the_end(process, port)


async def a_file_is_told_of_the_end(process: subprocess.Popen[bytes], port: int) -> None:
    """Whose file is being read when the server ends has an answer."""
    hour = io.BytesIO()
    with wave.open(hour, "wb") as file:
        file.setparams((1, 2, 8_000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 8_000 * 3600))
    where = f"http://127.0.0.1:{port}/v1/audio/transcriptions"
    async with httpx.AsyncClient(timeout=60) as client:
        asking = asyncio.create_task(client.post(where, files={"file": ("hour.wav", hour)}))
        await asyncio.to_thread(until, lambda: streams(port) == 1)
        process.terminate()
        answer = await asking
    assert answer.status_code == 503 and "the server stops" in answer.text


def test_workers_of_which_none_can_begin_are_not_started_again_for_ever():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = "from mocha_server.workers import Workers; import socket, sys; "
    program += f"Workers(2, socket.create_server(('127.0.0.1', {port})), lambda place, handed: sys.exit(3)).run()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "none has served yet" in done.stderr


ORPHANS = """
import ctypes, os, socket, time
from mocha_server.workers import Workers

def serve(place, handed):
    if os.fork() == 0:
        while os.getppid() != first:
            time.sleep(0.01)
        print(os.getpid(), flush=True)

first = os.getpid()
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
Workers(1, socket.create_server(("127.0.0.1", 0)), serve).run()
"""


def test_the_first_process_of_a_container_reaps_what_dead_workers_leave():
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        assert first.stdout
        orphan = int(first.stdout.readline())
        until(lambda: not Path(f"/proc/{orphan}").exists())
        first.kill()


@pytest.mark.parametrize("place", [GREEDY], indirect=True, ids=["greedy"])
def test_workers_end_with_the_process_that_started_them(place: tuple[subprocess.Popen[bytes], int]):
    process, port = place
    workers = set(servers(port)) - {process.pid}
    process.kill()
    process.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    assert not answers(port)
