"""What the load generator says: clips of one length, joined from recorded or synthesized utterances. 16 kHz s16le.

Knows nothing of servers.
"""

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from mocha_client.sources import DECODED, SourceError, decoded_pieces, piece_bytes

BESIDE = ("json", "txt", "lab", "trn", "csv", "tsv")  # files of a shard that are no recordings
BYTES_PER_MS = piece_bytes(DECODED, 1)
SENTENCES = (
    "the weather is fine today and the road to the harbour is open",
    "she had your dark suit in greasy wash water all year",
    "please send the second letter to the office before noon",
    "nobody knew how the story would end when it began",
    "a streaming recogniser writes down every word as it is heard",
    "seven boats left the bay and only five of them came back",
    "turn left at the old mill and then follow the river",
    "the museum opens at nine and closes at half past six",
)
VOICES = (("en", "150"), ("en-us", "170"), ("en-gb-x-rp", "130"), ("en-gb-scotland", "160"))  # espeak-ng: name, rate


def recorded(manifest: Path, count: int, seconds: float) -> list[bytes]:
    """`count` clips of `seconds` each, joined from the recordings of a manifest (JSON lines with key and shard).

    Clips begin at evenly spaced recordings and go on with the ones after; a short manifest is used again from the
    start. Raises SourceError for a manifest or shard that cannot be read.
    """
    try:
        rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line]
        places = [(str(row["key"]), manifest.parent / row["shard"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{manifest}: not a readable manifest ({error})") from error
    if not places:
        raise SourceError(f"{manifest}: lists no recordings")
    shards: dict[Path, dict[str, bytes]] = {}

    def recording(number: int) -> bytes:
        key, path = places[number % len(places)]
        if path not in shards:
            shards[path] = _members(path)
        if key not in shards[path]:
            raise SourceError(f"{path}: has no recording {key}")
        try:
            return _decoded(shards[path][key])
        except SourceError as error:
            raise SourceError(f"{path}: recording {key} is no audio that can be decoded") from error

    step = max(1, len(places) // count)
    return [_joined(recording, number * step, seconds) for number in range(count)]


def synthesized(count: int, seconds: float) -> list[bytes]:
    """`count` clips of `seconds` each, spoken by espeak-ng or flite; raises SourceError where neither is installed."""
    known: dict[int, bytes] = {}

    def spoken(number: int) -> bytes:
        place = number % (len(SENTENCES) * len(VOICES))
        if place not in known:
            known[place] = _speak(SENTENCES[place % len(SENTENCES)], *VOICES[place // len(SENTENCES)])
        return known[place]

    return [_joined(spoken, number * 3, seconds) for number in range(count)]


def _joined(utterance: Callable[[int], bytes], first: int, seconds: float) -> bytes:
    size, clip, number = int(seconds * 1000) * BYTES_PER_MS, bytearray(), first
    while len(clip) < size:
        clip += utterance(number)
        number += 1
    return bytes(clip[:size])


def _members(path: Path) -> dict[str, bytes]:
    """The recordings of a tar shard by name without suffix."""
    try:
        with tarfile.open(path) as tar:
            return dict(_recordings(tar))
    except (OSError, tarfile.TarError) as error:
        raise SourceError(f"{path}: not a readable shard ({error})") from error


def _recordings(tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in tar:
        key, _, suffix = member.name.removeprefix("./").rpartition(".")
        file = tar.extractfile(member)
        if suffix not in BESIDE and file is not None:
            yield key, file.read()


def _speak(sentence: str, voice: str, rate: str) -> bytes:
    if shutil.which("espeak-ng"):
        command = ["espeak-ng", "-v", voice, "-s", rate, "--stdout", sentence]
    elif shutil.which("flite"):
        command = ["flite", "-t", sentence, "-o", "/dev/stdout"]
    else:
        raise SourceError("give a --manifest of recorded speech, or install espeak-ng or flite to synthesize some")
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        raise SourceError(f"{command[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return _decoded(done.stdout) + bytes(300 * BYTES_PER_MS)


def _decoded(data: bytes) -> bytes:
    return b"".join(decoded_pieces(io.BytesIO(data), 1000))
