"""A server process of our own on a free port, for benchmarks."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def local_server(*options: str) -> Iterator[tuple[int, str]]:
    """Start `mocha-asr serve` with `options`; gives (process id, host:port) once it answers, stops it afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("mocha-asr")), "serve", "--port", str(port), *options]
    process = subprocess.Popen(command)
    try:
        for _ in range(600):
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:  # not there yet, or not ready to answer
                time.sleep(0.1)
        yield process.pid, f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
