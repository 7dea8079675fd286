"""Streams per core and word errors beside pocketsphinx, on the same recordings in the same run.

Both hear pieces of 100 ms, ours in many streams at once that move on together, as live ones do. A core holds as many
streams as it hears seconds of audio in a second of CPU time; that is counted, not the time that passes, so that other
work on the machine matters little. How late the characters come is measured by `mocha-asr bench`.

pip install pocketsphinx; python tests/benchmarks/side_by_side.py --manifest $MOCHA_SPEECH/dev.jsonl
"""

import argparse
import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jiwer
import numpy as np
import torch
from numpy.typing import NDArray
from pocketsphinx import Decoder

from mocha_model.allocator import keep_memory
from mocha_model.emissions import text_of
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import normalize_text
from mocha_server.app import FILES_AT_ONCE
from mocha_server.engine import Engine, Limits
from mocha_server.settings import FILE_BEAM, Settings
from mocha_training.data import load_corpus

PIECE = 1600  # samples; 100 ms


@dataclass(frozen=True)
class Utterance:
    """A recording at 16 kHz and what is said in it."""

    samples: NDArray[np.int16]
    text: str


def load(manifest: Path, every: int) -> list[Utterance]:
    """Every n-th recording of a manifest."""
    corpus = load_corpus(manifest)
    return [
        Utterance((corpus.audio(n) * 32767).astype(np.int16), corpus.utterances[n].text)
        for n in range(0, len(corpus.utterances), every)
    ]


def pocketsphinx(utterances: list[Utterance]) -> tuple[list[str], float]:
    """What it reads with its own model, live, and the CPU seconds it took."""
    decoder = Decoder(loglevel="FATAL")
    began, texts = time.process_time(), []
    for utterance in utterances:
        decoder.start_utt()
        for start in range(0, len(utterance.samples), PIECE):
            decoder.process_raw(utterance.samples[start : start + PIECE].tobytes())
        decoder.end_utt()
        hypothesis = decoder.hyp()
        texts.append(normalize_text(hypothesis.hypstr if hypothesis else ""))
    return texts, time.process_time() - began


async def together(engine: Engine, utterances: list[Utterance], streams: int, piece: int) -> list[str]:
    """`streams` utterances at a time; all hear a piece, then all hear the next one."""
    texts = [""] * len(utterances)
    waiting = list(enumerate(utterances))[::-1]
    active = []
    while waiting or active:
        while waiting and len(active) < streams:
            place, utterance = waiting.pop()
            active.append((place, utterance.samples, engine.open(live=True), 0))
        for _, samples, stream, start in active:
            await stream.write(samples[start : start + piece])
        for _, _, stream, _ in active:
            await stream.settled()
        active = [(place, samples, stream, start + piece) for place, samples, stream, start in active]
        for place, samples, stream, start in active:
            if start >= len(samples):
                stream.finish()
                texts[place] = text_of([emission async for group in stream.events() for emission in group])
        active = [entry for entry in active if entry[3] < len(entry[1])]
    return texts


def ours(utterances: list[Utterance], streams: int, recognizer: Recognizer, live: bool) -> tuple[list[str], float]:
    """What the engine reads, and the CPU seconds it took.

    Live it hears everything several times over, so that all streams are in use for most of the time; of files it hears
    pieces of a second.
    """
    repeats, piece = (math.ceil(4 * streams / len(utterances)), PIECE) if live else (1, 10 * PIECE)
    engine = Engine(recognizer, Limits(capacity=streams))
    engine.start()
    began = time.process_time()
    texts = asyncio.run(together(engine, utterances * repeats, streams, piece))
    took = time.process_time() - began
    engine.stop()
    return texts[: len(utterances)], took / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="use every n-th recording")
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--model", type=Path, help="checkpoint; the bundled one if not given")
    options = parser.parse_args()
    utterances = load(options.manifest, options.every)
    audio_s = sum(len(u.samples) for u in utterances) / 16_000
    print(json.dumps({"utterances": len(utterances), "audio_s": round(audio_s, 1)}), flush=True)
    torch.set_num_threads(1)
    keep_memory()
    references, rates = [u.text for u in utterances], {}
    recognizer, settings = Recognizer.load(options.model), Settings()
    patient = recognizer.searching(settings.live_beam, patience_s=settings.live_patience_ms / 1000)
    for_files = recognizer.searching(FILE_BEAM)
    ways: dict[str, Callable[[], tuple[list[str], float]]] = {
        "mocha-asr": lambda: ours(utterances, options.streams, recognizer, live=True),
        "mocha-asr, with patience": lambda: ours(utterances, options.streams, patient, live=True),
        "mocha-asr, as it reads files": lambda: ours(utterances, FILES_AT_ONCE, for_files, live=False),
        "pocketsphinx": lambda: pocketsphinx(utterances),
    }
    for name, read in ways.items():
        texts, cpu_s = read()
        rates[name] = audio_s / cpu_s
        errors = {
            "wer": round(100 * jiwer.wer(references, texts), 2),
            "cer": round(100 * jiwer.cer(references, texts), 2),
        }
        print(json.dumps({"what": name, "streams_per_core": round(rates[name], 1), **errors}), flush=True)
    times = {name: round(rate / rates["pocketsphinx"], 1) for name, rate in rates.items()}
    print(json.dumps({"times_as_many": times}))


if __name__ == "__main__":
    main()
