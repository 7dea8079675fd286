"""Main effects of eleven ingredients of training: twelve short runs from one checkpoint.

The design is that of Plackett & Burman (1946): eleven runs have six of the ingredients, one has none; every ingredient
is in six runs, every two of them together in three. So its main effect, the mean of the runs with it less that of the
runs without, is told from all twelve. Interactions are aliased: a third of what two give only together is added to, or
taken from, each of the other nine. What may be chance is Lenth's (1989) margin of error, from his pseudo standard
error: most of eleven ingredients are taken to give little.

All runs take as many steps, at the same rate. Then each model reads the dev split greedily, clean and distorted. Needs
recorded speech and a directory made by `mocha-asr synthesize`:

python tests/benchmarks/ingredients.py --data $MOCHA_SPEECH --synthetic DIR --init CHECKPOINT

Writes docs/training/ingredients.json and .png. Runs that are done are not done again, unless what they share changes.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from robustness import DISTORTIONS, changed, in_rooms, noisy, telephone
from scipy.stats import t as student
from torch import nn

from mocha_model.checkpoint import load_checkpoint
from mocha_training.augment import Augmenter
from mocha_training.config import TrainConfig
from mocha_training.data import Corpus, load_corpus, trainable
from mocha_training.evaluate import evaluate_corpus
from mocha_training.recipes import broaden
from mocha_training.trainer import Trainer

matplotlib.use("Agg")
from matplotlib.figure import Figure

EVERY = 4  # of the dev split, where it is distorted: each so manieth utterance
FIRST_ROW = (1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1)  # of the design; the others are it, turned, and one of all -1
SYNTHETIC, DROPOUT = "synthetic speech", "dropout"


def without(**changes: object) -> Callable[[TrainConfig], TrainConfig]:
    """A recipe less one of its augmentations."""
    return lambda config: config.model_copy(update={"augment": config.augment.model_copy(update=changes)})


LEFT_OUT: dict[str, Callable[[TrainConfig], TrainConfig]] = {
    "speed ± 10 %": without(speed_range=0.0),
    "vocal tracts ± 15 %": without(vocal_tract_range=0.0),
    "rooms, 20 %": without(room_probability=0.0),
    "noise and babble, 20 %": without(noise_probability=0.0),
    "joined utterances, 10 %": without(join_probability=0.0),
    "masks": without(freq_masks=0, time_masks=0),
    "telephone 8 %, codecs 10 %": without(telephone_probability=0.0, codec_probability=0.0),
    "Muon instead of Adam": lambda config: config.model_copy(update={"muon": False}),
    "label smoothing": lambda config: config.model_copy(update={"label_smoothing": 0.0}),
    SYNTHETIC: lambda config: config,
    DROPOUT: lambda config: config,
}


@dataclass(frozen=True)
class Plan:
    """What all runs share."""

    data: Path
    synthetic: Path
    init: Path
    out: Path
    recipe: TrainConfig

    def __str__(self) -> str:
        """All that decides what the runs come to."""
        parts = [hashlib.sha256(self.init.read_bytes()).hexdigest()]
        parts += [hashlib.sha256((d / "train.jsonl").read_bytes()).hexdigest() for d in (self.data, self.synthetic)]
        return json.dumps({"init, data, synthetic": parts, "recipe": self.recipe.model_dump(mode="json")})


def design() -> NDArray[np.int64]:
    """Which run (row) has which ingredient (column): 1 or -1, [12, 11]; columns are orthogonal."""
    turned = [np.roll(FIRST_ROW, n) for n in range(len(FIRST_ROW))]
    return np.array([*turned, -np.ones(len(FIRST_ROW))], dtype=np.int64)


def run(plan: Plan, number: int) -> dict[str, float]:
    """Train one model of the design, and the word errors it makes."""
    torch.set_num_threads(1)
    directory = plan.out / f"run-{number}"
    directory.mkdir(parents=True, exist_ok=True)
    done = directory / "wer.json"
    if not done.is_file():
        with (directory / "output").open("a") as output, contextlib.redirect_stdout(output):
            final = train(plan, dict(zip(LEFT_OUT, design()[number] > 0, strict=True)), directory)
            found = word_errors(plan.data, final)
            last = load_checkpoint(sorted(directory.glob("step-*.safetensors"))[-1])
            report, _ = evaluate_corpus(last.model, last.tokenizer, load_corpus(plan.data / "dev.jsonl"))
        done.write_text(json.dumps(found | {"clean, last checkpoint alone": report["wer"]}))
    wer: dict[str, float] = json.loads(done.read_text())
    return wer


def train(plan: Plan, has: dict[str, bool], directory: Path) -> Path:
    """Train with the ingredients that `has` names; the averaged model."""
    config = plan.recipe
    for name, leave_out in LEFT_OUT.items():
        config = config if has[name] else leave_out(config)
    start = load_checkpoint(plan.init)
    for module in start.model.modules():
        if isinstance(module, nn.Dropout) and not has[DROPOUT]:
            module.p = 0.0
    directories = [plan.data, plan.synthetic] if has[SYNTHETIC] else [plan.data]
    everything = Corpus.joined([load_corpus(d / "train.jsonl") for d in directories])
    corpus = trainable(everything, config.min_seconds, config.max_seconds)
    augmenter = Augmenter(config.augment, corpus, load_corpus(plan.data / "noise.jsonl"))
    trainer = Trainer(config, start.model, start.tokenizer, augmenter, None, directory, "cpu", start.provenance)
    trainer.resume()
    trainer.run()
    return directory / "final.safetensors"


def word_errors(data: Path, model: Path) -> dict[str, float]:
    """Greedy WER on the dev split by what was done to it, and that of the CTC branch."""
    checkpoint, dev = load_checkpoint(model), load_corpus(data / "dev.jsonl")
    few, noises = dev.subset(list(range(0, len(dev.utterances), EVERY))), load_corpus(data / "noise.jsonl")
    report, _ = evaluate_corpus(checkpoint.model, checkpoint.tokenizer, dev)
    found = {"clean": report["wer"], "clean, CTC": report["ctc_wer"]}
    found |= {f"clean, {name}": part["wer"] for name, part in report["by_corpus"].items()}
    kinds = {
        "5 dB": noisy(few, noises, 5),
        "rooms": in_rooms(few),
        "telephone": changed(few, telephone),
        "Opus, 6 kbit/s": changed(few, DISTORTIONS["Opus, 6 kbit/s"]),
    }
    for name, corpus in kinds.items():
        found[name] = evaluate_corpus(checkpoint.model, checkpoint.tokenizer, corpus)[0]["wer"]
    return found


def margin_of_error(effects: NDArray[np.float64]) -> float:
    """Lenth's (1989), at 95 %, of `effects` [N], most of which are chance: t of N / 3 degrees of freedom times his PSE.

    The pseudo standard error (PSE) is 1.5 times the median of those sizes that are below 2.5 times as much of all.
    """
    size = np.abs(effects)
    pse = 1.5 * np.median(size[size < 2.5 * 1.5 * np.median(size)])
    return float(student.ppf(0.975, len(effects) / 3) * pse)


def draw(effects: dict[str, NDArray[np.float64]], margins: dict[str, float], target: Path) -> None:
    """What each ingredient gives on clean recordings and, beside it, where they are distorted."""
    names = list(LEFT_OUT)[::-1]
    figure = Figure(figsize=(2.2 + 2.0 * len(effects), 3.8), layout="constrained")
    for axes, (kind, gives) in zip(figure.subplots(1, len(effects), sharey=True), effects.items(), strict=True):
        axes.axvspan(-margins[kind], margins[kind], color="0.9")
        axes.barh(names, gives[::-1], color=["tab:green" if give < 0 else "tab:red" for give in gives[::-1]])
        axes.axvline(0, color="0.3", linewidth=0.8)
        axes.set(title=kind, xlabel="WER, points")
    figure.suptitle("With the ingredient less without; grey: may be chance (95 %)", fontsize=10)
    figure.savefig(target, dpi=100)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--synthetic", type=Path, required=True)
    parser.add_argument("--init", type=Path, required=True, help="checkpoint that all runs start from")
    parser.add_argument("--steps", type=int, default=130)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/ingredients"))
    parser.add_argument("--out", type=Path, default=Path("docs/training"))
    options = parser.parse_args()
    length = {"steps": options.steps, "save_every": max(1, options.steps // 20), "warmup_steps": options.steps // 5}
    recipe = broaden().model_copy(update=length | {"learning_rate": 1.5e-3})
    plan = Plan(options.data, options.synthetic, options.init, options.runs, recipe)
    options.runs.mkdir(parents=True, exist_ok=True)
    kept = options.runs / "plan.json"
    if kept.is_file() and kept.read_text() != str(plan):
        parser.error(f"{options.runs} has runs of another checkpoint, corpus or recipe; give --runs another directory")
    kept.write_text(str(plan))
    for directory in (options.data, options.synthetic):
        load_corpus(directory / "train.jsonl")  # decoded once, before the runs ask for it together
    table, wers = design(), dict[int, dict[str, float]]()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn, max_tasks_per_child=1) as pool:
        first = pool.submit(word_errors, plan.data, plan.init)
        futures = {pool.submit(partial(run, plan, number)): number for number in range(len(table))}
        for future in track(as_completed(futures), "twelve runs", len(table), console=Console(stderr=True)):
            wers[futures[future]] = future.result()
        before = first.result()
    report(plan, wers, before, options.out)


def report(plan: Plan, wers: dict[int, dict[str, float]], before: dict[str, float], out: Path) -> None:
    """Print, draw and keep what the word errors of the runs come to."""
    table = design()
    kinds = [kind for kind in wers[0] if kind != "clean, last checkpoint alone"]
    points = {kind: np.array([100 * wers[n][kind] for n in range(len(table))]) for kind in wers[0]}
    effects = {kind: table.T @ points[kind] / (len(table) / 2) for kind in kinds}
    margins = {kind: margin_of_error(effects[kind]) for kind in kinds}
    averaging = points["clean"] - points["clean, last checkpoint alone"]
    shown = Table("with it less without, points of WER", *kinds)
    for row, name in enumerate(LEFT_OUT):
        shown.add_row(name, *(f"{effects[kind][row]:+.1f}" for kind in kinds))
    shown.add_row("may be chance, up to", *(f"{margins[kind]:.1f}" for kind in kinds))
    shown.add_row("before", *(f"{100 * before[kind]:.1f}" for kind in kinds))
    shown.add_row("mean of the twelve", *(f"{points[kind].mean():.1f}" for kind in kinds))
    Console(width=200).print(shown)
    uncertain = averaging.std(ddof=1) / np.sqrt(len(table))
    print(f"the last 5 checkpoints averaged less the last alone: {averaging.mean():+.2f} ± {uncertain:.2f}")
    out.mkdir(parents=True, exist_ok=True)
    found = {"wer": {kind: values.tolist() for kind, values in points.items()}, "design": table.tolist()}
    found |= {
        "ingredients": list(LEFT_OUT),
        "before": before,
        "margin_of_error": margins,
        "plan": json.loads(str(plan)),
    }
    found |= {"effects": {kind: values.tolist() for kind, values in effects.items()}}
    (out / "ingredients.json").write_text(json.dumps(found) + "\n")
    drawn = ("clean", "5 dB", "rooms", "telephone", "Opus, 6 kbit/s")
    draw({kind: effects[kind] for kind in drawn}, margins, out / "ingredients.png")


if __name__ == "__main__":
    main()
