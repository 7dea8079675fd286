"""The training loop: batches to losses to steps, with progress, evaluation, checkpoints and exact resume.

Under torchrun every process takes its share of each epoch's batches and the gradients are averaged.

One object owns the run; everything random is seeded by (seed, epoch, batch), so a resumed run is the same run, bit for
bit on a CPU. With a time budget the schedules go on from the seconds spent before, so a resumed run does what was left
of it; but how many steps fit in a second is the machine's, so two such runs are never the same, resumed or not. Knows
nothing of command lines.
"""

import json
import math
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from mocha_model.checkpoint import save_checkpoint
from mocha_model.encoder import MaskedBatchNorm
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer
from mocha_training import losses, pictures, run_directory
from mocha_training.augment import Augmenter
from mocha_training.average import average_checkpoints
from mocha_training.batches import RunBatches
from mocha_training.beginnings import begun_with, refuse_other
from mocha_training.config import TrainConfig
from mocha_training.data import Batch, Corpus
from mocha_training.denominator import character_trigrams, denominator
from mocha_training.evaluate import evaluate_corpus
from mocha_training.optimizers import average_gradients, make_optimizers
from mocha_training.path import cross_entropy, path_losses
from mocha_training.phone_branch import PhoneBranch
from mocha_training.phones import fold_phones
from mocha_training.policy import policy_losses
from mocha_training.spectral import spec_augment, warp_vocal_tract
from mocha_training.weights import noisy_parameters, perturbed

MAX_WORKERS = 16  # that make batches; one makes a thousand times real time and more
LOCK_TIMEOUT_S = 10  # processes that made batches for a run that was killed hold its lock until they notice
MOST_SPOILED = 100  # steps in a row whose gradient is no number, before a run ends
INHERITED = ("name", "steps", "hours_heard", "hours_of_corpus", "corpora", "recipe", "started_from")  # of a provenance


class TrainingError(ValueError):
    """A run that cannot go on; the message says why."""


class Trainer:
    """A run in a directory: ``last.pt`` to resume from, ``log.jsonl``, TensorBoard events, checkpoints.

    ``step-N.safetensors`` are the last ones, ``best.safetensors`` has the fewest errors on dev so far.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: SpeechModel,
        tokenizer: Tokenizer,
        augmenter: Augmenter,
        dev: Corpus | None,
        directory: Path,
        device: str = "cpu",
        started_from: dict[str, Any] | None = None,
    ) -> None:
        """`started_from` is the provenance of the checkpoint that `model` comes from, if it comes from one."""
        attention = model.config.attention
        if config.attention == "path" and (attention.mechanism == "softmax" or attention.energy == "dot"):
            raise ValueError("training along the path needs a monotonic mechanism with additive energies")
        directory.mkdir(parents=True, exist_ok=True)
        self.config, self.tokenizer, self.augmenter, self.dev = config, tokenizer, augmenter, dev
        self.directory, self.device = directory, torch.device(device)
        self.model = model.to(self.device)
        if not config.train_encoder:
            model.encoder.requires_grad_(False)
            model.ctc.requires_grad_(config.ctc_only == 1 and not config.phones_alone)
        torch.manual_seed(config.seed)
        texts = [u.text for u in augmenter.corpus.utterances]
        told_apart = config.denominator_weight and not config.phones_alone
        self.trigrams = character_trigrams(texts, tokenizer).to(self.device) if told_apart else None
        self.phones = PhoneBranch(model, tokenizer, texts) if config.phone_weight else None
        self.parameters = list(model.parameters())
        self.optimizers = make_optimizers(model, config)
        self.noisy = noisy_parameters(model, config.weight_noise.where) if config.weight_noise else []
        self.started_from = {k: v for k, v in (started_from or {}).items() if k in INHERITED}
        self.fewest_errors = math.inf
        self.step = self.epoch = self.batch_in_epoch = 0
        self.spoiled = 0  # steps in a row that were not taken
        self.elapsed_s = self.heard_s = 0.0
        self.seconds = 0.0  # that this process took since the last step
        distributed = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world = torch.distributed.get_world_size() if distributed else 1
        self.writer = SummaryWriter(str(directory / "tensorboard")) if self.rank == 0 else None
        self.batches = RunBatches(augmenter, tokenizer, config, self.rank, self.world)
        if not (per_epoch := len(self.batches.epoch(0).starts())):
            raise ValueError("the corpus has fewer batches than there are processes")
        self.num_steps = max(1, round(config.epochs * per_epoch)) if config.epochs else config.steps

    @property
    def progress(self) -> float:
        """0 at the start, 1 at the end of the run, by steps or by the time budget, whichever is further."""
        by_time = self.elapsed_s / (60 * self.config.max_minutes) if self.config.max_minutes else 0.0
        return min(1.0, max(self.step / self.num_steps, by_time))

    def run(self) -> None:
        """Train to the end; the averaged model is ``final.safetensors``.

        Raises TrainingError, before anything where another process trains in the directory, and OSError.
        """
        if self.rank > 0:
            return self._run()
        try:
            with FileLock(self.directory / "run.lock", timeout=LOCK_TIMEOUT_S):
                self._run()
                self.save()
                self.finish()
        except Timeout as error:
            raise TrainingError(f"{self.directory}: another run goes on here") from error

    def _run(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        with Progress(*columns, TimeRemainingColumn(), disable=self.rank > 0) as bar:
            task = bar.add_task("training", total=1.0)
            began = time.perf_counter()
            batches = iter(self._loader())
            places = self.batches.places(self.epoch, self.batch_in_epoch)
            while self.progress < 1:
                self.epoch, self.batch_in_epoch = next(places)
                figures = self.train_step(next(batches))
                self.seconds = time.perf_counter() - began  # all since the last step: data and evaluation too
                began += self.seconds
                if self.rank == 0:
                    self._after_step(figures)
                bar.update(task, completed=self.progress, description=self._shown(figures))

    def _shown(self, figures: dict[str, float]) -> str:
        """The line of a step: losses of what is trained, and speed."""
        names = ("phones",) if self.config.phones_alone else ("ctc", "ce")
        trained = [f"{name} {figures[name]:.2f}" for name in names if name in figures]
        return "  ".join([f"step {self.step}", *trained, f"x{figures['x_real_time']:.0f}"])

    def train_step(self, batch: Batch) -> dict[str, float]:
        """One update; returns the losses. Raises TrainingError after a hundred without a gradient in a row."""
        torch.manual_seed(self.config.seed * 1_000_003 + self.step * self.world + self.rank)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self.learning_rate() * group["factor"]
        self.model.train()
        if not self.config.train_encoder:
            for module in self.model.encoder.modules():
                if isinstance(module, MaskedBatchNorm):
                    module.eval()  # its statistics stay too
        norms = [m for m in self.model.modules() if isinstance(m, MaskedBatchNorm)]
        statistics = [(kept, kept.clone()) for m in norms for kept in m.buffers()]
        batch = batch.to(self.device)
        batch = batch.twice() if self.config.consistency_weight else batch
        for parameter in self.parameters:
            parameter.grad = None
        with perturbed(self.noisy, self.weight_noise_std()):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16):
                parts = self.losses(batch)
            loss = torch.stack([weight * value for weight, value in parts.values()]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        elapsed, heard = average_gradients(self.parameters, [self.seconds, batch.seconds], self.world)
        norm = self._clip()
        if torch.isfinite(norm):
            self.spoiled = 0
            for optimizer in self.optimizers:
                optimizer.step()
        else:  # one bad batch must not end a run, or stay in it
            self._pass_over(statistics)
        self.step += 1
        self.batch_in_epoch += self.world
        self.elapsed_s += elapsed
        self.heard_s += heard * self.world
        return {name: float(value.detach()) for name, (_, value) in parts.items()} | {
            "norm": float(norm),
            "loss": float(loss.detach()),
            "x_real_time": heard * self.world / max(elapsed, 1e-3),
        }

    def _pass_over(self, statistics: list[tuple[Tensor, Tensor]]) -> None:
        """Give buffers the values, beside them, that they had before a batch. Raises TrainingError after too many."""
        for buffer, before in statistics:
            buffer.copy_(before)
        self.spoiled += 1
        if self.spoiled == MOST_SPOILED:
            raise TrainingError(f"{self.directory}: gradients of the last {MOST_SPOILED} steps were not finite")

    def _clip(self) -> Tensor:
        """Limit the gradient's norm and return what it was; a CTC head that only listens is limited by itself.

        Its norm is returned only where it is not finite, so that no step is taken then.
        """
        head = list(self.model.ctc.parameters()) if self._ctc_listens else []
        rest = [p for p in self.parameters if all(p is not h for h in head)]
        of_head, of_rest = (torch.nn.utils.clip_grad_norm_(part, self.config.clip) for part in (head, rest))
        return of_rest if torch.isfinite(of_head) else of_head

    @property
    def _ctc_listens(self) -> bool:
        """Whether the CTC head learns to read the memory without changing it, for segment ends and latencies."""
        return self.config.ctc_weight == 0 and self.progress >= self.config.ctc_only

    def losses(self, batch: Batch) -> dict[str, tuple[float, Tensor]]:
        """Each objective with its weight at the present progress."""
        c, model = self.config, self.model
        with torch.no_grad():
            frames, num_frames = model.features(batch.samples, batch.num_samples)
            generator = torch.Generator().manual_seed(c.seed * 7_919 + self.step * self.world + self.rank)
            if c.augment.vocal_tract_range:
                frames = warp_vocal_tract(frames, model.config.features, c.augment.vocal_tract_range, generator)
            if self.progress >= c.spec_augment_from:
                frames = spec_augment(frames, c.augment, generator)
        memory, num_memory = model.encode(frames, num_frames)
        log_probs = model.ctc_log_probs(memory.detach() if self._ctc_listens else memory)
        parts = {"ctc": (1.0, losses.ctc(log_probs, num_memory, batch.tokens, batch.num_tokens))}
        if c.consistency_weight:
            parts["consistency"] = (c.consistency_weight, losses.consistency(log_probs, num_memory, batch.num_tokens))
        if self.trigrams is not None:
            rows = (num_memory, batch.tokens, batch.num_tokens)
            total = denominator(log_probs, *rows, self.trigrams, self.tokenizer.space_id)
            parts["denominator"] = (c.denominator_weight, total)
        if self.phones:
            told = c.denominator_weight if c.phones_alone else 0.0
            teaches = self.phones.teaches(self.step)
            parts["phones"] = (c.phone_weight, self.phones.loss(batch.tokens, batch.num_tokens, told, teaches))
        if self.progress < c.ctc_only:
            return parts
        weight = c.ctc_weight or 1.0
        parts = {name: (weight * own, value) for name, (own, value) in parts.items()}
        if c.attention == "path":
            ends = losses.ctc_boundaries(log_probs, num_memory, batch.tokens, batch.num_tokens)
            heard = (memory, num_memory)
            if c.policy_weight:
                parts |= policy_losses(model, c, heard, batch.tokens, batch.num_tokens, self.tokenizer.space_id)
            return parts | path_losses(model, c, heard, batch.tokens, batch.num_tokens, ends)
        grown = (self.progress - c.ctc_only) / (c.noise_full_at - c.ctc_only) if c.noise_full_at > c.ctc_only else 1.0
        noise = c.noise_std * min(1.0, grown)
        out = model.teacher_forced(memory, num_memory, batch.tokens, batch.num_tokens, noise)
        ce = cross_entropy(c, out.logits, batch.tokens, batch.num_tokens)
        parts["ce"] = (1 - c.ctc_weight, ce)
        if not model.decoder.attention.is_online:
            return parts  # a softmax selects once per step, and has no latency
        if c.quantity_weight:
            parts["quantity"] = (c.quantity_weight, losses.quantity(out.alpha, batch.num_tokens))
        if c.latency_weight:
            ends = losses.ctc_boundaries(log_probs, num_memory, batch.tokens, batch.num_tokens)
            late = losses.boundary_latency(out.alpha, ends, batch.num_tokens)
            parts["latency"] = (c.latency_weight, late)
        return parts

    def weight_noise_std(self) -> float:
        """Standard deviation of the noise on weights in the next step."""
        noise = self.config.weight_noise
        return noise.std if noise and self.step >= noise.from_step else 0.0

    def learning_rate(self) -> float:
        """Linear warm-up; then ``rate_drops``, or cosine to a hundredth over the run."""
        warm = min(1.0, (self.step + 1) / self.config.warmup_steps)
        if self.config.rate_drops:
            drops = [factor for after, factor in self.config.rate_drops if self.step >= after]
            return self.config.learning_rate * warm * math.prod(drops)
        return self.config.learning_rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.progress)))

    def _loader(self) -> DataLoader[Batch]:
        """Batches from the present place on, without end."""
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # processes of the run on this machine
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = 0 if self.device.type == "cpu" else min(MAX_WORKERS, max(1, cores // beside - 1))
        # Forked, they share the corpus; else each would be sent a copy of all of it.
        start = "fork" if workers and "fork" in multiprocessing.get_all_start_methods() else None
        places = self.batches.places(self.epoch, self.batch_in_epoch)
        return DataLoader(
            self.batches, sampler=places, batch_size=None, num_workers=workers, multiprocessing_context=start
        )

    def _after_step(self, figures: dict[str, float]) -> None:
        row = {"step": self.step, "epoch": self.epoch, "progress": self.progress, "elapsed_s": self.elapsed_s}
        row |= figures | {"learning_rate": self.learning_rate()}
        if self.step % 10 == 0:
            self._log(row)
        if self.step % self.config.evaluate_every == 0 and self.dev is not None:
            report = self.evaluate(self.dev)
            self._log({"step": self.step, "elapsed_s": self.elapsed_s} | report)
            self._keep_best(report.get("dev_ctc_wer" if self.config.ctc_only == 1 else "dev_wer", math.inf))
        if self.step % self.config.save_every == 0:  # with the errors of the best so far
            self.save()

    def _log(self, row: dict[str, Any]) -> None:
        with (self.directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        for name, value in row.items():
            if self.writer and isinstance(value, float) and name not in ("elapsed_s", "progress"):
                self.writer.add_scalar(name, value, self.step)

    def evaluate(self, dev: Corpus) -> dict[str, Any]:
        """Dev figures, and alignment pictures of the first utterances in TensorBoard, long ones aside."""
        fold = fold_phones if self.config.fold_phones else str
        report, results = evaluate_corpus(self.model, self.tokenizer, dev, fold=fold)
        short = [i for i, u in enumerate(dev.utterances) if pictures.has_room(u.num_samples)]
        for index in short[:3]:
            audio, text = torch.from_numpy(dev.audio(index)), dev.utterances[index].text
            figure = pictures.draw_alignment(self.model, self.tokenizer, audio, text)
            if self.writer:
                self.writer.add_figure(f"alignment/{index}", figure, self.step)
        sample = results[len(results) // 2]
        examples = {"reference": sample.reference, "hypothesis": sample.hypothesis, "ctc": sample.ctc}
        return {f"dev_{k}": v for k, v in report.items() if isinstance(v, float)} | examples

    def _keep_best(self, errors: float) -> None:
        if errors < self.fewest_errors:
            self.fewest_errors = errors
            provenance = self.provenance() | {"dev_errors": errors}
            save_checkpoint(self.directory / "best.safetensors", self.model, self.tokenizer, provenance)

    def save(self) -> None:
        """Write a numbered checkpoint of the weights and ``last.pt`` (everything, for `resume`). Raises OSError.

        In this order: a run that is killed here goes on from before, and makes all that it lacks again.
        """
        numbered = self.directory / f"step-{self.step:06d}.safetensors"
        save_checkpoint(numbered, self.model, self.tokenizer, self.provenance())
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "fewest_errors": self.fewest_errors,
            "position": [self.step, self.epoch, self.batch_in_epoch, self.elapsed_s, self.heard_s],
            "seconds": self.seconds,
            "begun_with": self._begun_with(),
            "started_from": self.started_from,
        }
        run_directory.write_state(self.directory, state)
        for old in run_directory.numbered(self.directory, self.step)[: -self.config.average_last]:
            old.unlink()

    def _begun_with(self) -> dict[str, Any]:
        """With its corpus, and as many processes too: an epoch has so many steps fewer."""
        corpus = self.augmenter.corpus
        beside = {"processes": self.world, "corpus": f"of {len(corpus.utterances)} utterances ({corpus.digest[:16]})"}
        return begun_with(self.config, self.model, self.tokenizer) | beside

    def resume(self) -> bool:
        """Go on from ``last.pt``, if there is one. Raises ValueError where that is of another run, and says why."""
        path = self.directory / run_directory.LAST
        if (state := run_directory.read_state(path, self.device)) is None:
            return False
        before = {"seed": state["seed"]} if "seed" in state else {}  # all that versions before wrote of it
        refuse_other(path, state.get("begun_with", before), self._begun_with())
        if self.started_from and state.get("started_from", self.started_from) != self.started_from:
            raise ValueError(f"{path}: the run was begun from another checkpoint. Another run needs another directory")
        run_directory.restore(path, state, self.model, self.optimizers)
        self.step, self.epoch, self.batch_in_epoch = (int(n) for n in state["position"][:3])
        self.elapsed_s, self.heard_s = state["position"][3:]
        self.fewest_errors = state.get("fewest_errors", math.inf)
        self.seconds = state.get("seconds", 0.0)
        self.started_from = state.get("started_from", {})
        return True

    def finish(self) -> None:
        """Make ``final.safetensors``, compact: the best, or the last ones averaged (batch norm statistics too)."""
        best = self.directory / "best.safetensors"
        takes_best = self.config.final == "best" and best.is_file()
        chosen = [best] if takes_best else run_directory.numbered(self.directory, self.step)
        average_checkpoints(chosen, self.directory / "final.safetensors")
        if self.writer:
            self.writer.close()

    def provenance(self) -> dict[str, Any]:
        """What made these weights."""
        corpora = sorted({u.corpus for u in self.augmenter.corpus.utterances})
        inherited = {"started_from": self.started_from} if self.started_from else {}
        return inherited | {
            "name": "mocha-asr",
            "steps": self.step,
            "epochs": self.heard_s / self.augmenter.corpus.seconds,
            "hours_of_corpus": self.augmenter.corpus.seconds / 3600,
            "hours_heard": self.heard_s / 3600,
            "training_seconds": self.elapsed_s,
            "corpora": corpora,
            "recipe": self.config.model_dump(mode="json"),
        }
