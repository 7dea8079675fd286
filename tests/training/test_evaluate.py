"""Evaluation: what is timed, options, and the search that they ask for."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

from mocha_model.checkpoint import BUNDLED, load_checkpoint
from mocha_model.config import SearchConfig, tiny
from mocha_model.language import WordLanguageModel
from mocha_model.model import SpeechModel
from mocha_model.recognizer import Recognizer, language_for
from mocha_model.tokenizer import Tokenizer
from mocha_training import cli, evaluate, searches
from mocha_training.augment import Augmenter
from mocha_training.data import Corpus
from mocha_training.evaluate import Result, evaluate_corpus, summarize, symbol_latencies
from mocha_training.language import count_words
from mocha_training.manifests import Utterance
from mocha_training.recipes import plain
from mocha_training.trainer import Trainer
from tests.training.made_up import said


def test_what_decodes_is_made_once_and_not_timed(
    lively: Recognizer, clip: NDArray[np.int16], monkeypatch: pytest.MonkeyPatch
):
    clock = 0.0  # goes on while a recogniser is made, and by nothing else

    def slowly(*arguments: Any, **options: Any) -> Recognizer:
        nonlocal clock
        clock += 1.0
        return Recognizer(*arguments, **options)

    monkeypatch.setattr(evaluate, "Recognizer", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    rows = tuple(Utterance(str(k), "", "", "made", 0, 8_000, k) for k in range(2 * evaluate.BATCH_ROWS))
    corpus = Corpus(rows, tuple(clip[k * 1_000 :][:8_000] for k in range(len(rows))))
    results, seconds = evaluate.transcribe_corpus(lively.model, lively.tokenizer, corpus)
    assert len(results) == len(rows) and clock == 1.0 and seconds == 0.0


def test_batches_have_few_rows_where_recordings_are_long():
    seconds = [*[1] * 18, *[60] * 5, 100, 130, 500]
    rows = tuple(Utterance(str(k), "", "", "made", 0, 16_000 * length) for k, length in enumerate(seconds))
    batches = list(evaluate._batches(range(len(rows)), Corpus(rows, ())))
    assert [i for batch in batches for i in batch] == list(range(len(rows)))
    assert [len(batch) for batch in batches] == [16, 4, 3, 1, 1, 1]


@pytest.mark.parametrize(
    "option",
    [
        *((f"--{name}", -1) for name in ("limit", "beam", "joint", "patience", "caution", "threshold")),
        *((f"--{name}", -0.1) for name in ("selection-weight", "lm-weight", "prior-weight", "phone-weight")),
        ("--threads", 0),
        ("--threshold", "nan"),
        ("--beam", 1_000_000),
        ("--joint", 1_000_000),
    ],
)
def test_numbers_have_their_least_and_most(option: tuple[str, float]):
    status, output = said("evaluate", "--manifest", "none", *option)
    assert status == 2 and f"Invalid value for '{option[0]}'" in output


def test_numbers_of_what_is_read_aloud_have_their_least():
    for option in (("--seed", -1), ("--max-characters", 0)):
        status, output = said("synthesize", "--text", "none", "--hours", 1, "--out", "never", *option)
        assert status == 2 and f"Invalid value for '{option[0]}'" in output


def test_a_language_model_weighs_less_in_beam_search():
    """What a model's configuration says is of joint search (docs/decisions/0008-files-by-joint-search.md)."""
    bundled = load_checkpoint()
    language = WordLanguageModel(count_words(["the cat sat"], bundled.tokenizer, 1), bundled.tokenizer)

    def weight(beam: int, joint: int, **options: float) -> float:
        asked = searches.asked_for(beam, joint, False, options, language, bundled.config)
        assert asked is not None
        return asked.fusion.parts[0][0]

    assert weight(8, 0) == 0.4 and weight(8, 0, lm_weight=0.7) == 0.7
    assert weight(0, 8) == SearchConfig().language_weight > 0.4, "it does not know how its words sound"
    known = language_for(bundled.tokenizer)
    asked = searches.asked_for(0, 8, False, {}, known, bundled.config)
    assert asked is not None and asked.fusion.parts[0][0] == bundled.config.search.language_weight > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_run_on_a_gpu_evaluates(corpus: Corpus, tmp_path: Path):
    config = plain().model_copy(update={"batch_seconds": 8.0, "steps": 2, "evaluate_every": 1, "attention": "path"})
    tokenizer, augmenter = Tokenizer.from_texts(u.text for u in corpus.utterances), Augmenter(config.augment, corpus)
    model, dev = SpeechModel(tiny(tokenizer.vocab_size)), corpus.subset([0, 1])
    Trainer(config, model, tokenizer, augmenter, dev, tmp_path, "cuda").run()
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum("dev_wer" in row for row in rows) == 2


def test_evaluation_reports_everything(lively: Recognizer, corpus: Corpus):
    report, results = evaluate_corpus(lively.model, lively.tokenizer, corpus)
    assert {"wer", "cer", "ctc_wer", "utterances", "rtf", "emission_latency_ms", "by_corpus"} <= set(report)
    assert set(report["by_corpus"]) == {"weather", "suit"} and report["utterances"] == 6
    assert set(report["emission_latency_ms"]) == {"p50", "p90", "p99"}
    assert len(results) == 6 and report["wer"] > 0


def test_settled_text_is_scored_and_live_text_timed(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MOCHA_CACHE", str(tmp_path))
    app = typer.Typer()
    app.command()(cli.evaluate)
    reports, texts = [], []
    for number, options in enumerate(([], ["--joint", "2"], ["--joint", "2", "--settle"])):
        rows = tmp_path / f"{number}.jsonl"
        command = ["--manifest", str(manifest), "--json", "--hypotheses", str(rows), *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        reports.append(json.loads(done.stdout))
        texts.append([json.loads(line)["hypothesis"] for line in rows.read_text().splitlines()])
    assert texts[2] == texts[1] != texts[0]
    assert reports[2]["emission_latency_ms"] == reports[0]["emission_latency_ms"] != reports[1]["emission_latency_ms"]
    assert CliRunner().invoke(app, ["--manifest", str(manifest), "--settle"]).exit_code != 0


def test_error_rates_without_references_are_unknown_not_zero():
    summary = summarize([Result("k", "c", "", "heard", "heard", ())])
    assert [summary[name] for name in ("wer", "cer", "ctc_wer", "ctc_cer")] == [None] * 4


def test_what_is_read_where_nothing_was_said_is_inserted():
    texts = (("", "they said so", "so"), ("a b", "a b", "a b"))
    summary = summarize([Result("k", "c", said, heard, ctc, ()) for said, heard, ctc in texts])
    assert (summary["wer"], summary["ctc_wer"]) == (1.5, 0.5)
    assert (summary["cer"], summary["tokens_per_reference"]) == (4.0, 5.0)


def test_latency_counts_only_matching_symbols():
    from mocha_model.emissions import Emission

    emissions = [Emission(c, f, 0.9, 0.9, False, ()) for c, f in (("a", 5), ("x", 6), ("c", 12))]
    assert symbol_latencies(emissions, ["a", "b", "c"], [3, 5, 9], 40.0) == (80.0, 120.0)
    assert symbol_latencies(emissions, ["a", "b", "c"], [3, 5, 9], 40.0, ahead=6) == (320.0, 360.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("evaluate", "--patience", 3), "--patience: not an option of greedy search"),
        (("evaluate", "--joint", 4, "--selection-weight", 1), "--selection-weight: not an option of joint search"),
        (("evaluate", "--beam", 4, "--joint", 4), "exclude each other"),
        (("evaluate", "--joint", 4, "--decoding", "soft"), "--decoding: not an option of joint search"),
        (("evaluate", "--joint", 4, "--lm-weight", 0.5), "language model, so --lm belongs beside it"),
        (("evaluate", "--beam", 4, "--lm-weight", 0.5), "language model, so --lm belongs beside it"),
        (("evaluate", "--beam", 4, "--prior-weight", 0.5), "--prior-weight: not an option of beam search"),
        (("evaluate", "--joint", 4, "--lm-weight", "inf"), "--lm-weight: inf is no finite number"),
        (("evaluate", "--joint", 4, "--length-bonus", "nan"), "--length-bonus: nan is no finite number"),
        (("train", "--recipe", "plain", "--learning-rate", "inf"), "learning_rate: Input should be a finite number"),
        (("train", "--recipe", "plain", "--set", "augment.freq_mask_bins=-2"), "augment.freq_mask_bins: Input should"),
        (("train", "--recipe", "plain", "--set", "betas=[1.5, 0.9]"), "betas.0: Input should be less than 1"),
        (
            ("train", "--recipe", "plain", "--set", "label_smoothing=0", "--set", "neighbour_smoothing=[0, 0, 0]"),
            "neighbour_smoothing has a weight that is not 0",
        ),
        (("evaluate", "--settle"), "--settle needs --joint"),
        (("train", "--recipe", "nosuch"), "no recipe 'nosuch'; there are"),
        (("train", "--recipe", "plain", "--steps", 0), "greater than 0"),
        (("train", "--recipe", "plain", "--device", "tpu"), "--device tpu: there is cpu"),
        (("train", "--recipe", "plain", "--init", "any", "--chunk-width", 2), "--init brings an attention"),
        (("train", "--recipe", "plain", "--init", BUNDLED, "--preset", "tiny"), "can only be grown"),
        (
            ("train", "--recipe", "spliced", "--preset", "tiny"),
            "a model that reads finds pauses: it is given with --init",
        ),
        (
            ("train", "--recipe", "discriminative", "--preset", "tiny"),
            "is that of a model that reads: it is given with --init",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(options: tuple[str, ...], message: str, manifest: Path):
    places = ("--manifest", manifest) if options[0] == "evaluate" else ("--data", manifest.parent, "--out", "never")
    status, output = said(*options, *places)
    assert status == 1 and message in output
