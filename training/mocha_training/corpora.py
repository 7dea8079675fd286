"""Corpora in their own layouts to manifests that `train` and `evaluate` read, through lhotse's readers.

Writes ``train.jsonl.gz``, ``dev.jsonl.gz`` and ``test.jsonl.gz``; the recordings stay where they are.
"""

from pathlib import Path
from typing import Any

from mocha_training.data import CorpusError

SPLITS = ("train", "dev", "test")


def prepare_timit(corpus: Path, out: Path) -> dict[str, int]:
    """TIMIT with its phones as text: utterances per split.

    Standard split: 462 speakers to train, 50 for dev, the core test set of 24; the two sentences (SA) that every
    speaker reads are left out. `corpus` is the disc's directory with ``data/TRAIN/DR1/FCJF0/SI1027.WAV`` and so on.

    Raises:
        CorpusError: `corpus` has another layout, or lacks one of the splits.

    """
    from lhotse import CutSet
    from lhotse.recipes import timit

    if not (corpus / "data" / "TRAIN").is_dir():
        raise CorpusError(f"{corpus}: not TIMIT's layout, there is no directory data/TRAIN")
    found = {part: list((corpus / "data" / part).glob("*/*/*.WAV")) for part in ("TRAIN", "TEST")}
    for part, files in found.items():
        if not files:
            raise CorpusError(f"{corpus / 'data' / part}: no recordings (REGION/SPEAKER/SENTENCE.WAV)")
    parts = timit.prepare_timit(corpus.resolve(), num_phones=60)  # "60" leaves the phones as they are, all 61
    counts = {}
    for split in SPLITS:
        part = parts[split.upper()]
        cuts = []
        for cut in CutSet.from_manifests(recordings=part["recordings"], supervisions=part["supervisions"]):
            (spoken,) = cut.supervisions
            _, _, sentence = spoken.id.rpartition("-")
            if not sentence.startswith("SA"):
                spoken.text = " ".join(item.symbol for item in spoken.alignment["phone"])
                cuts.append(cut.with_id(spoken.id))
        counts[split] = _write(cuts, out, split, corpus)
    return counts


def prepare_kaldi(directories: dict[str, Path], out: Path) -> dict[str, int]:
    """Kaldi data directories, one for each split: utterances per split.

    This is how WSJ is commonly prepared: ``train_si284``, ``test_dev93`` and ``test_eval92``. Marks such as
    ``<NOISE>`` are left out of the text, as in Kaldi's own scoring.

    Raises:
        CorpusError: a directory lacks ``wav.scp``, ``text`` or ``utt2spk``, or what they name cannot be read.

    """
    from lhotse import CutSet
    from lhotse.kaldi import load_kaldi_data_dir

    from mocha_model.config import SAMPLE_RATE

    counts = {}
    for split, directory in directories.items():
        for name in ("wav.scp", "text", "utt2spk"):
            if not (directory / name).is_file():
                raise CorpusError(f"{directory}: not a Kaldi data directory, there is no {name}")
        try:
            recordings, supervisions, _ = load_kaldi_data_dir(directory, SAMPLE_RATE)
        except (ValueError, KeyError, AssertionError, RuntimeError, OSError) as error:
            raise CorpusError(f"{directory}: not a usable Kaldi data directory ({error})") from error
        whole = CutSet.from_manifests(recordings=recordings, supervisions=supervisions)
        cuts = []
        for cut in whole.trim_to_supervisions(keep_overlapping=False):
            (spoken,) = cut.supervisions
            words = (spoken.text or "").split()
            spoken.text = " ".join(w for w in words if not (w.startswith("<") and w.endswith(">")))
            cuts.append(cut.with_id(spoken.id))
        counts[split] = _write(cuts, out, split, directory)
    return counts


def _write(cuts: list[Any], out: Path, split: str, source: Path) -> int:
    from lhotse import CutSet

    if not cuts:
        raise CorpusError(f"{source}: no utterances for {split}")
    out.mkdir(parents=True, exist_ok=True)
    CutSet.from_cuts(sorted(cuts, key=lambda cut: cut.id)).to_file(out / f"{split}.jsonl.gz")
    return len(cuts)
