"""Pictures of what a model does: features, expected and hard alignments, loss curves. Draws, never decides."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib.figure import Figure

from mocha_model.model import SpeechModel
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer
from mocha_training.data import Corpus, collate


@torch.no_grad()
def draw_training_alignment(model: SpeechModel, tokenizer: Tokenizer, corpus: Corpus, index: int) -> Figure:
    """Features, alpha and beta of one utterance under its reference, with the hard path of online decoding."""
    was_training = model.training
    model.eval()
    audio, text = corpus.audio(index), corpus.utterances[index].text
    batch = collate([audio], [text], tokenizer)
    device = next(model.parameters()).device
    batch = batch.to(device)
    frames, num_frames = model.features(batch.samples, batch.num_samples)
    memory, num_memory = model.encode(frames, num_frames)
    out = model.teacher_forced(memory, num_memory, batch.tokens, batch.num_tokens)
    emissions = Recognizer(model, tokenizer).transcribe(batch.samples[0].cpu()) if device.type == "cpu" else []
    model.train(was_training)
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(3, 1, sharex=False)
    axes[0].imshow(
        frames[0, :, : model.config.features.num_mels].T.cpu().numpy(), origin="lower", aspect="auto", cmap="magma"
    )
    axes[0].set(ylabel="mel band", title=text)
    labels = [*text, "eos"]
    for axis, values, name in ((axes[1], out.alpha, "alpha"), (axes[2], out.beta, "beta")):
        axis.imshow(values[0].cpu().numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axis.set(ylabel=name)
        axis.set_yticks(range(len(labels)), labels, fontsize=6)
    shown = [e for e in emissions if not e.end_of_segment]
    for e in shown:
        axes[1].axvline(e.frame, color="white", alpha=0.15, linewidth=1)
        axes[1].annotate(e.text, (e.frame, -0.6), ha="center", va="bottom", fontsize=7, annotation_clip=False)
    axes[2].set(
        xlabel=f"encoder frame ({1000 * model.config.frame_samples / 16000:.0f} ms); above alpha: decoded online"
    )
    return figure


def draw_losses(log: Path, target: Path) -> None:
    """Loss curves and dev error rates of a run's ``log.jsonl`` to a PNG or SVG."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in ("ctc", "ce", "quantity"):
        points = [(row["step"], row[name]) for row in rows if name in row and "dev_wer" not in row]
        if not points:
            continue
        smooth, curve = points[0][1], []
        for step, value in points:
            smooth = 0.9 * smooth + 0.1 * value
            curve.append((step, smooth))
        left.plot(*zip(*curve, strict=True), label=name)
    left.set(xlabel="step", ylabel="loss per token", yscale="log")
    left.legend()
    for name in ("dev_wer", "dev_cer", "dev_ctc_wer", "dev_ctc_cer"):
        points = [(row["step"], 100 * row[name]) for row in rows if name in row]
        if points:
            right.plot(*zip(*points, strict=True), marker="o", label=name.removeprefix("dev_"))
    right.set(xlabel="step", ylabel="% on dev", ylim=(0, 110))
    right.legend()
    figure.savefig(target, dpi=110)
