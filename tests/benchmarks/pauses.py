"""What shorter and longer pauses do to a text, where they end its segments: word errors and segments.

Run it as `python tests/benchmarks/pauses.py --manifest $MOCHA_SPEECH/dev.jsonl --every 4` (prints a table).
"""

import argparse
from pathlib import Path

import jiwer
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mocha_model.emissions import Emission, text_of
from mocha_model.recognizer import Recognizer
from mocha_server.settings import Settings
from mocha_training.data import load_corpus

PAUSES_MS = (200, 300, 400, 500, 720, 1500)
TOGETHER = 24  # recordings, of like length
console = Console(stderr=True)


@torch.inference_mode()
def read(recognizer: Recognizer, recordings: list[torch.Tensor], pause: int) -> list[list[Emission]]:
    """What each gives where `pause` frames end a segment."""
    found: dict[int, list[Emission]] = {}
    order = sorted(range(len(recordings)), key=lambda index: len(recordings[index]))
    batches = [order[start : start + TOGETHER] for start in range(0, len(order), TOGETHER)]
    for rows in track(batches, f"{pause} frames", console=console, transient=True):
        samples = torch.nn.utils.rnn.pad_sequence([recordings[row] for row in rows], batch_first=True)
        lengths = torch.tensor([len(recordings[row]) for row in rows])
        state = recognizer.init_state(len(rows), pause=torch.full((len(rows),), pause))
        first, state = recognizer.step(samples, lengths, state)
        rest, _ = recognizer.flush(state, torch.ones(len(rows), dtype=torch.bool))
        found |= {row: a + b for row, a, b in zip(rows, first, rest, strict=True)}
    return [found[index] for index in range(len(recordings))]


def main() -> None:
    """Read the recordings greedily and with patience, with each pause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--manifest", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take every n-th recording")
    options = parser.parse_args()
    torch.set_num_threads(1)
    corpus, settings, greedy = load_corpus(options.manifest), Settings(), Recognizer.load()
    chosen = range(0, len(corpus.utterances), options.every)
    recordings, texts = [torch.from_numpy(corpus.audio(n)) for n in chosen], [corpus.utterances[n].text for n in chosen]
    patient = greedy.searching(settings.live_beam, patience_s=settings.live_patience_ms / 1000)
    table = Table("", "pause, ms", "WER %", f"segments of {len(texts)} recordings")
    for name, recognizer in (("live", greedy), ("with patience", patient)):
        for pause_ms in PAUSES_MS:
            pause = round(pause_ms / 1000 * greedy.sample_rate / greedy.frame_samples)
            found = read(recognizer, recordings, pause)
            errors = 100 * jiwer.wer(texts, [text_of(emissions) for emissions in found])
            segments = sum(emission.end_of_segment for emissions in found for emission in emissions)
            table.add_row(name, str(pause_ms), f"{errors:.1f}", str(segments))
    console.print(table)


if __name__ == "__main__":
    main()
