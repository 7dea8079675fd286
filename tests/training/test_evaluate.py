"""Evaluation: what is timed, options, and the search that they ask for."""

import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mocha_model.checkpoint import load_checkpoint
from mocha_model.config import SearchConfig
from mocha_model.language import WordLanguageModel
from mocha_model.recognizer import Recognizer, language_for
from mocha_training import evaluate, searches
from mocha_training.data import Corpus, Utterance
from mocha_training.language import count_words
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


@pytest.mark.parametrize("option", [("--limit", -1), ("--beam", -1), ("--joint", -1), ("--threads", 0)])
def test_numbers_have_their_least(option: tuple[str, int]):
    status, output = said("evaluate", "--manifest", "none", *option)
    assert status == 2 and f"Invalid value for '{option[0]}'" in output and "greater than or equal" in output


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
