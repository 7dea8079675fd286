"""What favoured phrases bring: how many rare words are found, how many are imagined, and what it costs.

Rare words are those of at least five letters that the training transcripts have at most twice. Each dev utterance that
has one is read with a list: its own rare words among `--others` that it does not have. With `--unknown` they are those
that the bundled language model does not know, mostly names. Needs recorded speech. Run it as
`python tests/benchmarks/phrases.py --data $MOCHA_SPEECH` (prints a table).
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import jiwer
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mocha_model.checkpoint import Checkpoint, load_checkpoint
from mocha_model.emissions import text_of
from mocha_model.joint import JointConfig, wording
from mocha_model.language import WordLanguageModel
from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer, joint_search, live_joint
from mocha_training.data import Corpus, load_corpus

BONUSES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # nats per character
MIN_LETTERS, AT_MOST_SEEN = 5, 2
console = Console(stderr=True)


def measure(
    checkpoint: Checkpoint, dev: Corpus, rare: set[str], others: int, width: int, bonus: float, patience: int | None
) -> dict[str, float]:
    """Rates of one way of decoding; `seconds` is time in the recogniser."""
    searching = joint_search(checkpoint.config, checkpoint.tokenizer, width) if width else None
    config, fusion = searching or (None, None)
    book = PhraseBook(checkpoint.tokenizer, bonus, wording(fusion, checkpoint.tokenizer) if fusion else None)
    if config and patience is not None:
        config = live_joint(config, patience)
    recognizer = Recognizer(checkpoint.model, checkpoint.tokenizer, None, config, fusion, phrases=book)
    rng, all_rare = np.random.default_rng(0), sorted(rare)
    found = spoken = imagined = 0
    references, hypotheses, seconds = [], [], 0.0
    for index, u in enumerate(track(dev.utterances, f"width {width}, bonus {bonus}", console=console, transient=True)):
        own = [w for w in u.text.split() if w in rare]
        decoys = [str(w) for w in rng.choice(all_rare, min(others, len(all_rare)), replace=False) if w not in own]
        roots = torch.tensor([book.add([*own, *decoys]) if bonus else 0])
        samples = torch.from_numpy(dev.audio(index))[None]
        began = time.perf_counter()
        state = recognizer.init_state(1, roots)
        first, state = recognizer.step(samples, torch.tensor([samples.shape[1]]), state)
        rest, _ = recognizer.flush(state, torch.tensor([True]))
        seconds += time.perf_counter() - began
        book.remove(int(roots))
        text = text_of(first[0] + rest[0])
        heard, meant = Counter(w for w in text.split() if w in rare), Counter(own)
        found, spoken = found + (heard & meant).total(), spoken + meant.total()
        imagined += sum(count for word, count in (heard - meant).items() if word in decoys)
        references.append(u.text)
        hypotheses.append(text)
    return {
        "recall": found / spoken,
        "rare_words": spoken,
        "imagined": imagined,
        "wer": jiwer.wer(references, hypotheses),
        "seconds": seconds,
    }


def known_words(checkpoint: Checkpoint) -> set[str]:
    """Those of the bundled language model."""
    searching = joint_search(checkpoint.config, checkpoint.tokenizer, 1)
    assert searching, "the bundled language model is of another vocabulary"
    language = searching[1].parts[0][1]
    assert isinstance(language, WordLanguageModel)
    return set(language.counts.words)


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="checkpoint; the bundled one if not given")
    parser.add_argument("--joint", type=int, default=JointConfig().width, help="prefixes of joint search")
    parser.add_argument("--patience", type=int, help="frames, of joint search of live text; none if not given")
    parser.add_argument("--unknown", action="store_true", help="words that the language model does not know")
    parser.add_argument("--others", type=int, default=50, help="phrases of each list that are not spoken")
    parser.add_argument("--limit", type=int, default=0, help="only so many utterances")
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint, dev = load_checkpoint(options.model), load_corpus(options.data / "dev.jsonl")
    seen = Counter(w for u in load_corpus(options.data / "train.jsonl").utterances for w in u.text.split())
    words = {w for u in dev.utterances for w in u.text.split()}
    known = known_words(checkpoint) if options.unknown else {w for w in seen if seen[w] > AT_MOST_SEEN}
    rare = {w for w in words - known if len(w) >= MIN_LETTERS}
    dev = dev.subset([i for i, u in enumerate(dev.utterances) if rare & set(u.text.split())][: options.limit or None])
    table = Table("width", "nats per character", "rare words found", "imagined", "WER %", "time", title=str(len(rare)))
    plain = 0.0  # seconds of the first row
    for width in (0, options.joint):
        for bonus in BONUSES:
            row = measure(checkpoint, dev, rare, options.others, width, bonus, options.patience)
            plain = plain or row["seconds"]
            name, share = str(width or "greedy"), f"{100 * row['recall']:.1f} % of {row['rare_words']}"
            ratio = f"{row['seconds'] / plain:.2f}"
            table.add_row(name, str(bonus), share, str(row["imagined"]), f"{100 * row['wer']:.1f}", ratio)
    Console().print(table)


if __name__ == "__main__":
    main()
