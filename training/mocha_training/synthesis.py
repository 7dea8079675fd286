"""Speech from text alone: every free English voice on the machine reads sentences into shards that `train` takes.

The voices are programs (`voices`) and networks (`neural_voices`, `piper_voices`), found when asked for. Rate and pitch
vary: a voice is asked to speak slower or faster, and its samples are then played faster or slower, which moves its
pitch and formants as a shorter or longer vocal tract would. Knows nothing of recognisers.
"""

import heapq
import io
import json
import logging
import math
import os
import re
import tarfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np

from mocha_model.config import SAMPLE_RATE
from mocha_model.tokenizer import normalize_text
from mocha_training.data import cache_directory
from mocha_training.distortion import Audio, change_speed
from mocha_training.neural_voices import Kokoro, hibari_voices, kokoro_voices
from mocha_training.piper_voices import piper_voices
from mocha_training.voices import PACKAGES, Program, SynthesisError, Voice, program_voices

if TYPE_CHECKING:
    from nemo_text_processing.text_normalization.normalize import Normalizer

UTTERANCES_PER_SHARD = 1000
AT_ONCE = 64  # sentences in work at a time
FAILURES = 10  # in a row, before it is the machine's fault and not the sentence's
SENTENCE_COST = 20  # in characters, beside those that it has: else short ones come first
Recording = tuple[bytes, float]  # a file, and how many seconds it lasts
RATES, PITCHES = (0.62, 1.12), (0.86, 1.28)  # factors drawn from these ranges: readers are slower, children higher
SILENCE, MARGIN = 0.003, SAMPLE_RATE // 10  # amplitude; samples kept around the speech
OPUS_FRAME = SAMPLE_RATE // 50
READABLE = re.compile(r"[A-Za-z\s.,;:!?'\"()\u2018\u2019\u201c\u201d\u2013\u2014-]*")
# No digit, symbol or abbreviation: no full stop but at the end.
PLAIN = re.compile(r"[A-Za-z\s,;:!?'\"()\u2018\u2019\u201c\u201d\u2013\u2014-]*\.?[\"\u201d\u2019']?\s*")


def find_voices(
    kokoro: Path | None = None, programs: Collection[Program] = (), piper: Path | None = None
) -> list[Voice]:
    """Every English voice that is installed, or in the directories `kokoro` and `piper`; of `programs`, if any.

    Raises SynthesisError where there is none.
    """
    voices: list[Voice] = [*program_voices(), *hibari_voices()]
    if kokoro is not None:
        voices += kokoro_voices(Kokoro(kokoro))
    if piper is not None:
        voices += piper_voices(piper)
    voices = [v for v in voices if not programs or v.program in programs]
    if not voices:
        wanted = f" of {', '.join(programs)}" if programs else ""
        raise SynthesisError(
            f"no voice{wanted} is installed; Debian has some in the packages {PACKAGES}, PyPI one in hibari-tts; "
            "docs/recipes.md says where Kokoro's and Piper's are"
        )
    return voices


class Speller:
    """Written text to the words that are spoken: numbers, abbreviations, symbols. Plain sentences stay as they are."""

    def __init__(self) -> None:
        self._normalizer: Normalizer | None = None

    def __call__(self, text: str) -> str | None:
        """What to say for `text`, or None where something in it cannot be read aloud.

        Raises:
            SynthesisError: it is needed for the first time, and the package is not installed.

        """
        if PLAIN.fullmatch(text):
            return text
        if self._normalizer is None:
            self._normalizer = _load_normalizer()
        spoken = str(self._normalizer.normalize(text))
        return spoken if READABLE.fullmatch(spoken) else None


def _load_normalizer() -> "Normalizer":
    try:
        from nemo_text_processing.text_normalization.normalize import Normalizer
    except ImportError as error:
        raise SynthesisError("numbers and abbreviations in text need the extra `synthesis` of mocha-asr") from error
    logging.getLogger("NeMo-text-processing").setLevel(logging.WARNING)
    grammars = cache_directory() / "normalizer"
    grammars.mkdir(parents=True, exist_ok=True)
    return Normalizer(input_case="cased", lang="en", cache_dir=str(grammars))


@dataclass(frozen=True)
class Reading:
    """A sentence, and who reads it how."""

    written: str
    spoken: str
    voice: Voice
    rate: float
    pitch: float

    def speak(self) -> Audio:
        """Samples [N] float32 at 16 kHz, without the silence around; raises SynthesisError."""
        audio = change_speed(self.voice.speak(self.spoken, self.rate / self.pitch), self.pitch)
        loud = np.nonzero(np.abs(audio) > SILENCE)[0]
        return audio[max(0, loud[0] - MARGIN) : loud[-1] + MARGIN] if len(loud) else audio[:0]


def covering(sentences: Sequence[str]) -> Iterator[str]:
    """All of `sentences`, in such an order that any number of the first bring many words, and each of them often.

    A word that n sentences have is worth sqrt(n) log(1 + times said), and the next sentence is the one that adds most
    for its length: the submodular selection of Wei et al. 2014 ("Submodular subset selection for
    large-scale speech training data"), with words as features, by the lazy greedy algorithm.
    """
    words = [sorted(set(normalize_text(sentence).split())) for sentence in sentences]
    worth = {word: math.sqrt(n) for word, n in Counter(word for some in words for word in some).items()}
    said = Counter[str]()

    def gain(index: int) -> float:
        added = sum(worth[w] * math.log1p(1 / (1 + said[w])) for w in words[index])
        return added / (len(sentences[index]) + SENTENCE_COST)

    heap = [(-gain(index), index) for index in range(len(sentences))]  # what each added at most, best first
    heapq.heapify(heap)
    while heap:
        index = heap[0][1]
        now = (-gain(index), index)
        if now > heap[0]:
            heapq.heapreplace(heap, now)
            continue
        heapq.heappop(heap)
        said.update(words[index])
        yield sentences[index]


def plan(
    sentences: Sequence[str],
    voices: Sequence[Voice],
    seed: int,
    left_out: Callable[[str], bool] = lambda spoken: False,
) -> Iterator[Reading]:
    """Endless readings: the sentences, those with new words first, again and again, each time by other voices.

    Sentences that are `left_out` as they are spoken are not read. Programs are drawn evenly, then their voices, for
    espeak-ng has a hundred times as many as the others.
    """
    speller, rng = Speller(), np.random.default_rng(seed)
    programs = {v.program: [w for w in voices if w.program == v.program] for v in voices}
    while True:
        readable = False
        for sentence in covering([sentences[i] for i in rng.permutation(len(sentences))]):
            choices = programs[list(programs)[rng.integers(len(programs))]]
            voice = choices[rng.integers(len(choices))]
            rate, pitch = np.exp(rng.uniform(np.log(RATES[0]), np.log(RATES[1]))), rng.uniform(*PITCHES)
            spoken = speller(sentence)
            if spoken and normalize_text(spoken) and not left_out(spoken):
                readable = True
                yield Reading(sentence, spoken, voice, float(rate), float(pitch))
        if not readable:
            raise SynthesisError("the text has no sentence that can be read aloud, held-out ones aside")


def encode_opus(audio: Audio) -> bytes:
    """Samples [N] float32 at 16 kHz as Opus at 32 kbit/s in Ogg."""
    file = io.BytesIO()
    with av.open(file, "w", format="ogg") as container:
        stream = container.add_stream("libopus", rate=SAMPLE_RATE, layout="mono")
        stream.bit_rate = 32_000
        pcm = (np.clip(audio, -1, 1) * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(pcm, format="s16", layout="mono")
        frame.sample_rate, frame.pts = SAMPLE_RATE, 0
        fifo = av.AudioFifo()
        fifo.write(frame)
        for piece in fifo.read_many(OPUS_FRAME, partial=True):
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


def synthesize(
    sentences: Sequence[str],
    voices: Sequence[Voice],
    hours: float,
    out: Path,
    seed: int = 0,
    progress: Callable[[float], None] = lambda seconds: None,
    left_out: Callable[[str], bool] = lambda spoken: False,
) -> int:
    """Write ``train.jsonl`` and its tar shards, at least `hours` of speech; gives the number of utterances.

    The same arguments and programs give the same speech, but for voices of Piper. `progress` is told the seconds that
    each utterance adds. What is `left_out` is not spoken (see `plan`). A voice that fails on a sentence is passed over,
    and ten of them in a row are an error. What was spoken before an error or an interruption stays, and can be read.

    Raises:
        SynthesisError: there are no voices, or they do not speak.
        FileExistsError: `out` has speech already.

    """
    out.mkdir(parents=True, exist_ok=True)
    manifest = out / "train.jsonl"
    if manifest.exists():
        raise FileExistsError(f"{manifest} exists already")
    seconds, failed = 0.0, 0
    readings = plan(sentences, voices, seed, left_out)
    pool, at_work = ThreadPoolExecutor(os.cpu_count()), deque[tuple[Reading, Future[Recording | SynthesisError]]]()
    with _Shards(out, manifest) as shards, ExitStack() as end:
        end.callback(pool.shutdown, cancel_futures=True)
        while seconds < 3600 * hours:
            for reading in islice(readings, AT_ONCE - len(at_work)):
                at_work.append((reading, pool.submit(_spoken, reading)))
            reading, reader = at_work.popleft()
            spoken = reader.result()
            if isinstance(spoken, SynthesisError):
                failed += 1
                if failed == FAILURES:
                    raise spoken
                continue
            failed = 0
            shards.add(reading, *spoken)
            seconds += spoken[1]
            progress(spoken[1])
    return shards.count


class _Shards:
    """Tar shards and their manifest, written as utterances come; without any, there is no manifest.

    Whenever the program is killed, the shards have what the manifest names.
    """

    def __init__(self, out: Path, manifest: Path) -> None:
        self.count = 0
        self._out, self._path, self._shard, self._all = out, manifest, ExitStack(), ExitStack()

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(self, *exception: object) -> None:
        self._all.close()
        self._shard.close()

    def add(self, reading: Reading, recording: bytes, duration: float) -> None:
        """One more utterance, of `duration` seconds; the manifest names it once the shard has it."""
        name = f"train-{self.count // UTTERANCES_PER_SHARD:03d}.tar"
        if self.count == 0:
            self._manifest = self._all.enter_context(self._path.open("x", encoding="utf-8"))
        if self.count % UTTERANCES_PER_SHARD == 0:
            self._shard.close()
            self._file = self._shard.enter_context((self._out / name).open("wb"))
            self._tar = self._shard.enter_context(tarfile.open(fileobj=self._file, mode="w"))  # noqa: SIM115
        row: dict[str, str | float] = {
            "key": f"synthetic-{self.count:06d}",
            "text": reading.spoken,
            "written": reading.written,
            "speaker": f"{reading.voice.program} {reading.voice.name}",
            "corpus": f"synthetic {reading.voice.program}",
            "duration": round(duration, 3),
        }
        _add(self._tar, f"{row['key']}.ogg", recording)
        _add(self._tar, f"{row['key']}.json", json.dumps(row).encode())
        self._file.flush()
        self._manifest.write(json.dumps({**row, "shard": name}) + "\n")
        self._manifest.flush()
        self.count += 1


def _spoken(reading: Reading) -> Recording | SynthesisError:
    """The recording and its duration in seconds."""
    try:
        audio = reading.speak()
    except SynthesisError as error:
        return error
    if len(audio) < SAMPLE_RATE // 10:
        return SynthesisError(f"{reading.voice} said nothing for {reading.spoken!r}")
    return encode_opus(audio), len(audio) / SAMPLE_RATE


def _add(shard: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    shard.addfile(member, io.BytesIO(data))
