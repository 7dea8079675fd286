"""Joint search: what it finds is the best of all texts, by the definition of CTC; and what its decoder says."""

import copy
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.conftest import lively_recognizer
from tests.model.test_beam import Only, sound
from tests.model.test_revised import speech
from torch import Tensor
from torch.nn.functional import ctc_loss

from mocha_model.config import DecoderConfig, SearchConfig, tiny
from mocha_model.emissions import text_of
from mocha_model.hypotheses import MAX_UNSTABLE
from mocha_model.joint import JointConfig, JointSearch
from mocha_model.language import WordLanguageModel
from mocha_model.phrases import PhraseBook
from mocha_model.recognizer import Recognizer, joint_search
from mocha_model.scorers import Fusion
from mocha_model.search import Symbol
from mocha_model.tokenizer import Tokenizer
from mocha_model.wide import WideState

FRAMES = 6
LIMITS = DecoderConfig(endpoint_frames=1000)


@pytest.fixture(scope="module")
def heard() -> tuple[Recognizer, Tensor, Tensor]:
    """A model, its memory [1, T, D] and CTC logits [1, T, V] in which three symbols are likely, now and then again."""
    recognizer = lively_recognizer()
    model = recognizer.model
    with torch.inference_mode():
        memory, _ = model.encode(*model.features(sound(7_000)[None] * 3, torch.tensor([7_000])))
    labels = torch.randn(1, FRAMES, model.config.vocab_size, generator=torch.Generator().manual_seed(2))
    labels[..., 4:7] += 3
    labels[..., 0] += 2
    return recognizer, memory[:, :FRAMES], labels


def best_text(search: JointSearch, memory: Tensor, labels: Tensor) -> list[int]:
    """Symbols of the best prefix at the end."""
    told, state = search.step(memory, labels, torch.tensor([FRAMES]), search.init_state(1))
    h = state.hypotheses
    k = int(h.score[0].argmax())
    count = int(h.length[0, k])
    return [s.token for s in told] + h.tokens[0, k, :count].tolist()


def ctc_score(labels: Tensor, text: list[int]) -> float:
    """Log-probability that the CTC branch gives `text`, summed over all alignments."""
    log_probs = labels[0].log_softmax(1)
    lengths = torch.tensor([len(labels[0])]), torch.tensor([len(text)])
    return -float(ctc_loss(log_probs[:, None], torch.tensor([text]), *lengths, reduction="sum"))


@torch.inference_mode()
def test_alone_the_ctc_branch_gives_its_most_probable_text(heard: tuple[Recognizer, Tensor, Tensor]):
    recognizer, memory, labels = heard
    only = Only([4, 5, 6], recognizer.tokenizer.vocab_size)
    config = JointConfig(width=3000, threshold=1e9, length_bonus=0.0)
    search = JointSearch(recognizer.model.decoder, LIMITS, -1, config, Fusion(((1.0, only),)))
    texts = [list(t) for n in range(FRAMES + 1) for t in itertools.product([4, 5, 6], repeat=n)]
    scores = {tuple(t): ctc_score(labels, t) for t in texts if t}
    best = max(scores, key=lambda t: scores[t])
    assert len(best) >= 2
    assert tuple(best_text(search, memory, labels)) == best
    # All prefixes survive so wide a search, and differ from the best one by as much as their probabilities do.
    _, state = search.step(memory, labels, torch.tensor([FRAMES]), search.init_state(1))
    h = state.hypotheses
    top = scores[best]
    found = {
        tuple(h.tokens[0, k, : int(h.length[0, k])].tolist()): float(h.score[0, k])
        for k in range(3000)
        if h.score[0, k] > -torch.inf and h.length[0, k] > 0
    }
    assert len(found) == sum(score > -torch.inf for score in scores.values()) > 200
    for text, score in found.items():
        assert score - found[best] == pytest.approx(scores[text] - top, abs=1e-3)


@torch.inference_mode()
def test_a_prior_divides_the_posteriors_of_each_frame(heard: tuple[Recognizer, Tensor, Tensor]):
    recognizer, memory, labels = heard
    prior = torch.zeros(recognizer.tokenizer.vocab_size)
    prior[4:7] = torch.tensor([1.5, -1.0, -2.0])
    only = Only([4, 5, 6], recognizer.tokenizer.vocab_size)
    config, decoder = JointConfig(width=3000, threshold=1e9, length_bonus=0.3), recognizer.model.decoder
    plain, divided = (JointSearch(decoder, LIMITS, -1, config, Fusion(((1.0, only),), prior=p)) for p in (None, prior))
    texts = [t for n in range(1, FRAMES + 1) for t in itertools.product([4, 5, 6], repeat=n)]

    def best(log_probs: Tensor) -> tuple[int, ...]:
        """By all alignments, of log-probabilities [T, V] that need not add up to 1."""
        score = dict.fromkeys(texts, -math.inf)
        for path in itertools.product([0, 4, 5, 6], repeat=FRAMES):
            text = tuple(s for s, _ in itertools.groupby(path) if s)
            if text:
                own = sum(float(log_probs[t, s]) for t, s in enumerate(path))
                score[text] = float(np.logaddexp(score[text], own))
        return max(texts, key=lambda t: score[t] + 0.3 * len(t))

    log_probs = labels[0].log_softmax(1)
    assert tuple(best_text(plain, memory, labels)) == best(log_probs)
    assert tuple(best_text(divided, memory, labels)) == best(log_probs - prior) != best(log_probs)
    _, state = divided.step(memory, labels, torch.tensor([FRAMES]), divided.init_state(1))
    h = state.hypotheses
    k = int(h.score[0].argmax())
    for token, frame, p in zip(
        *(x[0, k, : int(h.length[0, k])].tolist() for x in (h.tokens, h.frames, h.p)), strict=True
    ):
        assert p == pytest.approx(float(log_probs[frame, token].exp())), "what is told is what the CTC branch heard"


@torch.inference_mode()
def test_the_decoder_follows_what_is_told(heard: tuple[Recognizer, Tensor, Tensor]):
    recognizer, memory, labels = heard
    decoder, attention = recognizer.model.decoder, recognizer.model.decoder.attention
    search = JointSearch(decoder, LIMITS, -1, JointConfig(width=8, threshold=1e9, patience=2))
    one, real = torch.tensor([1]), torch.tensor([True])
    state, told = search.init_state(1), list[Symbol]()
    for t in range(FRAMES):
        symbols, state = search.step(memory[:, [t]], labels[:, [t]], one, state)
        told += symbols
    live = len(told)
    symbols, state = search.flush(real, state)
    told += symbols[:-1]  # without the end
    assert 1 < live < len(told)
    frames = [s.frame for s in told]
    assert frames == sorted(set(frames)), "a symbol is written where the CTC branch may write one"
    keys = attention.energies.memory_projection(memory[0])
    recurrent, token = decoder.init_state(1), Tokenizer.sos_id
    for s in told:
        first = max(0, s.frame - attention.chunk_width + 1)
        _, u = attention.both_energies(recurrent.hidden, keys[None], attention.energies.directions())
        weights = u[0, first : s.frame + 1].softmax(0)
        context = (weights @ memory[0, first : s.frame + 1])[None]
        recurrent = decoder.step(torch.tensor([token]), context, recurrent)
        own = decoder.symbol_scores(recurrent.hidden, context)[0]
        assert s.q == pytest.approx(float(own[s.token].exp()), abs=1e-5)
        assert s.weights[-len(weights) :] == pytest.approx(weights.tolist(), abs=1e-5)
        token = s.token
    assert int(state.follower.token[0]) == Tokenizer.sos_id, "the next segment begins anew"


@torch.inference_mode()
@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([-3.0, -2.0, 4.0, 3.0, -20.0, -20.0], [-20.0, -20.0, -20.0, -20.0, 1.0, 1.0], (2, 4)),
        ([-3.0, 2.0, -20.0, -20.0, -20.0, -20.0], [-20.0, -6.0, -20.0, -20.0, -20.0, 4.0], (1, 5)),
    ],
    ids=["written before it is likely", "gone on before it is likely"],
)
def test_a_symbol_is_said_where_it_is_likeliest(
    heard: tuple[Recognizer, Tensor, Tensor], first: list[float], second: list[float], said: tuple[int, int]
):
    recognizer, memory, _ = heard
    labels = torch.full((1, FRAMES, recognizer.tokenizer.vocab_size), -20.0)
    labels[..., Tokenizer.blank_id] = 0.0
    labels[0, :, 4], labels[0, :, 5] = torch.tensor(first), torch.tensor(second)
    search = JointSearch(recognizer.model.decoder, LIMITS, -1, JointConfig(width=8))
    _, state = search.step(memory, labels, torch.tensor([FRAMES]), search.init_state(1))
    symbols: list[Symbol] = []
    search.close(torch.tensor([True]), state, torch.tensor([FRAMES - 1]), symbols, state.keys, state.values)
    likely = labels.softmax(2)[0]
    assert [(s.token, s.frame) for s in symbols[:2]] == [(4, said[0]), (5, said[1])]
    assert [s.p for s in symbols[:2]] == pytest.approx([float(likely[said[0], 4]), float(likely[said[1], 5])])


class Changing:
    """A scorer that wants a 4 first, and at last a 6 after "4 5"; its state is what was written."""

    def init_state(self, batch_size: int, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, dtype=torch.int64)

    def scores(self, state: Tensor) -> Tensor:
        wanted = {(0, 4): 0.0, (1, 5): 0.0, (1, 6): 0.0, (2, 6): 4.0}
        rows = [[wanted.get((int(s), v), -50.0) for v in range(7)] for s in state]
        return torch.nn.functional.pad(torch.tensor(rows).view(-1, 7), (0, 23), value=-50.0)

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        return torch.where(token == 4, 1, torch.where(token == 5, 2, 3))

    def restart(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


@torch.inference_mode()
@pytest.mark.parametrize("mechanism", ["mocha", "matcha"])
def test_nothing_is_told_at_an_earlier_frame_than_before(mechanism: str):
    """The best prefix says when a symbol was said; what goes on from another one may have said it earlier."""
    recognizer = lively_recognizer(tiny(30).with_attention(mechanism=mechanism))
    said = [{0: 0.4, 4: 0.6}, {0: 0.15, 5: 0.8, 4: 0.05}, {0: 0.001, 4: 0.95, 5: 0.04}, {6: 0.9, 0: 0.1}, {0: 0.99}]
    likely = torch.full((1, len(said), 30), 1e-6)
    for t, row in enumerate(said):
        for token, p in row.items():
            likely[0, t, token] = p
    memory = torch.randn(1, len(said), 16, generator=torch.Generator().manual_seed(0))
    config = JointConfig(8, threshold=4.0, length_bonus=0.0)
    search = JointSearch(recognizer.model.decoder, LIMITS, -1, config, Fusion(((1.0, Changing()),)))
    told, state = search.step(memory, likely.log(), torch.tensor([len(said)]), search.init_state(1))
    rest, _ = search.flush(torch.tensor([True]), state)
    symbols = [*told, *rest][:-1]
    assert [s.token for s in symbols] == [4, 5, 6]
    assert [s.frame for s in symbols] == sorted(s.frame for s in symbols)
    assert all(0 < s.q <= 1 and abs(sum(s.weights) - 1) < 1e-5 for s in symbols)


@torch.inference_mode()
def test_the_decoder_is_asked_once_for_each_symbol_that_is_told(heard: tuple[Recognizer, Tensor, Tensor]):
    recognizer, memory, labels = heard
    asked: list[int] = []
    hook = recognizer.model.decoder.cell.register_forward_hook(lambda _, given, __: asked.append(len(given[0])))
    search = JointSearch(recognizer.model.decoder, LIMITS, -1, JointConfig(width=40))
    try:
        both = memory.repeat(2, 1, 1), torch.cat([labels, labels.flip(1)])
        told, state = search.step(*both, torch.tensor([FRAMES, FRAMES]), search.init_state(2))
        rest, _ = search.flush(torch.tensor([True, True]), state)
        symbols = [s for s in [*told, *rest] if s.token != Tokenizer.eos_id]
        each = [sum(s.row == row for s in symbols) for row in range(2)]
        assert sum(asked) == sum(each) and min(each) > 1
    finally:
        hook.remove()


@torch.inference_mode()
def test_prefixes_that_were_dropped_force_nothing_to_be_told(heard: tuple[Recognizer, Tensor, Tensor]):
    recognizer, memory, labels = heard
    search = JointSearch(recognizer.model.decoder, LIMITS, -1, JointConfig(width=5, threshold=1e9))
    _, state = search.step(memory, labels, torch.tensor([FRAMES]), search.init_state(1))
    h, real = state.hypotheses, torch.tensor([True])
    long = torch.where(torch.arange(5) == 1, MAX_UNSTABLE, h.length)
    for dropped in (True, False):  # the second best, which has no room for more
        score = h.score.masked_fill((long == MAX_UNSTABLE) & dropped, -torch.inf)
        told: list[Symbol] = []
        crowded = replace(state, hypotheses=replace(h, length=long, score=score))
        search._tell_stable(crowded, told, real, state.values)
        assert bool(told) != dropped


@torch.inference_mode()
def test_silence_writes_nothing(heard: tuple[Recognizer, Tensor, Tensor]):
    recognizer, memory, labels = heard
    search = JointSearch(recognizer.model.decoder, LIMITS, -1)
    quiet = torch.full_like(labels, -20.0)
    quiet[..., Tokenizer.blank_id] = 20.0
    told, state = search.step(memory, quiet, torch.tensor([FRAMES]), search.init_state(1))
    assert not told and int(state.hypotheses.length.max()) == 0
    _, state = search.step(memory, labels, torch.tensor([FRAMES]), state)
    assert int(state.hypotheses.length.max()) > 0


@torch.inference_mode()
def test_a_silent_row_does_not_mind_a_loud_one(heard: tuple[Recognizer, Tensor, Tensor]):
    recognizer, memory, labels = heard
    quiet = labels.clone()
    quiet[:, 2:, Tokenizer.blank_id] = 30.0  # after two frames
    search = JointSearch(recognizer.model.decoder, LIMITS, -1, JointConfig(width=12, threshold=2.0))
    lengths = torch.tensor([FRAMES])
    _, alone = search.step(memory, quiet, lengths, search.init_state(1))
    _, both = search.step(memory.repeat(2, 1, 1), torch.cat([quiet, labels]), lengths.repeat(2), search.init_state(2))

    def prefixes(row: int, state: WideState) -> dict[tuple[int, ...], float]:
        h = state.hypotheses
        alive = [k for k in range(12) if h.score[row, k] > -torch.inf]
        best = float(h.score[row].max())
        return {tuple(h.tokens[row, k, : int(h.length[row, k])].tolist()): float(h.score[row, k]) - best for k in alive}

    expected = prefixes(0, alone)
    assert 1 < len(expected) < 12
    assert prefixes(0, both) == pytest.approx(expected, abs=1e-4)


@torch.inference_mode()
def test_rows_hear_different_numbers_of_frames(lively: Recognizer):
    """In every step another one each, at times none; garbage in the padding, and the text is that of the row alone."""
    model, rng = lively.model, torch.Generator().manual_seed(3)
    pieces = [sound(n) for n in (40_000, 23_000, 31_000)]
    heard = [model.encode(*model.features(x[None], torch.tensor([len(x)])))[0][0] for x in pieces]
    search = JointSearch(model.decoder, DecoderConfig(), lively.tokenizer.space_id, JointConfig(width=5, patience=9))

    def told(symbols: list[Symbol], row: int) -> Tensor:
        rows = [(s.token, s.frame, s.certain, s.p, s.q) for s in symbols if s.row == row]
        return torch.tensor(rows, dtype=torch.float64)

    alone = []
    for memory in heard:
        symbols, state = search.step(
            memory[None], model.ctc(memory[None]), torch.tensor([len(memory)]), search.init_state(1)
        )
        alone.append(told(symbols + search.flush(torch.tensor([True]), state)[0], 0))
    assert all(len(row) > 5 for row in alone)

    state, symbols, place = search.init_state(3), list[Symbol](), [0, 0, 0]
    while any(at < len(memory) for at, memory in zip(place, heard, strict=True)):
        counts = torch.randint(0, 6, (3,), generator=rng).tolist()
        block = torch.full((3, 5, heard[0].shape[1]), torch.nan)
        for row, memory in enumerate(heard):
            counts[row] = min(counts[row], len(memory) - place[row])
            block[row, : counts[row]] = memory[place[row] : place[row] + counts[row]]
            place[row] += counts[row]
        more, state = search.step(block, model.ctc(block), torch.tensor(counts), state)
        symbols += more
    symbols += search.flush(torch.ones(3, dtype=torch.bool), state)[0]
    for row in range(3):
        torch.testing.assert_close(told(symbols, row), alone[row], rtol=0, atol=1e-4)


def test_without_a_language_model_files_are_read_greedily(lively: Recognizer):
    other_symbols = Tokenizer.from_texts(["bcdefghijklmnopqrstuvwxyzé"])
    assert other_symbols.vocab_size == lively.tokenizer.vocab_size
    live = Recognizer(lively.model, other_symbols, phrases=PhraseBook(other_symbols))
    samples = sound(60_000)
    expected = [(e.text, e.frame) for e in live.transcribe(samples)]
    assert len(expected) > 10
    for other in (live.searching(4), live.searching(4, patience_s=0.4), live.settling(4)):
        assert [(e.text, e.frame) for e in other.transcribe(samples)] == expected
        assert other.phrases is not None and other.phrases is not live.phrases, "each is used from a thread of its own"


def test_a_model_is_searched_as_its_checkpoint_says(bundled: Recognizer):
    wants, said = SearchConfig(prior_weight=3.0, length_bonus=-4.0), []
    model_config = bundled.config.model_copy(update={"search": wants})
    config, fusion = joint_search(model_config, bundled.tokenizer, 4) or pytest.fail("there is a language model")
    assert (
        config.length_bonus == -4.0 and fusion.prior is not None and isinstance(fusion.parts[0][1], WordLanguageModel)
    )
    torch.testing.assert_close(fusion.prior, 3.0 * fusion.parts[0][1].prior())
    for search in (bundled.config.search, wants):
        model = copy.copy(bundled.model)
        model.config = model.config.model_copy(update={"search": search})
        recognizer = Recognizer(model, bundled.tokenizer)
        alone, both = (r.transcribe(speech("weather")) for r in (recognizer.searching(4), recognizer.settling(4)))
        assert text_of(alone) == text_of(both)
        said.append(len(text_of(alone)))
    assert said[1] < 0.8 * said[0]


def test_where_the_language_model_does_not_know_the_phones_it_weighs_as_without_any(bundled: Recognizer):
    weights = []
    for phones in (bundled.config.phones, tuple(f"?{n}" for n, _ in enumerate(bundled.config.phones))):
        model_config = bundled.config.model_copy(update={"phones": phones})
        _, fusion = joint_search(model_config, bundled.tokenizer, 4) or pytest.fail("there is a language model")
        weights.append((fusion.parts[0][0], fusion.words is not None))
    assert weights == [(bundled.config.search.language_weight, True), (SearchConfig().language_weight, False)]
    assert weights[0][0] > weights[1][0]


def test_searches_of_a_recogniser_share_its_network_and_language_model(bundled: Recognizer):
    files, settled = bundled.searching(4), bundled.settling(4)
    assert files._encoder is settled._encoder is bundled._encoder
    (_, language), (_, same) = files._fusion.parts[0], settled._fusion.parts[0]
    assert language is same and files._fusion.words and settled._fusion.words
    assert files._fusion.words.lexicon is settled._fusion.words.lexicon
