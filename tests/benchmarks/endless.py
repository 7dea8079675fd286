"""A day of audio through one stream: memory, speed and word errors of each lap around the same recordings.

Faster than real time, over a real socket to a server of its own.
python tests/benchmarks/endless.py --manifest $MOCHA_SPEECH/dev.jsonl --hours 24
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import jiwer
import numpy as np
from endurance import memory_mb
from local_server import local_server

from mocha_client.client import StreamingClient
from mocha_model.tokenizer import normalize_text
from mocha_server.messages import Segment, Text
from mocha_training.data import load_corpus

PIECE_BYTES = 32_000  # a second
PAUSE = np.zeros(16_000, np.int16)  # after each utterance, so that the recogniser ends its segment


class Laps:
    """Notes, at the end of each lap, how the server did in it."""

    def __init__(self, pid: int, audio_s: float, reference: str) -> None:
        self._pid, self._audio_s, self._reference = pid, audio_s, reference
        self._began, self._lap = time.monotonic(), 0
        self._texts: list[str] = []

    def heard(self, event: object) -> None:
        """A segment belongs to the lap in which it begins."""
        if not isinstance(event, Segment):
            return
        while event.start >= (self._lap + 1) * self._audio_s:
            self.note()
        self._texts.append(event.text)

    def note(self) -> None:
        """Print a lap."""
        took, wer = time.monotonic() - self._began, jiwer.wer(self._reference, normalize_text(" ".join(self._texts)))
        self._lap, self._began, self._texts = self._lap + 1, time.monotonic(), []
        done = {"lap": self._lap, "audio_h": round(self._lap * self._audio_s / 3600, 2), "wer": round(100 * wer, 2)}
        print(
            json.dumps({**done, "rtfx": round(self._audio_s / took, 1), "rss_mb": round(memory_mb(self._pid), 1)}),
            flush=True,
        )


async def run(url: str, audio: bytes, laps: int, notes: Laps) -> None:
    async with StreamingClient(url) as client:

        async def feed() -> None:
            for _ in range(laps):
                for start in range(0, len(audio), PIECE_BYTES):
                    await client.send(audio[start : start + PIECE_BYTES])
            await client.finish()

        feeder = asyncio.create_task(feed())
        newest = 0.0
        async for event in client:
            if isinstance(event, Text):
                times = [character.time for character in event.characters]
                assert times[0] >= newest, "a character came twice or out of order"
                newest = times[-1]
            notes.heard(event)
        await feeder
    notes.note()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--every", type=int, default=1, help="use every n-th recording")
    options = parser.parse_args()
    corpus = load_corpus(options.manifest)
    chosen = range(0, len(corpus.utterances), options.every)
    audio = np.concatenate([part for n in chosen for part in ((corpus.audio(n) * 32767).astype(np.int16), PAUSE)])
    audio_s, reference = len(audio) / 16_000, " ".join(corpus.utterances[n].text for n in chosen)
    laps = max(1, round(options.hours * 3600 / audio_s))
    with local_server() as (pid, place):
        asyncio.run(run(f"ws://{place}/v1/stream", audio.tobytes(), laps, Laps(pid, audio_s, reference)))


if __name__ == "__main__":
    main()
