"""Pictures of what a model does: features, expected and hard alignments, loss curves. Draws, never decides."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib.figure import Figure
from torch import Tensor

from mocha_model.config import SAMPLE_RATE
from mocha_model.emissions import Emission
from mocha_model.model import SpeechModel
from mocha_model.offline import decode_softly
from mocha_model.recognizer import Recognizer
from mocha_model.tokenizer import Tokenizer

LONGEST_S = 60  # of a picture that can be read, and whose attention has room


def has_room(num_samples: int) -> bool:
    """Whether so long a recording can be drawn by `draw_alignment`."""
    return num_samples <= LONGEST_S * SAMPLE_RATE


@torch.no_grad()
def draw_alignment(model: SpeechModel, tokenizer: Tokenizer, samples: Tensor, text: str | None = None) -> Figure:
    """What the attention does with `samples` [N] float32, as in the papers' figures 2 and 4; for any mechanism.

    Features, p, alpha and beta under `text` (under what the model itself reads if None), and the hard path of online
    decoding: its characters at their frames.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    x, num_samples = samples[None].to(device), torch.tensor([len(samples)], device=device)
    frames, num_frames = model.features(x, num_samples)
    memory, num_memory = model.encode(frames, num_frames)
    online = model.decoder.attention.is_online
    emissions = Recognizer(model, tokenizer).transcribe(x[0]) if online else []
    shown = [e for e in emissions if not e.end_of_segment]
    ids = tokenizer.encode(text) if text is not None else tokenizer.encode("".join(e.text for e in shown))
    if text is None and not online:
        ids = decode_softly(model.decoder, memory, num_memory)[0]
    tokens = torch.tensor([[*ids, tokenizer.eos_id]], device=device)
    out = model.teacher_forced(memory, num_memory, tokens, torch.tensor([len(ids) + 1], device=device))
    model.train(was_training)
    panels = {"p": out.p, "alpha": out.alpha, "beta": out.beta} if online else {"softmax attention": out.beta}
    return _draw(frames[0, :, : model.config.features.num_mels], panels, tokenizer, ids, shown, model)


def _draw(
    features: Tensor,
    panels: dict[str, Tensor],
    tokenizer: Tokenizer,
    ids: list[int],
    shown: list[Emission],
    model: SpeechModel,
) -> Figure:
    figure = Figure(figsize=(11, 3 + 2.6 * len(panels)), layout="constrained")
    axes = figure.subplots(1 + len(panels), 1, sharex=True)
    ratio = model.config.encoder.subsampling
    num_frames = next(iter(panels.values())).shape[2]
    span = (-0.5, num_frames - 0.5)
    axes[0].imshow(
        features.T.cpu().numpy(),
        origin="lower",
        aspect="auto",
        cmap="magma",
        extent=(-0.5, features.shape[0] / ratio - 0.5, 0, features.shape[1]),
    )
    axes[0].set(ylabel="mel band", xlim=span)
    for e in shown:
        axes[0].annotate(e.text, (e.frame, features.shape[1]), ha="center", va="bottom", fontsize=7)
    labels = [tokenizer.symbol(i) for i in ids] + ["eos"]
    same_text = [e.text for e in shown] == labels[:-1]
    for axis, (name, values) in zip(axes[1:], panels.items(), strict=True):
        axis.imshow(values[0].cpu().numpy(), aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axis.set(ylabel=name, xlim=span)
        axis.set_yticks(range(len(labels)), labels, fontsize=min(7, 220 / len(labels)))
        if same_text:
            axis.plot([e.frame for e in shown], range(len(shown)), ".", color="red", markersize=3)
        else:
            for e in shown:
                axis.axvline(e.frame, color="white", alpha=0.15, linewidth=1)
    frame_ms = 1000 * model.config.frame_samples / model.config.features.sample_rate
    axes[-1].set(xlabel=f"encoder frame ({frame_ms:.0f} ms); at the top and in red: decoded online")
    return figure


def draw_losses(log: Path, target: Path) -> None:
    """Loss curves and dev error rates of a run's ``log.jsonl`` to a PNG or SVG.

    Lines that are torn, where the run was killed, are passed over.
    """
    written = list[dict[str, Any]]()
    for line in log.read_text().splitlines():
        with suppress(ValueError):
            written.append(json.loads(line))
    last = {(row["step"], "dev_wer" in row): row for row in written}  # a resumed run takes some steps again
    rows = [last[key] for key in sorted(last)]
    measured = {
        name.removeprefix("dev_"): points
        for name in ("dev_wer", "dev_cer", "dev_ctc_wer", "dev_ctc_cer")
        if (points := [(row["step"], 100 * row[name]) for row in rows if name in row])
    }
    figure = Figure(figsize=(10 if measured else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if measured else 1, squeeze=False)[0]
    for name in ("ctc", "ce", "quantity", "path", "drawn_wer"):
        points = [(row["step"], row[name]) for row in rows if name in row and "dev_wer" not in row]
        if not points:
            continue
        smooth, curve = points[0][1], []
        for step, value in points:
            smooth = 0.9 * smooth + 0.1 * value
            curve.append((step, smooth))
        axes[0].plot(*zip(*curve, strict=True), label=name)
    axes[0].set(xlabel="step", ylabel="loss per token; drawn_wer is a ratio", yscale="log")
    axes[0].legend()
    for name, points in measured.items():
        axes[1].plot(*zip(*points, strict=True), marker="o", label=name)
    if measured:
        axes[1].set(xlabel="step", ylabel="% on dev", ylim=(0, 110))
        axes[1].legend()
    figure.savefig(target, dpi=110)
