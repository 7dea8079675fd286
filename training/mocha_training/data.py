"""Corpora to batches: tar shards decoded once into a flat int16 cache, then length-bucketed, seeded, resumable batches.

A corpus directory holds ``SPLIT.jsonl`` (key, shard, text, speaker, corpus, duration) and tar shards of ``KEY.ogg``;
any lhotse CutSet (``*.jsonl.gz``) is read as well. Knows nothing of models.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from filelock import FileLock
from numpy.typing import NDArray
from rich.progress import track
from torch import Tensor

from mocha_model.config import SAMPLE_RATE
from mocha_model.tokenizer import Tokenizer, Units, normalize_text, split_text

Samples = NDArray[np.int16]
BESIDE = ("json", "txt", "lab", "trn", "csv", "tsv")  # files of a shard that are no recordings
# PyAV before 19 reads no file whose tags are not UTF-8 unless told to; later ones do, and cannot be told.
TAGS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
FEW = 6  # symbols or recordings that a message names
INDEX = 2  # the kind of index in the cache: others are made anew
MOST_UNREADABLE = 3, 0.01  # recordings of a corpus, or this share of them


class CorpusError(ValueError):
    """A manifest, shard or recording that cannot be read; the message names it."""


@dataclass(frozen=True)
class Utterance:
    """One recording: where it lies in the cache (which of the corpus's files) and what was said (normalised text)."""

    key: str
    text: str
    speaker: str
    corpus: str
    offset: int
    num_samples: int
    file: int = 0


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


def decode_audio(data: bytes, name: str) -> Samples:
    """Any audio file's bytes to mono int16 at 16 kHz; raises CorpusError."""
    try:
        alone = {"protocol_whitelist": "none"}  # a playlist opens nothing
        with av.open(io.BytesIO(data), mode="r", options=alone, **TAGS) as container:
            resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
            frames = [f for frame in container.decode(audio=0) for f in resampler.resample(frame)]
            frames += resampler.resample(None)
    except (av.FFmpegError, IndexError, ValueError) as error:  # ValueError: the format changes in the middle
        raise CorpusError(f"{name}: not a readable recording ({error})") from error
    parts = [frame.to_ndarray()[0] for frame in frames]
    return np.concatenate(parts) if parts else np.zeros(0, np.int16)


def cache_directory() -> Path:
    """Where decoded corpora are kept: $MOCHA_CACHE or the user's cache directory."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mocha-asr"
    return Path(os.environ.get("MOCHA_CACHE", default))


def find_manifest(directory: Path, split: str) -> Path:
    """``SPLIT.jsonl`` of a corpus directory, or the CutSet ``SPLIT.jsonl.gz`` if there is only that."""
    shards, cuts = directory / f"{split}.jsonl", directory / f"{split}.jsonl.gz"
    return cuts if cuts.is_file() and not shards.is_file() else shards


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


def _is_cut_set(manifest: Path) -> bool:
    return manifest.name.endswith(".jsonl.gz")


def _fingerprint(manifest: Path) -> str:
    """A name that changes when the manifest does, or one of its shards."""
    shards = [] if _is_cut_set(manifest) else sorted({row["shard"] for row in _rows(manifest)})
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
    recordings = _lhotse_recordings(manifest) if _is_cut_set(manifest) else _shard_recordings(manifest)
    rows, offset, unreadable = [], 0, list[str]()
    for left in flat.parent.glob(f"{flat.stem}*/"):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=flat.parent, prefix=flat.stem) as own:
        partial_index, partial_flat = Path(own) / index.name, Path(own) / flat.name
        with partial_flat.open("wb") as out:
            for name, utterance, decoded in _in_order(recordings):
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


# A recording's name, what is known of it before it is decoded, and what decodes it, or will have.
Undecoded = tuple[str, Utterance, Callable[[], Samples]]
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


def _rows(manifest: Path) -> list[dict[str, Any]]:
    try:
        lines = manifest.read_text(encoding="utf-8").split("\n")  # a text may have other ends of lines
    except ValueError as error:
        raise CorpusError(f"{manifest}: not lines of JSON objects ({error})") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [_row(line)] if line.strip() else []
        except ValueError as error:
            raise CorpusError(f"{manifest}: line {number}: {error}") from error
    return rows


def _row(line: str) -> dict[str, Any]:
    """A line of a manifest; raises ValueError."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for name in ("key", "shard", "text", "corpus"):
        if name not in row:
            raise ValueError(f"lacks {name!r}")
    for name in ("key", "shard", "corpus"):
        if not isinstance(row[name], str):
            raise ValueError(f"{name!r} is not a string")
    for name in ("text", "speaker"):
        if not isinstance(row.get(name), str | None):
            raise ValueError(f"{name!r} is neither a string nor null")
    return row


def _shard_recordings(manifest: Path) -> Iterator[Undecoded]:
    by_shard: dict[str, dict[str, dict[str, Any]]] = {}
    for row in _rows(manifest):
        wanted = by_shard.setdefault(row["shard"], {})
        if row["key"] in wanted:
            raise CorpusError(f"{manifest}: {row['shard']} has {row['key']} twice")
        wanted[row["key"]] = row
    for shard, wanted in by_shard.items():
        try:
            with tarfile.open(manifest.parent / shard) as tar:
                files = _files(tar, wanted)
                for row, name, data in track(files, f"decoding {shard}", total=len(wanted), transient=True):
                    utterance = Utterance(row["key"], row["text"] or "", row.get("speaker") or "", row["corpus"], 0, 0)
                    yield f"{shard}/{name}", utterance, partial(decode_audio, data, name)
        except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
            raise CorpusError(f"{manifest.parent / shard}: not a readable shard ({error})") from error
        if wanted:
            raise CorpusError(f"{manifest.parent / shard}: lacks {len(wanted)} recordings, {next(iter(wanted))} first")


def _files(tar: tarfile.TarFile, wanted: dict[str, dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, bytes]]:
    """Rows with the names and bytes of their recordings; each is taken out of `wanted`.

    What comes after the last of them is not read: it may be torn, if the program that wrote it was killed.
    """
    while wanted and (member := tar.next()):
        key, _, suffix = member.name.removeprefix("./").rpartition(".")
        file = tar.extractfile(member)
        if key in wanted and suffix not in BESIDE and file is not None:
            yield wanted.pop(key), member.name, file.read()


def _lhotse_recordings(manifest: Path) -> Iterator[Undecoded]:
    from lhotse import CutSet  # heavy, and only needed for such manifests

    let_lhotse_read_sphere()
    try:
        with gzip.open(manifest) as lines:
            total = sum(1 for _ in lines)
        for cut in track(CutSet.from_jsonl_lazy(manifest), f"decoding {manifest.name}", total, transient=True):
            text = " ".join(s.text or "" for s in cut.supervisions)
            speaker = next((s.speaker for s in cut.supervisions if s.speaker), "")
            custom = getattr(cut, "custom", None) or {}
            corpus = str(custom.get("corpus", manifest.name.removesuffix(".jsonl.gz")))
            yield cut.id, Utterance(cut.id, text, speaker, corpus, 0, 0), partial(_decode_cut, cut)
    except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
        raise CorpusError(f"{manifest}: not a readable CutSet ({error})") from error


def let_lhotse_read_sphere() -> None:
    """Have lhotse read NIST SPHERE files (.sph) by itself, and call the program sph2pipe only for compressed ones."""
    from lhotse.audio.backend import (
        CompositeAudioBackend,
        LibsndfileBackend,
        get_default_audio_backend,
        set_current_audio_backend,
    )

    set_current_audio_backend(CompositeAudioBackend([LibsndfileBackend(), get_default_audio_backend()]))


def _decode_cut(cut: Any) -> Samples:
    """Part of a recording that lhotse knows, mono at 16 kHz; raises CorpusError."""
    from lhotse.audio.utils import AudioLoadingError, DurationMismatchError

    try:
        audio = cut.resample(SAMPLE_RATE).load_audio().mean(axis=0)
    except (AudioLoadingError, DurationMismatchError, OSError, ValueError, RuntimeError, AssertionError) as error:
        raise CorpusError(f"{cut.id}: not a readable recording ({error})") from error
    samples: Samples = np.clip(audio * 32768.0, -32768, 32767).astype(np.int16)
    return samples


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
