"""How late characters are shown: real recordings, real sockets, real time.

For each character that was read correctly: the moment the client had it, minus the end of that character in a CTC
forced alignment of the reference. Starts a server of its own. Needs recorded speech. Run it as
`python tests/benchmarks/stream_latency.py --data $MOCHA_SPEECH --streams 8`.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from local_server import local_server
from rapidfuzz.distance import Levenshtein

from mocha_client.client import StreamingClient
from mocha_model.recognizer import Recognizer
from mocha_server.engine import model_info
from mocha_server.messages import Text
from mocha_training.data import Corpus, collate, load_corpus
from mocha_training.losses import ctc_boundaries

CHUNK = 1600  # samples; 100 ms


async def shown_at(url: str, audio: bytes) -> list[tuple[str, float, float]]:
    """(character, seconds since the start of the audio when it was received, seconds of its frame)."""
    found: list[tuple[str, float, float]] = []
    async with StreamingClient(url) as client:
        began = time.monotonic()

        async def feed() -> None:
            for number, start in enumerate(range(0, len(audio), 2 * CHUNK), 1):
                await asyncio.sleep(max(0.0, began + number * CHUNK / 16_000 - time.monotonic()))
                await client.send(audio[start : start + 2 * CHUNK])
            await client.finish()

        feeder = asyncio.create_task(feed())
        async for event in client:
            if isinstance(event, Text):
                now = time.monotonic() - began
                found += [(c.text, now, c.time) for c in event.characters]
        await feeder
    return found


def ends_of(recognizer: Recognizer, corpus: Corpus, index: int) -> list[float]:
    """Seconds at which each character of the reference ends, -1 where unknown."""
    batch = collate([corpus.audio(index)], [corpus.utterances[index].text], recognizer.tokenizer)
    with torch.inference_mode():
        memory, length = recognizer.model.encode(*recognizer.model.features(batch.samples, batch.num_samples))
        frames = ctc_boundaries(recognizer.model.ctc_log_probs(memory), length, batch.tokens, batch.num_tokens)
    time_s = model_info(recognizer).time_s
    return [time_s(f) if f >= 0 else -1.0 for f in frames[0].tolist()]


async def measure(url: str, recognizer: Recognizer, corpus: Corpus, streams: int) -> dict[str, list[float]]:
    gate = asyncio.Semaphore(streams)
    late: dict[str, list[float]] = {"shown_after_character_end_ms": [], "shown_after_frame_ms": []}

    async def one(index: int) -> None:
        audio, text = corpus.pcm(index).tobytes(), corpus.utterances[index].text
        async with gate:
            found = await shown_at(url, audio)
        ends = ends_of(recognizer, corpus, index)
        late["shown_after_frame_ms"].extend(1000 * (now - frame) for _, now, frame in found)
        hypothesis = "".join(c for c, _, _ in found)
        for block in Levenshtein.opcodes(hypothesis, text):
            if block.tag == "equal":
                for h, r in zip(
                    range(block.src_start, block.src_end), range(block.dest_start, block.dest_end), strict=True
                ):
                    if ends[r] >= 0 and text[r] != " ":
                        late["shown_after_character_end_ms"].append(1000 * (found[h][1] - ends[r]))

    await asyncio.gather(*(one(i) for i in range(len(corpus.utterances))))
    return late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("MOCHA_SPEECH", str(Path(__file__).parents[3] / "shared" / "speech"))
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--utterances", type=int, default=40)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    if not (arguments.data / "dev.jsonl").is_file():
        sys.exit(f"needs recorded speech: no dev.jsonl in {arguments.data}")
    corpus = load_corpus(arguments.data / "dev.jsonl")
    every = max(1, len(corpus.utterances) // arguments.utterances)
    corpus = corpus.subset(list(range(0, len(corpus.utterances), every)))
    torch.set_num_threads(1)
    recognizer = Recognizer.load(arguments.model)
    with local_server(*(["--model", str(arguments.model)] if arguments.model else [])) as (_, place):
        late = asyncio.run(measure(f"ws://{place}/v1/stream", recognizer, corpus, arguments.streams))
    report = {
        name: {f"p{q}": round(float(np.percentile(values, q)), 1) for q in (50, 90, 99)} | {"characters": len(values)}
        for name, values in late.items()
        if values
    }
    print(json.dumps({"utterances": len(corpus.utterances), "streams": arguments.streams} | report))


if __name__ == "__main__":
    main()
