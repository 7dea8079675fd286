"""Corpora in their own layouts to manifests that `train` and `evaluate` read, through lhotse's readers.

Writes ``train.jsonl.gz``, ``dev.jsonl.gz`` and ``test.jsonl.gz``; the recordings stay where they are. Case and
punctuation stay too: `normalize_text` takes them off what is loaded. Here only goes what it cannot know: marks that are
no words, words in two parts.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from mocha_model.config import SAMPLE_RATE
from mocha_training.manifests import CorpusError, let_lhotse_read_sphere

Name = Literal["librispeech", "commonvoice", "tedlium", "timit", "wsj", "kaldi"]
SPLITS = ("train", "dev", "test")
MARKS = re.compile(r"<[^<>\s]+>|\[[^][\s]+\]|\{[^{}\s]+\}|\(\d+\)")  # <NOISE>, [laughter], {SMACK}, a(2)

# A split, what its utterances are called in reports, and lhotse's "recordings" and "supervisions".
Part = tuple[str, str, dict[str, Any]]


def prepare(corpus: Name, source: Path, out: Path, num_jobs: int = 1) -> dict[str, int]:
    """Write the manifests of the corpus in `source` into `out`: utterances per split.

    Recordings of many utterances are cut: each line of a manifest is one utterance with its text.

    Raises:
        CorpusError: `source` has another layout, lacks one of the splits, or what is there cannot be read.

    """
    from lhotse import CutSet
    from lhotse.audio.utils import AudioLoadingError

    let_lhotse_read_sphere()
    cuts: dict[str, list[Any]] = {}
    try:
        for split, name, manifests in READERS[corpus](source.resolve(), num_jobs):
            cuts.setdefault(split, []).extend(_utterances(manifests, name, TEXTS.get(corpus)))
    except CorpusError:
        raise
    except (AudioLoadingError, ValueError, KeyError, AssertionError, RuntimeError, OSError) as error:
        raise CorpusError(f"{source}: not a usable corpus of this kind, {corpus} ({error})") from error
    for split in {"train": None} | cuts:
        if not cuts.get(split):
            raise CorpusError(f"{source}: no utterances for {split}")
    out.mkdir(parents=True, exist_ok=True)
    for split, utterances in cuts.items():
        CutSet.from_cuts(sorted(utterances, key=lambda cut: cut.id)).to_file(out / f"{split}.jsonl.gz")
    return {split: len(cuts[split]) for split in SPLITS if split in cuts}


def _utterances(manifests: dict[str, Any], name: str, text_of: Callable[[Any], str] | None) -> Iterator[Any]:
    from lhotse import CutSet

    for cut in CutSet.from_manifests(**manifests).trim_to_supervisions(keep_overlapping=False):
        (spoken,) = cut.supervisions
        if text_of is not None:
            spoken.text = text_of(spoken)
        cut.custom = {"corpus": name}
        yield cut.with_id(spoken.id)


def _librispeech(source: Path, num_jobs: int) -> Iterator[Part]:
    """``train-clean-100/103/1240/103-1240.trans.txt`` and ``…/103-1240-0000.flac``; as many of the parts as are there.

    dev is dev-clean and dev-other together, test likewise; reports tell them apart. Mini LibriSpeech has the same
    layout and no test.
    """
    from lhotse.recipes import prepare_librispeech

    parts = sorted(p.name for p in source.glob("*-*") if p.is_dir() and p.name.split("-")[0] in SPLITS)
    if not parts:
        raise CorpusError(f"{source}: not LibriSpeech's layout, there is no directory train-clean-100 or such")
    for part, manifests in prepare_librispeech(source, dataset_parts=parts, num_jobs=num_jobs).items():
        yield part.split("-")[0], f"librispeech {part}", manifests


def _commonvoice(source: Path, num_jobs: int) -> Iterator[Part]:
    """One language of a release: ``en/train.tsv``, ``dev.tsv``, ``test.tsv`` and ``clips/*.mp3``."""
    from lhotse.recipes import prepare_commonvoice

    for split in SPLITS:
        if not (source / f"{split}.tsv").is_file():
            raise CorpusError(f"{source}: not a language of Common Voice, there is no {split}.tsv")
    with TemporaryDirectory() as unused:
        found = prepare_commonvoice(source.parent, unused, [source.name], SPLITS, num_jobs)[source.name]
    for split, manifests in found.items():
        yield split, f"commonvoice {source.name}", manifests


def _tedlium(source: Path, num_jobs: int) -> Iterator[Part]:
    """Release 3: ``legacy/train/sph/AaronHuey_2010X.sph`` and ``legacy/train/stm/AaronHuey_2010X.stm``; dev, test."""
    from lhotse.recipes import prepare_tedlium

    for split in SPLITS:
        if not (source / "legacy" / split / "stm").is_dir():
            raise CorpusError(f"{source}: not the layout of TED-LIUM 3, there is no directory legacy/{split}/stm")
        yield split, "tedlium", prepare_tedlium(source, dataset_parts=split, num_jobs=num_jobs)[split]


def _timit(source: Path, num_jobs: int) -> Iterator[Part]:
    """The disc: ``data/TRAIN/DR1/FCJF0/SI1027.WAV`` with ``.PHN``, ``.WRD`` and ``.TXT`` beside it; ``TEST`` likewise.

    Standard split: 462 speakers to train, 50 for dev, the core test set of 24; the two sentences (SA) that every
    speaker reads are left out.
    """
    from lhotse.recipes.timit import prepare_timit

    for part in ("TRAIN", "TEST"):
        if not any((source / "data" / part).glob("*/*/*.WAV")):
            raise CorpusError(f"{source}: not TIMIT's layout, there are no recordings data/{part}/DR1/FCJF0/SI1027.WAV")
    found = prepare_timit(source, num_phones=60, num_jobs=num_jobs)  # "60" leaves the phones as they are, all 61
    for split in SPLITS:
        manifests = found[split.upper()]
        read_by_one = manifests["supervisions"].filter(lambda spoken: "-SA" not in spoken.id)
        yield split, "timit", manifests | {"supervisions": read_by_one}


def _kaldi(source: Path, directories: tuple[str, str, str]) -> Iterator[Part]:
    """A ``data`` directory of Kaldi's scripts, with one directory for each split."""
    from lhotse.kaldi import load_kaldi_data_dir

    for split, directory in zip(SPLITS, directories, strict=True):
        for name in ("wav.scp", "text", "utt2spk"):
            if not (source / directory / name).is_file():
                raise CorpusError(f"{source / directory}: not a Kaldi data directory, there is no {name}")
        recordings, supervisions, _ = load_kaldi_data_dir(source / directory, SAMPLE_RATE)
        yield split, source.name, {"recordings": recordings, "supervisions": supervisions}


def _without_marks(spoken: Any) -> str:
    return " ".join(MARKS.sub(" ", spoken.text or "").split())


def _joined(spoken: Any) -> str:
    """TED-LIUM writes "it 's", "they 're", "rock 'n roll"."""
    return re.sub(r"(?<=\w) '(?=\w)", "'", _without_marks(spoken))


def _phones(spoken: Any) -> str:
    return " ".join(item.symbol for item in spoken.alignment["phone"])


TEXTS: dict[Name, Callable[[Any], str]] = {
    "tedlium": _joined,
    "timit": _phones,
    "wsj": _without_marks,
    "kaldi": _without_marks,
}
READERS: dict[Name, Callable[[Path, int], Iterator[Part]]] = {
    "librispeech": _librispeech,
    "commonvoice": _commonvoice,
    "tedlium": _tedlium,
    "timit": _timit,
    "wsj": lambda source, _: _kaldi(source, ("train_si284", "test_dev93", "test_eval92")),
    "kaldi": lambda source, _: _kaldi(source, SPLITS),
}
