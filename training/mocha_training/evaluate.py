"""Measures a recogniser on a corpus: WER, CER, CTC branch, emission latency, token counts, speed. No training."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jiwer
import numpy as np
import torch
from rapidfuzz.distance import Levenshtein
from torch import Tensor

from mocha_model.beam import BeamConfig
from mocha_model.config import SAMPLE_RATE
from mocha_model.emissions import Emission, SpeechGate, WordAssembler, final, text_of
from mocha_model.joint import JointConfig
from mocha_model.model import SpeechModel
from mocha_model.offline import decode_softly
from mocha_model.recognizer import Recognizer
from mocha_model.scorers import Fusion
from mocha_model.tokenizer import Tokenizer, split_text
from mocha_training.data import Batch, Corpus, collate
from mocha_training.losses import ctc_boundaries

BATCH_ROWS = 16
BATCH_SECONDS = 240  # with padding; a longer recording is read alone
Decoding = Literal["online", "soft"]


@dataclass(frozen=True)
class Beam:
    """Online decoding by beam or joint search, with scorers; or greedily, and a joint search settles each segment."""

    config: BeamConfig | JointConfig
    fusion: Fusion
    settles: bool = False

    @property
    def name(self) -> str:
        """What a report calls it."""
        return "settled" if self.settles else "joint" if isinstance(self.config, JointConfig) else "beam"


@dataclass(frozen=True)
class Result:
    """One utterance: reference, what each branch read, and by how much each matched symbol came late (ms).

    `evidence` is that of each word of the hypothesis (see `mocha_model.confidence`); of none where decoding is soft.
    """

    key: str
    corpus: str
    reference: str
    hypothesis: str
    ctc: str
    latencies_ms: tuple[float, ...]
    evidence: tuple[float, ...] = ()


def collapse(ids: Tensor, tokenizer: Tokenizer) -> str:
    """Best-path CTC text of label ids [T]: repeats merged, blanks dropped."""
    return plain(tokenizer, torch.unique_consecutive(ids).tolist())


def plain(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of ids with single spaces."""
    return " ".join(tokenizer.decode(ids).split())


def symbol_latencies(
    emissions: list[Emission], reference: list[str], boundaries: list[int], frame_ms: float, ahead: int = 0
) -> tuple[float, ...]:
    """Emission frame minus CTC end frame, in ms, of the symbols that hypothesis and reference share; no spaces.

    With the frames `ahead` that the encoder hears before it puts out each.
    """
    spoken = [e for e in emissions if not e.end_of_segment]
    hypothesis = [e.text.strip() or e.text for e in spoken]
    late = []
    for block in Levenshtein.opcodes(hypothesis, reference):
        if block.tag != "equal":
            continue
        for h, r in zip(range(block.src_start, block.src_end), range(block.dest_start, block.dest_end), strict=True):
            known = spoken[h].certain
            certain = spoken[h].frame if known is None else known
            if reference[r] != " " and boundaries[r] >= 0:
                late.append((certain + ahead - boundaries[r]) * frame_ms)
    return tuple(late)


@dataclass(frozen=True)
class _Read:
    """What one way of decoding makes of a batch."""

    texts: list[str]
    emissions: list[list[Emission]]  # empty where nothing is emitted in time
    seconds: float


def _recognizer(model: SpeechModel, tokenizer: Tokenizer, decoding: Literal["online"] | Beam) -> Recognizer:
    """What decodes so; to be made once, since it copies the encoder and makes integers of its weights."""
    if not isinstance(decoding, Beam):
        return Recognizer(model, tokenizer)
    settled = decoding.config if decoding.settles and isinstance(decoding.config, JointConfig) else None
    return Recognizer(model, tokenizer, None, None if settled else decoding.config, decoding.fusion, settled=settled)


def _decode_softly(model: SpeechModel, tokenizer: Tokenizer, batch: Batch) -> _Read:
    began = time.perf_counter()
    memory, num_memory = model.encode(*model.features(batch.samples, batch.num_samples))
    found = decode_softly(model.decoder, memory, num_memory)
    seconds = time.perf_counter() - began
    return _Read([plain(tokenizer, ids) for ids in found], [[] for _ in found], seconds)


def _decode(recognizer: Recognizer, batch: Batch) -> _Read:
    began = time.perf_counter()
    first, state = recognizer.step(batch.samples, batch.num_samples, recognizer.init_state(len(batch.samples)))
    rest, _ = recognizer.flush(state, torch.ones_like(batch.num_samples, dtype=torch.bool))
    seconds = time.perf_counter() - began
    least = recognizer.least_evidence
    emissions = [SpeechGate(least).push(a + b) for a, b in zip(first, rest, strict=True)]
    return _Read([text_of(row) for row in emissions], emissions, seconds)


def _batches(order: Sequence[int], corpus: Corpus) -> Iterator[list[int]]:
    """The utterances `order`, shortest first, cut into batches."""
    batch: list[int] = []
    for i in order:
        seconds = corpus.utterances[i].num_samples / SAMPLE_RATE
        if batch and (len(batch) == BATCH_ROWS or (len(batch) + 1) * seconds > BATCH_SECONDS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@torch.inference_mode()
def transcribe_corpus(
    model: SpeechModel,
    tokenizer: Tokenizer,
    corpus: Corpus,
    decoding: Decoding | Beam = "online",
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[list[Result], float]:
    """`decoding` and the CTC branch of every utterance; returns results and seconds of decoding."""
    model.eval()
    order = sorted(range(len(corpus.utterances)), key=lambda i: corpus.utterances[i].num_samples)
    frame_ms = 1000 * model.config.frame_samples / SAMPLE_RATE
    recognizer = None if decoding == "soft" else _recognizer(model, tokenizer, decoding)
    results, spent = [], 0.0
    for indices in _batches(order, corpus):
        chosen, audio = [corpus.utterances[i] for i in indices], [corpus.audio(i) for i in indices]
        batch = collate(audio, [u.text for u in chosen], tokenizer).to(next(model.parameters()).device)
        read = _decode(recognizer, batch) if recognizer else _decode_softly(model, tokenizer, batch)
        spent += read.seconds
        memory, num_frames = model.encode(*model.features(batch.samples, batch.num_samples))
        log_probs = model.ctc_log_probs(memory)
        ends = ctc_boundaries(log_probs, num_frames, batch.tokens, batch.num_tokens)
        for row, u in enumerate(chosen):
            ctc_text = collapse(log_probs[row, : int(num_frames[row])].argmax(1), tokenizer)
            symbols = split_text(u.text, tokenizer.units)
            live = [e for e in read.emissions[row] if not e.revises]
            late = symbol_latencies(live, symbols, ends[row].tolist(), frame_ms, model.config.encoder.look_ahead_frames)
            assembler = WordAssembler(frame_ms / 1000)
            words = [word for emission in final(read.emissions[row]) for word in assembler.push(emission)]
            sure = tuple(math.log(word.confidence) for word in words)
            results.append(Result(u.key, u.corpus, u.text, read.texts[row], ctc_text, late, sure))
        progress(len(chosen))
    return results, spent


def _percentiles(values: list[float]) -> dict[str, float | None]:
    points = {"p50": 50, "p90": 90, "p99": 99}
    return {name: float(np.percentile(values, q)) if values else None for name, q in points.items()}


def summarize(results: list[Result], fold: Callable[[str], str] = str) -> dict[str, Any]:
    """Figures over some results: error rates are ratios, latencies milliseconds.

    What is read where a reference is empty counts as inserted; where all are empty, rates are None. What stands between
    spaces counts as a word: where the units are phones, WER is the phone error rate. The texts are passed through
    `fold` first. ``tokens_per_reference`` is a ratio of characters.
    """
    references = [fold(r.reference) for r in results]
    hypotheses, ctc = [fold(r.hypothesis) for r in results], [fold(r.ctc) for r in results]
    said = any(reference.split() for reference in references)
    return {
        "utterances": len(results),
        "wer": jiwer.wer(references, hypotheses) if said else None,
        "cer": jiwer.cer(references, hypotheses) if said else None,
        "ctc_wer": jiwer.wer(references, ctc) if said else None,
        "ctc_cer": jiwer.cer(references, ctc) if said else None,
        "tokens_per_reference": sum(map(len, hypotheses)) / max(1, sum(map(len, references))),
        "emission_latency_ms": _percentiles([late for r in results for late in r.latencies_ms]),
    }


def evaluate_corpus(
    model: SpeechModel,
    tokenizer: Tokenizer,
    corpus: Corpus,
    decoding: Decoding | Beam | None = None,
    progress: Callable[[int], None] = lambda done: None,
    fold: Callable[[str], str] = str,
) -> tuple[dict[str, Any], list[Result]]:
    """The whole report (see `summarize`), with ``rtf`` (decoding time over audio time) and ``by_corpus``.

    `decoding` is online where the attention allows it, unless given.
    """
    chosen: Decoding | Beam = decoding or ("online" if model.decoder.attention.is_online else "soft")
    results, spent = transcribe_corpus(model, tokenizer, corpus, chosen, progress)
    names = sorted({r.corpus for r in results})
    report = summarize(results, fold) | {
        "decoding": chosen.name if isinstance(chosen, Beam) else chosen,
        "rtf": spent / corpus.seconds,
        "hours": corpus.seconds / 3600,
        "sample_rate": SAMPLE_RATE,
        "by_corpus": {name: summarize([r for r in results if r.corpus == name], fold) for name in names},
    }
    return report, results


def write_hypotheses(path: Path, results: list[Result]) -> None:
    """What was said and what was read of each utterance, as JSON lines."""
    rows = [{"key": r.key, "reference": r.reference, "hypothesis": r.hypothesis, "ctc": r.ctc} for r in results]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
