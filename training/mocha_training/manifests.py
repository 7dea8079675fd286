"""Manifests: what recordings a corpus has, and what decodes each of them.

A corpus directory holds ``SPLIT.jsonl`` (key, shard, text, speaker, corpus, duration) and tar shards of ``KEY.ogg``;
any lhotse CutSet (``*.jsonl.gz``) is read as well.
"""

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from mocha_model.config import SAMPLE_RATE

Samples = NDArray[np.int16]
BESIDE = ("json", "txt", "lab", "trn", "csv", "tsv")  # files of a shard that are no recordings
# PyAV before 19 reads no file whose tags are not UTF-8 unless told to; later ones do, and cannot be told.
TAGS: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}


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


# A recording's name, what is known of it before it is decoded, and what decodes it.
Undecoded = tuple[str, Utterance, Callable[[], Samples]]


def find_manifest(directory: Path, split: str) -> Path:
    """``SPLIT.jsonl`` of a corpus directory, or the CutSet ``SPLIT.jsonl.gz`` if there is only that."""
    shards, cuts = directory / f"{split}.jsonl", directory / f"{split}.jsonl.gz"
    return cuts if cuts.is_file() and not shards.is_file() else shards


def is_cut_set(manifest: Path) -> bool:
    """Whether lhotse wrote it."""
    return manifest.name.endswith(".jsonl.gz")


def recordings_of(manifest: Path) -> Iterator[Undecoded]:
    """Those that `manifest` names, with progress; raises CorpusError."""
    return _lhotse_recordings(manifest) if is_cut_set(manifest) else _shard_recordings(manifest)


def rows_of(manifest: Path) -> list[dict[str, Any]]:
    """The lines of ``SPLIT.jsonl``; raises CorpusError."""
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
    for row in rows_of(manifest):
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
