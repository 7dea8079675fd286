"""Twenty real recordings through every way in: identical text and frames, alone and in company."""

import asyncio
import io
import json
import random
import wave
from operator import add
from typing import Any

import httpx
import jiwer
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from mocha_model.emissions import Emission, text_of
from mocha_model.recognizer import Recognizer
from mocha_training.data import Corpus
from mocha_training.evaluate import transcribe_corpus

NUM_UTTERANCES = 20
Frames = list[tuple[str, int]]


async def stream(url: str, data: bytes, sizes: Any) -> Frames:
    found: Frames = []
    async with connect(url, max_size=None) as socket:
        await socket.send('{"type":"start"}')

        async def feed() -> None:
            at = 0
            while at < len(data):
                size = sizes()
                await socket.send(data[at : at + size])
                at += size
            await socket.send('{"type":"finish"}')

        feeder = asyncio.create_task(feed())
        async for message in socket:
            event = json.loads(message)
            if event["type"] == "text":
                found += [(c["text"], c["frame"]) for c in event["characters"]]
        await feeder
    return found


def wav_file(samples: NDArray[np.int16]) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(samples.tobytes())
    return out.getvalue()


@pytest.fixture(scope="module")
def recordings(recorded: Corpus) -> Corpus:
    count = len(recorded.utterances)
    return recorded.subset(list(range(0, count, count // NUM_UTTERANCES)))


@torch.inference_mode()
def read_together(recognizer: Recognizer, recordings: list[torch.Tensor]) -> list[list[Emission]]:
    """What each gives, in batches of like length: several times as fast as one by one."""
    found: dict[int, list[Emission]] = {}
    order = sorted(range(len(recordings)), key=lambda i: len(recordings[i]))
    for rows in (order[start : start + 20] for start in range(0, len(order), 20)):
        samples = torch.nn.utils.rnn.pad_sequence([recordings[i] for i in rows], batch_first=True)
        lengths = torch.tensor([len(recordings[i]) for i in rows])
        first, state = recognizer.step(samples, lengths, recognizer.init_state(len(rows)))
        rest, _ = recognizer.flush(state, torch.ones(len(rows), dtype=torch.bool))
        found |= {i: a + b for i, a, b in zip(rows, first, rest, strict=True)}
    return [found[i] for i in range(len(recordings))]


@torch.inference_mode()
def read_in_pieces(recognizer: Recognizer, recordings: list[torch.Tensor], rng: random.Random) -> list[list[Emission]]:
    """The same of all recordings at once, each cut where chance has it, until all have ended."""
    found: list[list[Emission]] = [[] for _ in recordings]
    starts, state = [0] * len(recordings), recognizer.init_state(len(recordings))
    while any(start < len(samples) for start, samples in zip(starts, recordings, strict=True)):
        cuts = [s[at : at + rng.randint(0, 20_000)] for at, s in zip(starts, recordings, strict=True)]
        sizes = list(map(len, cuts))
        samples = torch.nn.utils.rnn.pad_sequence(cuts, batch_first=True, padding_value=0.5)
        new, state = recognizer.step(samples, torch.tensor(sizes), state)
        found, starts = list(map(add, found, new)), list(map(add, starts, sizes))
    rest, _ = recognizer.flush(state, torch.ones(len(recordings), dtype=torch.bool))
    return list(map(add, found, rest))


async def test_every_way_in_gives_the_same_text_and_frames(server: Any, bundled: Recognizer, recordings: Corpus):
    results, _ = transcribe_corpus(bundled.model, bundled.tokenizer, recordings)
    evaluated = {r.key: r.hypothesis for r in results}
    rng, everything = random.Random(0), []
    for index, utterance in enumerate(recordings.utterances):
        data = recordings.pcm(index).tobytes()
        emissions = bundled.transcribe(torch.from_numpy(recordings.audio(index)))
        expected = [(e.text, e.frame) for e in emissions if not e.end_of_segment]
        assert evaluated[utterance.key] == text_of(emissions)
        assert await stream(server.url, data, lambda: 1_000_000) == expected, utterance.key
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{server.http}/v1/audio/transcriptions"
            response = await client.post(url, files={"file": ("a.wav", wav_file(recordings.pcm(index)))})
        assert response.json()["text"] == text_of(emissions)
        everything.append((data, expected))
    cuts = (lambda: 320, lambda: 1184, lambda: rng.randint(1, 20_000))
    several = [(*each, sizes) for each in everything for sizes in cuts]
    rng.shuffle(several)
    for start in range(0, len(several), 20):  # each in the company of nineteen others
        group = several[start : start + 20]
        found = await asyncio.gather(*(stream(server.url, data, sizes) for data, _, sizes in group))
        assert found == [expected for _, expected, _ in group]


def test_patience_bounds_every_wait_in_any_chunking_and_makes_fewer_errors(bundled: Recognizer, recordings: Corpus):
    patient = bundled.searching(8, patience_s=0.8)
    longest = int(0.8 * patient.sample_rate) // patient.frame_samples
    speech = [torch.from_numpy(recordings.audio(index)) for index in range(len(recordings.utterances))]
    read = {"greedy": read_together(bundled, speech), "patient": read_together(patient, speech)}
    for piecemeal, whole in zip(read_in_pieces(patient, speech, random.Random(2)), read["patient"], strict=True):
        cut, uncut = ([(e.text, e.frame, e.certain) for e in emissions] for emissions in (piecemeal, whole))
        assert cut == uncut
        assert all(e.certain - e.frame <= longest for e in whole if e.certain is not None and not e.end_of_segment)
    references = [u.text for u in recordings.utterances]
    errors = {name: jiwer.wer(references, list(map(text_of, rows))) for name, rows in read.items()}
    assert errors["patient"] < errors["greedy"]


def test_speech_between_pauses_is_read_nearly_as_well_as_without(bundled: Recognizer, recorded: Corpus):
    patient, pause = bundled.searching(64, patience_s=0.8), torch.zeros(5 * bundled.sample_rate)
    speech = [torch.from_numpy(recorded.audio(index)) for index in range(len(recorded.utterances))]
    alone = read_together(patient, speech)
    between = read_together(patient, [torch.cat([pause, samples, pause]) for samples in speech])
    references = [u.text for u in recorded.utterances]
    errors = [jiwer.wer(references, list(map(text_of, rows))) for rows in (alone, between)]
    assert errors[1] <= errors[0] + 0.04
