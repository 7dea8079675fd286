"""What must not hurt: 10 minutes of silence or noise, a 30-minute file, vanished clients; memory after each.

python tests/benchmarks/endurance.py
"""

import asyncio
import json
import tempfile
import time
import wave
from pathlib import Path

import httpx
import numpy as np
from local_server import local_server
from websockets.asyncio.client import connect

from mocha_client.client import StreamingClient
from mocha_server.messages import End

CLIP = Path(__file__).parents[1] / "fixtures" / "weather.wav"


def memory_mb(pid: int) -> float:
    """Resident memory of a process (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS")


async def heard(url: str, audio: bytes) -> float:
    async with StreamingClient(url) as client:

        async def feed() -> None:
            for start in range(0, len(audio), 32_000):
                await client.send(audio[start : start + 32_000])
            await client.finish()

        feeder = asyncio.create_task(feed())
        async for event in client:
            if isinstance(event, End):
                await feeder
                return event.duration
    raise RuntimeError("no end")


async def vanish(url: str, audio: bytes) -> None:
    connection = await connect(url)
    await connection.send('{"type":"start"}')
    await connection.send(audio)
    connection.transport.abort()


def long_file(speech: bytes, seconds: int, target: str) -> None:
    """Write `speech` (s16 at 16 kHz) over and over to a wav file."""
    with wave.open(target, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16_000)
        for _ in range(seconds * 32_000 // len(speech)):
            out.writeframes(speech)


def main() -> None:
    with wave.open(str(CLIP)) as file:
        speech = file.readframes(file.getnframes())
    noise = (np.random.default_rng(0).standard_normal(600 * 16_000) * 1500).astype("<i2").tobytes()
    with local_server() as (pid, place):
        http, url = f"http://{place}", f"ws://{place}/v1/stream"

        def note(what: str, began: float, result: object) -> None:
            seconds, rss = round(time.monotonic() - began, 1), round(memory_mb(pid), 1)
            print(json.dumps({"what": what, "took_s": seconds, "result": result, "rss_mb": rss}), flush=True)

        for what, audio in (("one clip", speech), ("10 min silence", bytes(600 * 32_000)), ("10 min noise", noise)):
            began = time.monotonic()
            note(what, began, asyncio.run(heard(url, audio)))
        with tempfile.NamedTemporaryFile(suffix=".wav") as long:
            long_file(speech, 1800, long.name)
            began = time.monotonic()
            with open(long.name, "rb") as upload:
                files = {"file": ("long.wav", upload)}
                response = httpx.post(f"{http}/v1/audio/transcriptions", files=files, timeout=None)
        note("30 min file", began, response.json()["usage"])
        began = time.monotonic()
        for _ in range(50):
            asyncio.run(vanish(url, speech))
        time.sleep(1)
        note("50 vanished clients", began, httpx.get(f"{http}/health").json())


if __name__ == "__main__":
    main()
