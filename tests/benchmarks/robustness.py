"""Word errors where speech is not as in a good recording: noise, lines, codecs, rooms, levels, tempo, length.

The dev split is read online, greedily, with patience and as files are: with recorded noises at falling signal-to-noise
ratios; through a telephone (8 kHz, mu-law) and codecs at their lowest rates; in rooms; overloaded, softer, duller and
brighter; slower, faster, lower, higher; between pauses; and as recordings of growing length, made of utterances of one
corpus one after another. And what is read where nothing is said. Needs recorded speech, and two hours of one core,
divided by `--every` and by how many cores there are. Run it as `python tests/benchmarks/robustness.py --data
$MOCHA_SPEECH` (writes docs/training/robustness.json and .png).
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
import torchaudio.functional as audio_functional
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mocha_model.checkpoint import Checkpoint, load_checkpoint
from mocha_model.config import SAMPLE_RATE
from mocha_model.joint import JointConfig
from mocha_model.recognizer import joint_search, live_joint
from mocha_training.data import Corpus, load_corpus
from mocha_training.distortion import (
    NUM_ROOMS,
    add_noise,
    change_speed,
    change_tempo,
    overload,
    repeated,
    reverberate,
    room_response,
    through_codec,
)
from mocha_training.evaluate import Beam, evaluate_corpus
from mocha_training.manifests import Utterance

matplotlib.use("Agg")
from matplotlib.figure import Figure

Audio = NDArray[np.float32]
SNRS_DB = (20, 10, 5, 0)
LIVE_WIDTH, LIVE_PATIENCE_S = 64, 0.8  # prefixes of live text with patience, and how long it waits
LENGTHS_S = (0, 10, 30, 60, 120, 300)  # at least; 0 for the utterances themselves
PAUSE_S = 0.4
TELEPHONE_HZ = 8_000
LONG_PAUSE_S = 5  # before and after each recording
NOISE_FLOOR_DB = -30  # of pauses that are not silent, beside the recording
NOTHING_SAID_S = 20
DISTORTIONS: dict[str, Callable[[Audio], Audio]] = {
    "Opus, 6 kbit/s": lambda audio: through_codec(audio, "opus", 6_000),
    "AMR, 4.75 kbit/s": lambda audio: through_codec(audio, "amr", 4_750),
    "overloaded, 5 %": lambda audio: overload(audio, 0.05),
    "softer by 20 dB": lambda audio: audio * np.float32(0.1),
    "softer by 30 dB": lambda audio: audio * np.float32(10**-1.5),
    "duller, 6 dB per octave": lambda audio: tilted(audio, -6),
    "brighter, 6 dB per octave": lambda audio: tilted(audio, 6),
    "tempo 0.8": lambda audio: change_tempo(audio, 0.8),
    "tempo 1.25": lambda audio: change_tempo(audio, 1.25),
    "pitch 0.85": lambda audio: change_tempo(change_speed(audio, 0.85), 1 / 0.85),
    "pitch 1.15": lambda audio: change_tempo(change_speed(audio, 1.15), 1 / 1.15),
}


def changed(corpus: Corpus, change: Callable[[Audio], Audio]) -> Corpus:
    """The corpus with every recording passed through `change`."""
    files = tuple(
        (np.clip(change(corpus.audio(index)), -1, 1) * 32767).astype(np.int16)
        for index in range(len(corpus.utterances))
    )
    rows = tuple(
        replace(u, offset=0, num_samples=len(file), file=n)
        for n, (u, file) in enumerate(zip(corpus.utterances, files, strict=True))
    )
    return Corpus(rows, files)


def in_rooms(corpus: Corpus) -> Corpus:
    """Every recording in a room, none of them one of training's."""
    numbers = iter(range(NUM_ROOMS, NUM_ROOMS + len(corpus.utterances)))
    return changed(corpus, lambda audio: reverberate(audio, room_response(next(numbers))))


def noisy(corpus: Corpus, noises: Corpus, snr_db: float) -> Corpus:
    """Recorded noises at `snr_db`, the same ones for the same seed."""
    rng = np.random.default_rng(0)
    usable = [i for i, u in enumerate(noises.utterances) if u.num_samples > SAMPLE_RATE]

    def change(audio: Audio) -> Audio:
        return add_noise(audio, noises.audio(usable[rng.integers(len(usable))]), snr_db, rng)

    return changed(corpus, change)


def between_pauses(corpus: Corpus, noises: Corpus | None) -> Corpus:
    """Every recording after and before a pause, in which there are soft `noises`, or nothing."""
    rng = np.random.default_rng(0)
    pause = np.zeros(LONG_PAUSE_S * SAMPLE_RATE, np.float32)

    def change(audio: Audio) -> Audio:
        whole = np.concatenate([pause, audio, pause])
        if noises is None:
            return whole
        noise = noises.audio(int(rng.integers(len(noises.utterances))))
        level = float(np.sqrt(np.mean(audio**2))) * 10 ** (NOISE_FLOOR_DB / 20)
        return whole + repeated(noise, len(whole), level, rng)

    return changed(corpus, change)


def nothing_said(noises: Corpus) -> dict[str, Callable[[], Corpus]]:
    """Recordings in which nobody says anything."""
    rng, length = np.random.default_rng(0), NOTHING_SAID_S * SAMPLE_RATE

    def recorded() -> Corpus:
        noise = np.concatenate(noises.files)
        return unsaid([noise[start : start + length] for start in range(0, len(noise) - length + 1, length)])

    return {
        "silence": lambda: unsaid([np.zeros(length)]),
        "white noise": lambda: unsaid([rng.standard_normal(length) * 10**e for e in np.linspace(0, 3.5, 8)]),
        "recorded noises": recorded,
        "chords": lambda: unsaid([8_000 * chords(rng) for _ in range(8)]),
    }


def chords(rng: np.random.Generator) -> NDArray[np.float64]:
    """Forty chords of four tones that die away, two in a second; not those that training adds."""
    time = np.arange(NOTHING_SAID_S * SAMPLE_RATE // 40) / SAMPLE_RATE
    roots = 220 * 2 ** (rng.integers(0, 24, 40) / 12)
    tones = np.sin(2 * np.pi * roots[:, None, None] * np.array([1, 1.25, 1.5, 2])[:, None] * time).sum(1)
    played: NDArray[np.float64] = (tones * np.exp(-3 * time)).ravel() / 4
    return played


def unsaid(recordings: Sequence[NDArray[Any]]) -> Corpus:
    """Recordings of 16 bits without a word, as a corpus."""
    files = tuple(r.clip(-32768, 32767).astype(np.int16) for r in recordings)
    return Corpus(tuple(Utterance(str(n), "", "", "none", 0, len(f), n) for n, f in enumerate(files)), files)


def telephone(audio: Audio) -> Audio:
    """8 kHz, mu-law of 8 bits, and back."""
    narrow = audio_functional.resample(torch.from_numpy(audio), SAMPLE_RATE, TELEPHONE_HZ)
    coded = audio_functional.mu_law_decoding(audio_functional.mu_law_encoding(narrow, 256), 256)
    wide: Audio = audio_functional.resample(coded, TELEPHONE_HZ, SAMPLE_RATE).numpy()
    return wide


def tilted(audio: Audio, db_per_octave: float) -> Audio:
    """As loud as before, every octave from 50 Hz on so much louder than the one below."""
    spectrum = np.fft.rfft(audio, 2 * len(audio))
    octaves = np.log2(np.maximum(np.fft.rfftfreq(2 * len(audio), 1 / SAMPLE_RATE), 50) / 1000)
    heard = np.fft.irfft(spectrum * 10 ** (db_per_octave * octaves / 20))[: len(audio)]
    same: Audio = (heard * np.sqrt(np.mean(audio**2) / (np.mean(heard**2) + 1e-12))).astype(np.float32)
    return same


def joined(corpus: Corpus, seconds: float) -> Corpus:
    """Utterances of each corpus one after another, until a recording lasts `seconds`; the last ones may be shorter."""
    pause = np.zeros(int(PAUSE_S * SAMPLE_RATE), np.int16)
    rows: list[Utterance] = []
    files: list[NDArray[np.int16]] = []
    for name in sorted({u.corpus for u in corpus.utterances}):
        members = [i for i, u in enumerate(corpus.utterances) if u.corpus == name]
        while members:
            parts: list[NDArray[np.int16]] = []
            texts: list[str] = []
            while members and (not parts or sum(map(len, parts)) < seconds * SAMPLE_RATE):
                index = members.pop(0)
                parts += [corpus.pcm(index), pause]
                texts.append(corpus.utterances[index].text)
            files.append(np.concatenate(parts))
            key = f"{name}-{len(files)}"
            rows.append(Utterance(key, " ".join(texts), "", name, 0, len(files[-1]), len(files) - 1))
    return Corpus(tuple(rows), tuple(files))


def searches(checkpoint: Checkpoint) -> Iterator[tuple[str, Beam | None]]:
    """The ways that a server reads; only greedily where the bundled language model is of another vocabulary."""
    yield "live", None
    if found := joint_search(checkpoint.config, checkpoint.tokenizer, JointConfig().width):
        config, fusion = found
        patience = int(LIVE_PATIENCE_S * SAMPLE_RATE) // checkpoint.config.frame_samples
        yield "with patience", Beam(live_joint(replace(config, width=LIVE_WIDTH), patience), fusion)
        yield "files", Beam(config, fusion)


def kinds(dev: Corpus, noises: Corpus) -> dict[str, Callable[[], Corpus]]:
    """What may have happened to the recordings."""
    return (
        {"clean": lambda: dev}
        | {f"{snr} dB": lambda snr=snr: noisy(dev, noises, snr) for snr in SNRS_DB}
        | {"rooms": lambda: in_rooms(dev), "telephone": lambda: changed(dev, telephone)}
        | {name: lambda change=change: changed(dev, change) for name, change in DISTORTIONS.items()}
        | {"5 s of silence around it": lambda: between_pauses(dev, None)}
        | {"5 s of soft noise around it": lambda: between_pauses(dev, noises)}
        | {f"length {s}": lambda s=s: joined(dev, s) for s in LENGTHS_S}
    )


def measure(kind: str, data: Path, model: Path | None, every: int) -> dict[str, Any]:
    """The recordings that something has happened to, and the rates of each search on them."""
    torch.set_num_threads(1)
    checkpoint, dev, noises = load_checkpoint(model), load_corpus(data / "dev.jsonl"), load_corpus(data / "noise.jsonl")
    dev = dev.subset(list(range(0, len(dev.utterances), every)))
    corpus = (kinds(dev, noises) | nothing_said(noises))[kind]()
    found: dict[str, Any] = {"utterances": len(corpus.utterances), "mean_s": corpus.seconds / len(corpus.utterances)}
    for name, decoding in searches(checkpoint):
        report, results = evaluate_corpus(checkpoint.model, checkpoint.tokenizer, corpus, decoding)
        words = sum(len(result.hypothesis.split()) for result in results)
        found[name] = {rate: report[rate] for rate in ("wer", "cer")} | {"per_minute": words / corpus.seconds * 60}
    return found


def _shown(result: dict[str, float | None]) -> str:
    wer = result["wer"]
    return f"{result['per_minute']:.1f} words a minute" if wer is None else f"{100 * wer:.1f} %"


def draw(found: dict[str, Any], ways: list[str], target: Path) -> None:
    """Word errors by what was done to the recordings, and against length."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = [name for name in found if not name.startswith("length")][::-1]
    lengths = [f for name, f in found.items() if name.startswith("length")]
    for way in ways:
        left.plot([100 * found[name][way]["wer"] for name in names], names, "o")
        right.plot([f["mean_s"] for f in lengths], [100 * f[way]["wer"] for f in lengths], "o-", label=way)
    left.grid(axis="y", alpha=0.3)
    right.legend()
    left.set(xlabel="WER %", title="what has happened to the recording", xlim=(0, 105))
    right.set(xlabel="seconds of a recording", ylabel="WER %", title="length", xscale="log", ylim=(0, 105))
    figure.savefig(target, dpi=100)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="checkpoint; the bundled one if not given")
    parser.add_argument("--every", type=int, default=1, help="only each so manieth utterance")
    parser.add_argument("--out", type=Path, default=Path("docs/training"))
    options = parser.parse_args()
    ways = [name for name, _ in searches(load_checkpoint(options.model))]
    nothing = Corpus((), ())
    silent = nothing_said(nothing)
    console = Console(stderr=True)
    found: dict[str, Any] = dict.fromkeys(kinds(nothing, nothing) | silent)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(measure, kind, options.data, options.model, options.every): kind for kind in found}
        for done, each in enumerate(as_completed(running), 1):
            kind, result = running[each], each.result()
            found[kind] = result
            rates = ", ".join(f"{way} {_shown(result[way])}" for way in ways)
            console.print(f"{done} of {len(found)}, {kind}: {rates}")
    table = Table("", "recordings", "mean s", *(f"{way}: WER %" for way in ways), *(f"{way}: CER %" for way in ways))
    imagined = Table("nothing is said", "minutes", *(f"{way}: words per minute" for way in ways))
    for kind, result in found.items():
        if kind in silent:
            minutes = result["utterances"] * result["mean_s"] / 60
            imagined.add_row(kind, f"{minutes:.1f}", *(f"{result[way]['per_minute']:.1f}" for way in ways))
            continue
        shares = (f"{100 * result[way][rate]:.1f}" for rate in ("wer", "cer") for way in ways)
        table.add_row(kind, str(result["utterances"]), f"{result['mean_s']:.1f}", *shares)
    Console().print(table, imagined)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "robustness.json").write_text(json.dumps(found, indent=1) + "\n")
    draw({kind: result for kind, result in found.items() if kind not in silent}, ways, options.out / "robustness.png")


if __name__ == "__main__":
    main()
