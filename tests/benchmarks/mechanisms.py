"""Every attention mechanism from the same weights, with the same batches to learn from: word errors, latency, cost.

Each begins as a checkpoint's network, whose encoder, normalisation and CTC head stay as they are; attention and decoder
are trained on, in expectation as in the papers, and MoChA along the CTC path too. Of the checkpoint's two energies
softmax takes the chunk's, hard monotonic attention the monotonic one, the others both. Step costs are CPU time of one
thread. Then the dev split is read greedily, online and softly. Needs recorded speech. Run it as
`python tests/benchmarks/mechanisms.py --data $MOCHA_SPEECH --steps 1200` (writes docs/attention/mechanisms.json); a
mechanism that is in the file already is not trained again.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mocha_model.checkpoint import load_checkpoint
from mocha_model.config import SAMPLE_RATE, AttentionConfig
from mocha_model.model import SpeechModel
from mocha_training.augment import Augmenter
from mocha_training.data import load_corpus, trainable
from mocha_training.evaluate import Result, evaluate_corpus, summarize
from mocha_training.recipes import plain
from mocha_training.trainer import Trainer

MECHANISMS: dict[str, dict[str, object]] = {
    "softmax": {"mechanism": "softmax"},
    "monotonic": {"mechanism": "monotonic"},
    "mocha w = 2": {"mechanism": "mocha", "chunk_width": 2},
    "mocha w = 4": {"mechanism": "mocha", "chunk_width": 4},
    "mocha w = 8": {"mechanism": "mocha", "chunk_width": 8},
    "matcha": {"mechanism": "matcha", "chunk_width": 8},
    "mocha w = 4, along the path": {"mechanism": "mocha", "chunk_width": 4},
}
PAPERS = {
    "ctc": 33.4,
    "monotonic": 17.4,
    "softmax": 14.2,
    "mocha w = 2": 13.9,
}  # % on WSJ (Chiu & Raffel 2018, table 1)
MAX_SECONDS = 6.0  # of an utterance in training


def begin_with(weights: dict[str, torch.Tensor], mechanism: str) -> dict[str, torch.Tensor]:
    """The weights of a MoChA checkpoint with those of its energies that `mechanism` has."""
    which = {"softmax": [1], "monotonic": [0]}.get(mechanism, [0, 1])
    energies = {name: w for name, w in weights.items() if ".attention.energies." in name}
    return weights | {name: w.unflatten(0, (2, -1))[which].flatten(0, 1) for name, w in energies.items()}


def train_one(name: str, checkpoint: Path | None, data: Path, steps: int) -> dict[str, Any]:
    """Figures of one mechanism: `wer` and `soft_wer` are ratios, `step_s` seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    start = load_checkpoint(checkpoint)
    sizes = start.model.config.with_dropout(0.0)
    model = SpeechModel(sizes.with_attention(**AttentionConfig().model_dump() | MECHANISMS[name]))
    model.load_state_dict(begin_with(start.model.state_dict(), str(MECHANISMS[name]["mechanism"])))
    config = plain().model_copy(
        update={
            "train_encoder": False,
            "attention": "path" if name.endswith("path") else "expected",
            "steps": steps,
            "batch_seconds": 60,
            "max_seconds": MAX_SECONDS,
            "learning_rate": 1e-3,
            "warmup_steps": 50,
            "noise_full_at": 0.0,
            "save_every": 1_000_000,
            "evaluate_every": 1_000_000,
        }
    )
    corpus = trainable(load_corpus(data / "train.jsonl"), config.min_seconds, config.max_seconds)
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(config, model, start.tokenizer, Augmenter(config.augment, corpus), None, Path(directory))
        began = time.process_time()
        trainer.run()
        step_s = (time.process_time() - began) / steps
    dev = load_corpus(data / "dev.jsonl")
    short = {u.key for u in dev.utterances if u.num_samples <= MAX_SECONDS * SAMPLE_RATE}

    def short_wer(results: list[Result]) -> float:
        wer: float = summarize([r for r in results if r.key in short])["wer"]
        return wer

    soft, results = evaluate_corpus(model, start.tokenizer, dev, "soft")
    figures = {
        "steps": steps,
        "hours": trainer.heard_s / 3600,
        "step_s": step_s,
        "soft_wer": soft["wer"],
        "soft_short_wer": short_wer(results),
        "soft_rtf": soft["rtf"],
        "ctc_wer": soft["ctc_wer"],
    }
    if model.decoder.attention.is_online:
        online, results = evaluate_corpus(model, start.tokenizer, dev, "online")
        figures |= {"wer": online["wer"], "short_wer": short_wer(results), "rtf": online["rtf"]}
        figures |= {"latency_ms": online["emission_latency_ms"]}
    return figures


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    head = (
        "mechanism",
        "steps",
        "s per step",
        "WER % online (short)",
        "WER % soft (short)",
        "late p50 / p90 ms",
        "RTF",
        "papers, WSJ %",
    )
    rows = []
    for name, f in found.items():
        late = f.get("latency_ms")
        rtf = f.get("rtf", f["soft_rtf"])
        cells = (
            name,
            str(f["steps"]),
            f"{f['step_s']:.3f}",
            f"{100 * f['wer']:.1f} ({100 * f['short_wer']:.1f})" if "wer" in f else "",
            f"{100 * f['soft_wer']:.1f} ({100 * f['soft_short_wer']:.1f})",
            f"{late['p50']:.0f} / {late['p90']:.0f}" if late and late["p50"] is not None else "",
            f"{rtf:.4f}",
            str(PAPERS.get(name, "")),
        )
        rows.append(cells)
    ctc = next(iter(found.values()))["ctc_wer"]
    rows.append(("ctc, the encoder's own", "", "", f"{100 * ctc:.1f}", "", "", "", str(PAPERS["ctc"])))
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Train, read, print; keep what is done after each mechanism."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, help="checkpoint; the bundled one if not given")
    parser.add_argument("--steps", type=int, default=1200, help="of training, each of about a minute of audio")
    parser.add_argument("--jobs", type=int, default=2, help="mechanisms trained at the same time, a core each")
    parser.add_argument("--out", type=Path, default=Path("docs/attention"))
    options = parser.parse_args()
    console = Console(stderr=True)
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / "mechanisms.json"
    found: dict[str, dict[str, Any]] = json.loads(target.read_text()) if target.is_file() else {}
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(train_one, name, options.encoder, options.data, options.steps): name
            for name in sorted(MECHANISMS, key=lambda name: name != "matcha")  # by far the slowest: first
            if name not in found
        }
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            found = {name: found[name] for name in MECHANISMS if name in found}
            target.write_text(json.dumps(found, indent=1) + "\n")
            console.print(f"{jobs[job]}: done, {len(found)} of {len(MECHANISMS)}")
    print(table(found))


if __name__ == "__main__":
    main()
