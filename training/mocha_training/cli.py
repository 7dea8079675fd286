"""The commands that prepare corpora, train, evaluate and draw: read options, build objects, print."""

import os
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from mocha_model.allocator import keep_memory
from mocha_model.checkpoint import CheckpointError, calibrate_checkpoint, load_checkpoint
from mocha_model.language import LanguageModelError, WordLanguageModel
from mocha_model.pronunciation import PronunciationError
from mocha_model.recognizer import LIVE_CAUTION, LIVE_THRESHOLD
from mocha_model.search import OfflineModelError
from mocha_model.tokenizer import Units, normalize_text
from mocha_training import calibrate as confidence
from mocha_training import corpora, language, outputs, phones, pictures, recipes, searches, synthesis
from mocha_training.augment import Augmenter
from mocha_training.average import average_checkpoints
from mocha_training.beginnings import first_model, refuse_beside_model, refuse_without_model, started
from mocha_training.config import Preset, TrainConfig
from mocha_training.data import Corpus, load_corpus, trainable, writable
from mocha_training.evaluate import Decoding, evaluate_corpus, write_hypotheses
from mocha_training.manifests import CorpusError, decode_audio, find_manifest
from mocha_training.reports import show_report
from mocha_training.splicing import SplicePoint, kept_splice_points
from mocha_training.trainer import Trainer, TrainingError
from mocha_training.voices import Program, SynthesisError
from mocha_training.word_lstm import WordLSTMConfig, train_word_lstm

console = Console(stderr=True)

MOST_PREFIXES = 4096  # of a search: what is kept of each grows with their number
_from_0 = partial(typer.Option, min=0)
_prefixes = partial(typer.Option, min=0, max=MOST_PREFIXES)
UNUSABLE = (CorpusError, CheckpointError, LanguageModelError, OSError)  # files that are read or written

HeldOut = Annotated[
    list[Path] | None,
    typer.Option(help="manifest to be evaluated on: sentences of its transcripts are left out; may be given again"),
]


def _fail(message: object) -> typer.Exit:
    if isinstance(message, ValidationError):  # of which the first is enough
        first = message.errors(include_url=False)[0]
        field, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        message = f"{field}: {what}" if field else what
    console.print(f"[red]error:[/red] {escape(str(message))}", soft_wrap=True)
    return typer.Exit(1)


def _loaded(manifest: Path, units: Units = "characters") -> Corpus:
    """`load_corpus`, and what it left out is told."""
    corpus = load_corpus(manifest, units=units)
    if corpus.left_out:
        console.print(f"[yellow]warning:[/yellow] {escape(corpus.left_out)}", soft_wrap=True)
    return corpus


def prepare(
    corpus: Annotated[corpora.Name, typer.Argument(help="what it is")],
    source: Annotated[Path, typer.Argument(help="its directory, laid out as it is published (docs/recipes.md)")],
    out: Annotated[Path, typer.Option(help="directory for the manifests train, dev and test (*.jsonl.gz)")],
    jobs: Annotated[int, typer.Option(min=1, help="recordings looked at together")] = os.cpu_count() or 1,
) -> None:
    """Read a corpus in its own layout into manifests that `train` and `evaluate` take; its recordings stay there."""
    try:
        outputs.make_ready(out / "train.jsonl.gz")
        counts = corpora.prepare(corpus, source, out, jobs)
    except (CorpusError, OSError) as error:
        raise _fail(error) from error
    console.print(", ".join(f"{name} {count}" for name, count in counts.items()) + " utterances")


def train(
    out: Annotated[Path, typer.Option(help="directory of the run; resumed if it has one")],
    data: Annotated[
        list[Path],
        typer.Option(envvar="MOCHA_SPEECH", help="corpus directory with train.jsonl[.gz]; may be given again"),
    ],
    recipe: Annotated[str, typer.Option(help="one of: " + ", ".join(recipes.RECIPES))],
    preset: Annotated[
        Preset | None, typer.Option(help="network, instead of the recipe's; with --init, grown to it")
    ] = None,
    mechanism: Annotated[
        str | None,
        typer.Option(help="attention, instead of the network's: softmax, monotonic, mocha, matcha; without --init"),
    ] = None,
    ctc_only: Annotated[bool, typer.Option(help="train the CTC branch alone, to the end: the baseline")] = False,
    chunk_width: Annotated[int | None, typer.Option(help="w of MoChA, bound of MAtChA; without --init")] = None,
    init: Annotated[Path | None, typer.Option(help="start from the weights of this checkpoint")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="time budget, for the schedules too")] = None,
    steps: Annotated[int | None, typer.Option(help="length of the run, instead of the recipe's")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="the highest, instead of the recipe's")] = None,
    seed: Annotated[int | None, typer.Option(help="of everything random, instead of the recipe's")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda" if torch.cuda.is_available() else "cpu",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="field of the recipe, as batch_seconds=600; may be given again")
    ] = None,
    dev_utterances: Annotated[int, typer.Option(min=0, help="dev utterances in evaluations; 0: none")] = 150,
) -> None:
    """Train a recogniser; progress on the terminal, curves and alignment pictures in TensorBoard.

    On several GPUs or cores: torchrun --no-python --nproc-per-node N mocha-asr train ...
    """
    changes: dict[str, Any] = {"max_minutes": max_minutes, "steps": steps, "seed": seed, "preset": preset}
    changes |= {"learning_rate": learning_rate, "ctc_only": 1.0 if ctc_only else None}
    keep_memory()
    try:
        device = _joined(device)
        config = recipes.configured(recipe, changes).changed(settings or ())
        if init is not None:
            refuse_beside_model(mechanism, chunk_width, settings or ())
        elif not (out / "last.pt").is_file():
            refuse_without_model(config)
        corpus = _training_corpus(data, config)
        noises, dev = _first(data, "noise", config.units), _first(data, "dev", config.units)
        dev = dev and dev.some(dev_utterances)
        start = first_model(config, corpus, mechanism, chunk_width) if init is None else started(init, config, preset)
        corpus, left_out = writable(corpus, start.tokenizer)
        points: Sequence[tuple[SplicePoint, ...]] = ()
        if config.augment.splice_probability:
            points = kept_splice_points(out / "splice-points.json", start.model.to(device), start.tokenizer, corpus)
        augmenter = Augmenter(config.augment, corpus, noises, points)
        trainer = Trainer(config, start.model, start.tokenizer, augmenter, dev, out, device, start.provenance)
        begun = f"; resumed at step {trainer.step}" if trainer.resume() else ""
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    size = f"{start.model.num_parameters / 1e6:.2f} M parameters"
    console.print(f"{len(corpus.utterances)} utterances, {corpus.seconds / 3600:.2f} h; {size}{begun}{left_out}")
    try:
        trainer.run()
    except (CheckpointError, TrainingError, OSError) as error:
        raise _fail(error) from error


def _joined(device: str) -> str:
    """The device of this process, which under torchrun has joined the others. Raises ValueError where it is none."""
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        raise ValueError(f"--device {device}: there is {'cpu and cuda' if torch.cuda.is_available() else 'cpu alone'}")
    if "WORLD_SIZE" not in os.environ:
        return device
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" else device


def _training_corpus(data: list[Path], config: TrainConfig) -> Corpus:
    everything = Corpus.joined([_loaded(find_manifest(d, "train"), config.units) for d in data])
    corpus = trainable(everything, config.min_seconds, config.max_seconds, config.units)
    if not corpus.utterances:
        raise ValueError(f"none of {len(everything.utterances)} utterances can be learned from")
    return corpus


def _first(directories: list[Path], split: str, units: Units) -> Corpus | None:
    """That split of the first directory that has it."""
    manifests = (find_manifest(directory, split) for directory in directories)
    return next((_loaded(manifest, units) for manifest in manifests if manifest.is_file()), None)


def evaluate(
    manifest: Annotated[Path, typer.Option(help="SPLIT.jsonl beside its shards, or a lhotse CutSet (*.jsonl.gz)")],
    model: Annotated[Path | None, typer.Option(help="checkpoint; the bundled one if not given")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
    limit: Annotated[int, typer.Option(min=0, help="only the first N utterances; 0 for all")] = 0,
    hypotheses: Annotated[Path | None, typer.Option(help="JSON lines file for the texts of every utterance")] = None,
    decoding: Annotated[
        Decoding | None, typer.Option(help="online (hard), or soft over whole recordings; online where possible")
    ] = None,
    beam: Annotated[int, _prefixes(help="hypotheses of beam search over the online process; 0 for none")] = 0,
    joint: Annotated[int, _prefixes(help="prefixes of joint search, for files and patience; 0: none")] = 0,
    settle: Annotated[bool, typer.Option(help="read greedily; joint search settles segments when they end")] = False,
    patience: Annotated[int | None, _from_0(help="most frames before a character is emitted")] = None,
    caution: Annotated[float | None, _from_0(help=f"higher waits longer; live text: {LIVE_CAUTION}")] = None,
    threshold: Annotated[
        float | None, _from_0(help=f"pruning of either search; live text: {LIVE_THRESHOLD:.0f}")
    ] = None,
    length_bonus: Annotated[float | None, typer.Option(help="bonus per symbol; joint: default the model's own")] = None,
    selection_weight: Annotated[float | None, _from_0(help="weight of selecting or passing, in beam search")] = None,
    lm: Annotated[Path | None, typer.Option(help="language model of `train-lm`, for either; none if not given")] = None,
    lm_weight: Annotated[
        float | None, _from_0(help=f"weight of --lm; joint: the model's own; beam: {searches.BEAM_LANGUAGE_WEIGHT}")
    ] = None,
    prior_weight: Annotated[float | None, _from_0(help="weight of character priors; the model's own")] = None,
    phone_weight: Annotated[float | None, _from_0(help="weight of how words sound; the model's own")] = None,
    fold_phones: Annotated[bool, typer.Option(help="score TIMIT's phones as 39 classes; WER is then PER")] = False,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; the real-time factor is per these")] = 1,
) -> None:
    """WER, CER, CTC branch, emission latency against a CTC forced alignment, token counts and real-time factor."""
    torch.set_num_threads(threads)
    keep_memory()
    options = {"threshold": threshold, "length_bonus": length_bonus, "patience": patience, "caution": caution}
    options |= {"selection_weight": selection_weight, "lm_weight": lm_weight}
    options |= {"prior_weight": prior_weight, "phone_weight": phone_weight}
    try:
        searches.refuse_useless(beam, joint, settle, options | {"lm": lm, "decoding": decoding})
        if hypotheses is not None:
            outputs.make_ready(hypotheses)
        checkpoint = load_checkpoint(model)
        corpus = _loaded(manifest, checkpoint.tokenizer.units)
        if limit:
            corpus = corpus.subset(list(range(min(limit, len(corpus.utterances)))))
        language_model = WordLanguageModel.load(lm, checkpoint.tokenizer) if lm else None
        how = searches.asked_for(beam, joint, settle, options, language_model, checkpoint.config) or decoding
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("evaluating", total=len(corpus.utterances))
            fold = phones.fold_phones if fold_phones else str
            parts = (checkpoint.model, checkpoint.tokenizer, corpus, how)
            report, results = evaluate_corpus(*parts, lambda done: bar.advance(task, done), fold)
        show_report(report, as_json)
        if hypotheses is not None:
            write_hypotheses(hypotheses, results)
    except (*UNUSABLE, searches.OptionError, phones.PhoneError, OfflineModelError) as error:
        raise _fail(error) from error


def average(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="of one network; all but weights and calibrations is from the last")
    ],
    out: Annotated[Path, typer.Option(help="checkpoint to write")],
) -> None:
    """Write the mean of the weights of several checkpoints, in a third of the space.

    It has no calibration of the confidence of words: `calibrate` fits one.
    """
    try:
        outputs.make_ready(out)
        calibrated = average_checkpoints(checkpoints, out)
    except (CheckpointError, OSError) as error:
        raise _fail(error) from error
    if calibrated:
        console.print("the last one's calibration was not of these weights: `mocha-asr calibrate` fits another")


def calibrate(
    manifest: Annotated[Path, typer.Option(help="recordings with transcripts that the model was not trained on")],
    model: Annotated[Path, typer.Option(help="checkpoint; the calibration is written into it")],
    picture: Annotated[Path | None, typer.Option(help="reliability curve to write: .png or .svg")] = None,
) -> None:
    """Fit the confidence of words to how often they are right."""
    keep_memory()
    try:
        if picture is not None:
            outputs.make_ready_for_picture(picture)
        checkpoint = load_checkpoint(model)
        outputs.make_ready(model)
        corpus = _loaded(manifest, checkpoint.tokenizer.units)
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("listening", total=1.0)
            fitted, found = confidence.calibrated(checkpoint, corpus, lambda share: bar.advance(task, share))
        calibrate_checkpoint(model, *fitted)
        if picture is not None:
            confidence.draw(found).savefig(picture, dpi=100)
    except (*UNUSABLE, ValueError) as error:
        raise _fail(error) from error
    for name, reliability in found.items():
        console.print(
            f"{name}: {reliability.count} words; held out: expected calibration error {reliability.error:.3f}, "
            f"a right word above a wrong one {100 * reliability.separation:.0f} % of the time"
        )


def _transcripts(held_out: list[Path] | None) -> list[str]:
    return [u.text for manifest in held_out or () for u in _loaded(manifest).utterances]


def synthesize(
    text: Annotated[list[Path], typer.Option(help="plain or gzipped text, a sentence a line; may be given again")],
    hours: Annotated[float, typer.Option(min=1e-6, help="of speech, at least")],
    out: Annotated[Path, typer.Option(help="directory for train.jsonl and its shards, which `train --data` takes")],
    max_characters: Annotated[int, typer.Option(min=1, help="longer sentences are left out")] = 140,
    kokoro: Annotated[Path | None, typer.Option(envvar="MOCHA_KOKORO", help="its directory (docs/recipes.md)")] = None,
    piper: Annotated[Path | None, typer.Option(envvar="MOCHA_PIPER", help="its voices (docs/recipes.md)")] = None,
    program: Annotated[list[Program] | None, typer.Option(help="whose voices read, else all; may be repeated")] = None,
    seed: Annotated[int, typer.Option(min=0, help="the same seed and voices give the same speech (not Piper's)")] = 0,
    held_out: HeldOut = None,
) -> None:
    """Read text aloud with every free English voice installed; from longer text, the sentences that bring most words.

    The first sentence with a number or an abbreviation takes a minute: the grammars are compiled, once.
    """
    try:
        voices = synthesis.find_voices(kokoro, program or (), piper)
        seen = language.seen_in(_transcripts(held_out))
        short = (line for line in language.read_lines(text) if line and len(line) <= max_characters)
        sentences = [line for line in short if not seen(line)]
        if not sentences:
            raise _fail("no sentence of the text is short enough, held-out ones aside")
        counts = ", ".join(f"{n} of {p}" for p, n in Counter(v.program for v in voices).items())
        console.print(f"{len(sentences)} sentences, {len(voices)} voices: {counts}")
        with Progress(*Progress.get_default_columns(), console=console, transient=True) as bar:
            task = bar.add_task("speaking", total=3600 * hours)
            count = synthesis.synthesize(sentences, voices, hours, out, seed, lambda s: bar.advance(task, s), seen)
    except (SynthesisError, language.TextError, CorpusError, OSError) as error:
        raise _fail(error) from error
    console.print(f"wrote {count} utterances to {out}")


def train_lm(
    text: Annotated[list[Path], typer.Option(help="plain or gzipped text, a sentence a line; may be given again")],
    out: Annotated[Path, typer.Option(help="language model to write (.safetensors)")],
    model: Annotated[Path | None, typer.Option(help="recogniser whose vocabulary to use; the bundled one")] = None,
    least: Annotated[int, typer.Option(min=0, help="triples of words that occur less often are left out")] = 2,
    words: Annotated[Path | None, typer.Option(help="words to know besides, whether the text has them or not")] = None,
    lstm_epochs: Annotated[
        int, typer.Option(min=0, help="passes over the text of an LSTM beside the counts, minutes each; 0 for none")
    ] = 0,
    held_out: HeldOut = None,
) -> None:
    """Make a language model of words for joint search: files, patient streams, settled segments."""
    try:
        outputs.make_ready(out)
        recogniser = load_checkpoint(model)
        tokenizer = recogniser.tokenizer
        sentences = language.unseen(language.read_sentences(text, tokenizer), _transcripts(held_out))
        if not sentences:
            raise language.TextError("all sentences of the text are held out")
        kept, held = language.held_apart(sentences)
        others = language.read_words(words, tokenizer) if words else set[str]()
        counts = language.count_words(kept, tokenizer, least, others)
        sounds = language.said(counts.words) if recogniser.config.phones else ()
        made = WordLanguageModel(counts, tokenizer)
        with Progress(console=console, transient=True) as bar:
            if lstm_epochs:
                task = bar.add_task("training", total=1.0)
                config = WordLSTMConfig(epochs=lstm_epochs)
                lstm, own = train_word_lstm(kept, config, lambda done: bar.update(task, completed=done))
                made = language.mixed(counts, lstm, own, held, tokenizer)
            made.said = sounds
            task = bar.add_task("measuring", total=len(held))
            letter, word = language.perplexity(made, held, tokenizer, lambda done: bar.advance(task, done))
        made_of = {"sentences": len(kept), "least": least, "words_besides": len(others), "lstm_epochs": lstm_epochs}
        made.save(out, tokenizer, made_of | {"held_out_perplexity": [letter, word]})
    except (*UNUSABLE, language.TextError, PronunciationError) as error:
        raise _fail(error) from error
    shown = f"perplexity {letter:.3f} per character, {word:.0f} per word on {len(held)} held-out sentences"
    console.print(f"wrote {out}, {len(counts.words)} words: {shown}")


def report(
    run: Annotated[Path, typer.Option(help="directory of a run")],
    data: Annotated[Path, typer.Option(envvar="MOCHA_SPEECH", help="corpus directory with dev.jsonl")],
    out: Annotated[Path, typer.Option(help="directory for the pictures")],
    model: Annotated[Path | None, typer.Option(help="checkpoint; the run's final one if not given")] = None,
) -> None:
    """Draw a run's loss curves and the alignments of three dev utterances to PNG."""
    log, losses = run / "log.jsonl", out / "losses.png"
    try:
        outputs.make_ready(losses)
        checkpoint = load_checkpoint(model or run / "final.safetensors")
        dev = _loaded(find_manifest(data, "dev"), checkpoint.tokenizer.units)
        if not log.is_file():
            raise _fail(f"{log}: no such file; a run has it from its tenth step on")
        pictures.draw_losses(log, losses)
        fits = [20 < len(u.text) < 50 and pictures.has_room(u.num_samples) for u in dev.utterances]
        drawable = [i for i, fit in enumerate(fits) if fit]
        chosen = {dev.utterances[i].corpus: i for i in reversed(drawable)}
        for number, index in enumerate(list(chosen.values())[:3], 1):
            audio, text = torch.from_numpy(dev.audio(index)), dev.utterances[index].text
            figure = pictures.draw_alignment(checkpoint.model, checkpoint.tokenizer, audio, text)
            figure.savefig(out / f"alignment-{number}.png", dpi=80)
    except UNUSABLE as error:
        raise _fail(error) from error


def align(
    file: Annotated[Path, typer.Argument(help="any audio file of a minute at most")],
    out: Annotated[Path, typer.Option(help="picture to write: .png or .svg")] = Path("alignment.png"),
    model: Annotated[Path | None, typer.Option(help="checkpoint; the bundled one if not given")] = None,
    text: Annotated[str | None, typer.Option(help="what is said; what the model reads, if not given")] = None,
) -> None:
    """Draw features, p, alpha, beta and the path of online decoding, with each character at its frame."""
    try:
        outputs.make_ready_for_picture(out)
        checkpoint = load_checkpoint(model)
        samples = torch.from_numpy(decode_audio(file.read_bytes(), str(file)).astype(np.float32) / 32768)
        if not pictures.has_room(len(samples)):
            raise CorpusError(f"{file}: longer than {pictures.LONGEST_S} s, which is too much for a picture")
        spoken = None if text is None else normalize_text(text, checkpoint.tokenizer.units)
        pictures.draw_alignment(checkpoint.model, checkpoint.tokenizer, samples, spoken).savefig(out, dpi=110)
    except UNUSABLE as error:
        raise _fail(error) from error
    console.print(f"wrote {out}")
