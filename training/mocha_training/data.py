"""Corpora to batches: recordings decoded once into a flat int16 cache, then length-bucketed, seeded, resumable batches.

Knows nothing of models.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from torch import Tensor

from mocha_model.config import SAMPLE_RATE
from mocha_model.tokenizer import Tokenizer, Units, normalize_text, split_text
from mocha_training.manifests import CorpusError, Samples, Undecoded, Utterance, is_cut_set, recordings_of, rows_of

FEW = 6  # symbols or recordings that a message names
INDEX = 2  # the kind of index in the cache: others are made anew
MOST_UNREADABLE = 3, 0.01  # recordings of a corpus, or this share of them


@dataclass(frozen=True)
class Corpus:
    """Utterances over flat files of int16 samples at 16 kHz (memory-mapped)."""

    utterances: tuple[Utterance, ...]
    files: tuple[Samples, ...]
    left_out: str = ""  # what to say of recordings that could not be read, of a corpus as it was loaded

    def pcm(self, index: int) -> Samples:
        """Samples [N] int16 of utterance `index`, as recorded."""
        u = self.utterances[index]
        return self.files[u.file][u.offset : u.offset + u.num_samples]

    def audio(self, index: int) -> NDArray[np.float32]:
        """Samples [N] float32 in [-1, 1] of utterance `index`."""
        return self.pcm(index).astype(np.float32) / 32768.0

    def subset(self, indices: list[int]) -> "Corpus":
        """The same samples with only some of the utterances."""
        return Corpus(tuple(self.utterances[i] for i in indices), self.files)

    def some(self, count: int) -> "Corpus | None":
        """`count` utterances at random, always the same; None for none."""
        chosen = np.random.default_rng(0).permutation(len(self.utterances))[:count]
        return self.subset(sorted(chosen.tolist())) if len(chosen) else None

    @staticmethod
    def joined(corpora: Sequence["Corpus"]) -> "Corpus":
        """All utterances of several corpora."""
        utterances: list[Utterance] = []
        files: list[Samples] = []
        for corpus in corpora:
            utterances += [replace(u, file=u.file + len(files)) for u in corpus.utterances]
            files += corpus.files
        return Corpus(tuple(utterances), tuple(files))

    @property
    def seconds(self) -> float:
        """Total duration."""
        return sum(u.num_samples for u in self.utterances) / SAMPLE_RATE

    @cached_property
    def digest(self) -> str:
        """A name of these utterances, wherever they lie."""
        identity = [(u.key, u.corpus, u.num_samples, u.text) for u in self.utterances]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def cache_directory() -> Path:
    """Where decoded corpora are kept: $MOCHA_CACHE or the user's cache directory."""
    if given := os.environ.get("MOCHA_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mocha-asr"


def load_corpus(manifest: Path, cache: Path | None = None, units: Units = "characters") -> Corpus:
    """Read a manifest (``SPLIT.jsonl`` beside its shards, or a lhotse ``*.jsonl.gz`` CutSet), decoding it once.

    What is decoded is kept for the manifest and its shards as they are now (path, size, time of change); the recordings
    that a CutSet names are taken to stay as they are. One process decodes, others that ask meanwhile wait for it.
    Texts are normalised for `units`. A few recordings that cannot be read are left out, and `left_out` says which.

    Raises:
        CorpusError: the manifest or something it names is missing or unreadable (of recordings: all, or more than
            three and a hundredth), or the cache cannot be written.

    """
    if not manifest.is_file():
        directory = "is a directory; a manifest is a file in it, such as dev.jsonl"
        raise CorpusError(f"{manifest}: {directory if manifest.is_dir() else 'no such manifest'}")
    base = (cache or cache_directory()) / _fingerprint(manifest)
    index, flat = base.with_suffix(".json"), base.with_suffix(".i16")
    if (kept := _kept(index, flat)) is None:
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(base.with_suffix(".lock")):
                if (kept := _kept(index, flat)) is None:
                    kept = _decode(manifest, index, flat)
        except OSError as error:
            raise CorpusError(f"{flat}: cannot be written; $MOCHA_CACHE says where else ({error})") from error
    rows = [row | {"text": normalize_text(row["text"], units)} for row in kept["utterances"]]
    utterances = tuple(Utterance(**row) for row in rows)
    if not utterances:
        raise CorpusError(f"{manifest}: no utterances")
    unreadable = kept["unreadable"]
    left_out = f"{_unreadable(manifest, len(rows), unreadable)} and are left out" if unreadable else ""
    return Corpus(utterances, (np.memmap(flat, dtype=np.int16, mode="r"),), left_out)


def _kept(index: Path, flat: Path) -> dict[str, Any] | None:
    """What the cache says of a corpus; None where it has not all of it."""
    try:
        kept: dict[str, Any] = json.loads(index.read_text())
        num_samples = sum(row["num_samples"] for row in kept["utterances"])
        return kept if flat.stat().st_size == num_samples * np.dtype(np.int16).itemsize else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _unreadable(manifest: Path, num_read: int, names: Sequence[str]) -> str:
    named = ", ".join(names[:FEW]) + (" …" if len(names) > FEW else "")
    return f"{manifest}: {len(names)} of {num_read + len(names)} recordings cannot be read ({named})"


def _fingerprint(manifest: Path) -> str:
    """A name that changes when the manifest does, or one of its shards."""
    shards = [] if is_cut_set(manifest) else sorted({row["shard"] for row in rows_of(manifest)})
    parts = [f"index {INDEX}"]
    for path in (manifest, *(manifest.parent / shard for shard in shards)):
        try:
            stat = path.stat()
        except OSError as error:
            raise CorpusError(f"{path}: not a readable shard ({error})") from error
        parts.append(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _decode(manifest: Path, index: Path, flat: Path) -> dict[str, Any]:
    """Write all samples and, last, where each utterance lies: who sees the index sees the whole of both.

    Returns what the index says.
    """
    rows, offset, unreadable = [], 0, list[str]()
    for left in flat.parent.glob(f"{flat.stem}*/"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=flat.parent, prefix=flat.stem) as own:
        partial_index, partial_flat = Path(own) / index.name, Path(own) / flat.name
        with partial_flat.open("wb") as out:
            for name, utterance, decoded in _in_order(recordings_of(manifest)):
                try:
                    samples = decoded.result()
                except CorpusError:
                    unreadable.append(name)
                    continue
                out.write(samples.tobytes())
                rows.append(asdict(utterance) | {"offset": offset, "num_samples": len(samples)})
                offset += len(samples)
        if rows and not offset:
            raise CorpusError(f"{manifest}: its recordings are empty")
        few, share = MOST_UNREADABLE
        if unreadable and (not rows or len(unreadable) > max(few, share * (len(rows) + len(unreadable)))):
            raise CorpusError(_unreadable(manifest, len(rows), unreadable))
        kept = {"utterances": rows, "unreadable": unreadable}
        partial_index.write_text(json.dumps(kept))
        partial_flat.replace(flat)
        partial_index.replace(index)
    return kept


# The same, once its decoding has begun.
Decoding = tuple[str, Utterance, Future[Samples]]


def _in_order(recordings: Iterator[Undecoded]) -> Iterator[Decoding]:
    """Decode on all cores, a few ahead of what is asked for; decoders let go of Python's lock."""
    workers = os.cpu_count() or 1
    ahead: deque[Decoding] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for name, utterance, decode in recordings:
            ahead.append((name, utterance, pool.submit(decode)))
            if len(ahead) > 2 * workers:
                yield ahead.popleft()
        yield from ahead


def trainable(corpus: Corpus, min_seconds: float, max_seconds: float, units: Units = "characters") -> Corpus:
    """Leave out what cannot be learned from: no text, too short, too long, or (among characters) written in digits."""
    kept = [
        i
        for i, u in enumerate(corpus.utterances)
        if u.text
        and min_seconds <= u.num_samples / SAMPLE_RATE <= max_seconds
        and not (units == "characters" and any(c.isdigit() for c in u.text))
        and len(split_text(u.text, units)) / (u.num_samples / SAMPLE_RATE) < 24
    ]
    return corpus.subset(kept)


def writable(corpus: Corpus, tokenizer: Tokenizer) -> tuple[Corpus, str]:
    """What of `corpus` `tokenizer` can write, and what to say of the rest; raises ValueError where that is all."""
    texts = [split_text(u.text, tokenizer.units) for u in corpus.utterances]
    lacking = Counter(symbol for text in texts for symbol in set(text).difference(tokenizer.symbols))
    kept = [i for i, text in enumerate(texts) if lacking.keys().isdisjoint(text)]
    if not lacking:
        return corpus, ""
    commonest = sorted(lacking, key=lambda symbol: (-lacking[symbol], symbol))
    symbols = ", ".join(map(repr, commonest[:FEW])) + (" …" if len(lacking) > FEW else "")
    told = f"{len(texts) - len(kept)} have what the model cannot write ({symbols})"
    if not kept:
        raise ValueError(f"of {len(texts)} utterances {told}")
    return corpus.subset(kept), f"; {told} and are left out"


def make_batches(
    seconds: Sequence[float], max_seconds: float, rng: np.random.Generator, together: int = 1, num_examples: int = 0
) -> list[list[int]]:
    """Indices of each batch of one epoch: similar lengths together, at most `max_seconds` with padding, shuffled.

    `seconds` [N] says how long each example is. With `num_examples` a batch has so many, of any length. Examples fall
    into buckets of one second and each bucket has one batch size; what does not fill runs of `together` batches goes up
    into the next bucket. So there are few distinct shapes, and processes that take a run's batches at the same time
    finish at the same time. Only batches of the longest can be smaller.
    """
    buckets = np.ceil(seconds).astype(int)
    groups: list[list[list[int]]] = []
    waiting: list[int] = []
    for bucket in np.unique(buckets):
        members = rng.permutation([*waiting, *np.nonzero(buckets == bucket)[0].tolist()]).tolist()
        size = num_examples or max(1, int(max_seconds / bucket))
        whole = len(members) // (size * together) * (size * together)
        batches = [members[start : start + size] for start in range(0, len(members), size)]
        groups += [batches[start : start + together] for start in range(0, whole // size, together)]
        left, waiting = batches[whole // size :], members[whole:]
    tail = []
    if waiting:
        groups += [left[start : start + together] for start in range(0, len(left), together)]
        tail = groups.pop() if len(left) % together else []
    return [batch for i in rng.permutation(len(groups)) for batch in groups[i]] + tail


@dataclass(frozen=True)
class Batch:
    """Padded tensors of some utterances.

    Attributes:
        samples: [B, N] float32. num_samples: [B] int64.
        tokens: [B, U] int64, ended by eos, padded with 0. num_tokens: [B] int64, eos counted.

    """

    samples: Tensor
    num_samples: Tensor
    tokens: Tensor
    num_tokens: Tensor

    @property
    def seconds(self) -> float:
        """Real audio in the batch."""
        return float(self.num_samples.sum()) / SAMPLE_RATE

    def twice(self) -> "Batch":
        """Every utterance, then every utterance once more."""
        return Batch(*(torch.cat([getattr(self, name)] * 2) for name in self.__dataclass_fields__))

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def collate(audio: list[NDArray[np.float32]], texts: list[str], tokenizer: Tokenizer, multiple: int = 1) -> Batch:
    """Pad recordings and transcripts (one each) into a batch whose length is a multiple of `multiple` samples.

    Few distinct lengths let the kernels that a backend makes for each shape be used again.
    """
    num_samples = torch.tensor([len(a) for a in audio])
    samples = torch.zeros(len(audio), -(-int(num_samples.max()) // multiple) * multiple)
    for row, a in zip(samples, audio, strict=True):
        row[: len(a)] = torch.from_numpy(a)
    ids = [torch.tensor([*tokenizer.encode(t), tokenizer.eos_id]) for t in texts]
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return Batch(samples, num_samples, tokens, torch.tensor([len(i) for i in ids]))
