"""The LSTM beside the counts: its steps, its training, and what it says in a language model of characters."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mocha_model import word_ranges
from mocha_model.language import LanguageModelError, Recurrent, WordLanguageModel
from mocha_model.tokenizer import Tokenizer
from mocha_model.word_lstm import END, OTHER, Recalled, WordLSTM
from mocha_training.language import count_words, mixed, perplexity
from mocha_training.word_lstm import WordLSTMConfig, inclusion, train_word_lstm

# What comes last depends on the first word, which a trigram has forgotten.
TEXT = [f"{first} was seen {last}" for first, last in (("he", "here"), ("she", "there"))] * 40
SMALL = WordLSTMConfig(8, 32, 48, dropout=0.0, epochs=300, learning_rate=1e-2, warmup=5, samples=7)
OTHERS = {"zebra", *("a" * n for n in range(1, 10))}  # more than the LSTM has, and before most of its own
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz '"])


@pytest.fixture(scope="module")
def trained() -> tuple[WordLSTM, list[str]]:
    return train_word_lstm(TEXT, SMALL)


def in_mixture(tokenizer: Tokenizer, trained: tuple[WordLSTM, list[str]], share: float) -> WordLanguageModel:
    counts = count_words(TEXT, tokenizer, 1, OTHERS)
    words = np.array([counts.words.index(word) for word in trained[1]])
    return WordLanguageModel(counts, tokenizer, Recurrent(trained[0], words, share))


def log_prob(model: WordLanguageModel, tokenizer: Tokenizer, before: str, word: str) -> float:
    """Of `word` and the space after it, after whole words; the end of the sentence does not come there."""
    state, total = model.init_state(1, CPU), 0.0
    ids = tokenizer.encode(f"{before} {word} ")
    for n, token in enumerate(ids):
        if n >= len(ids) - len(word) - 1:
            total += float(model.scores(state)[0, token])
        state = model.advance(state, torch.tensor([token]))
    return total


def test_words_one_at_a_time_are_a_sentence(trained: tuple[WordLSTM, list[str]]):
    model = trained[0]
    words = torch.tensor([[END, 3, 4, OTHER, 5], [END, 6, 2, 2, 7]])
    state = model.init_state(2)
    for n, queries in enumerate(model(words).unbind(1)):
        assert torch.allclose(state.query.float(), queries, atol=0.02), n
        expected = (queries @ model.vectors.weight.T + model.bias)[:, 3]
        assert torch.allclose(model.log_probs(state, torch.tensor([3, 3])), expected, atol=0.05)
        if n + 1 < words.shape[1]:
            state = model.advance(state, words[:, n + 1])


def test_scores_are_log_probabilities_without_being_normalised(trained: tuple[WordLSTM, list[str]]):
    model, words = trained
    assert sorted(words) == sorted({word for s in TEXT for word in s.split()})
    number = {word: n for n, word in enumerate(words, OTHER + 1)}
    ids = torch.tensor([[END, *(number.get(word, OTHER) for word in TEXT[0].split())]])
    total = (model(ids)[0] @ model.vectors.weight.T + model.bias).logsumexp(1)
    assert total.abs().max() < 0.2
    raw, _ = train_word_lstm(TEXT, replace(SMALL, normalisation=0.0))
    assert (raw(ids)[0] @ raw.vectors.weight.T + raw.bias).logsumexp(1).abs().max() > 2 * total.abs().max()


def test_drawn_words_stand_for_all():
    torch.manual_seed(0)
    drawn = 1 / torch.arange(1.0, 301)
    drawn /= drawn.sum()
    chance = inclusion(drawn, 60)
    assert chance.sum().item() == pytest.approx(60, rel=1e-4) and (chance[:-1] > chance[1:]).all()
    others = torch.stack([drawn.multinomial(60) for _ in range(5000)])
    among = others.flatten().bincount(minlength=300) / 5000
    for part in (slice(0, 3), slice(3, 30), slice(30, 100), slice(100, 300)):
        assert chance[part].mean().item() == pytest.approx(among[part].mean().item(), rel=0.02)
    worth = torch.rand(300)
    assert (worth / chance)[others].sum(1).mean().item() == pytest.approx(worth.sum().item(), rel=0.02)
    assert torch.equal(inclusion(drawn, 300), torch.ones(300)), "all of them, once each"


def test_training_is_seeded_and_says_how_far_it_is():
    quick = replace(SMALL, epochs=2)
    told: list[float] = []
    first, again, other = (
        train_word_lstm(TEXT, config, told.append)[0] for config in (quick, quick, replace(quick, seed=1))
    )
    assert torch.equal(first.bias, again.bias) and not torch.equal(first.bias, other.bias)
    assert train_word_lstm(TEXT, replace(quick, num_words=4))[1] == ["was", "seen"]
    assert told[0] > 0 and told[len(told) // 3 - 1] == 1.0


def by_counts(model: WordLanguageModel, words: list[str], next_number: int) -> tuple[float, float]:
    """The counts' probability of a number of a word, or of the end of the sentence, and of an unknown word."""
    previous, last = (torch.tensor([model.counts.words.index(word)]) for word in words[-2:])
    place = torch.tensor([[next_number, next_number + 1]])
    below, unknown = model._below(last, model._after(previous, last), place)
    return float(below.diff(dim=1)), math.exp(float(unknown))


@pytest.mark.parametrize("before", ["she was", "he was seen", "she was seen"])
def test_words_have_the_probabilities_of_the_mixture(
    tokenizer: Tokenizer, trained: tuple[WordLSTM, list[str]], before: str
):
    lstm, share, said = trained[0], 0.4, before.split()
    model = in_mixture(tokenizer, trained, share)
    number, known = {word: n for n, word in enumerate(trained[1], OTHER + 1)}, model.counts.words
    state = lstm.init_state(1)
    for word in said:
        state = lstm.advance(state, torch.tensor([number[word]]))
    by_lstm = lstm.log_probs(state, torch.arange(len(number) + 2)).exp().tolist()
    goes_on = 1 - by_counts(model, said, len(known))[0]
    total = 0.0
    for n, word in enumerate(known):
        counted, unknown = by_counts(model, said, n)
        mixture = counted
        if word in number:
            mixture = (1 - share) * counted + share * goes_on * min(1, by_lstm[number[word]] / (1 - by_lstm[END]))
        ids = [tokenizer.space_id, *tokenizer.encode(word), tokenizer.blank_id]
        spelled = unknown * math.exp(sum(model.counts.spelling[a, b] for a, b in itertools.pairwise(ids)))
        goes_on_again = 1 - by_counts(model, [*said, word], len(known))[0]
        expected = (mixture + spelled) / goes_on * goes_on_again  # the space before it has said that the first goes on
        assert log_prob(model, tokenizer, before, word) == pytest.approx(math.log(expected), abs=1e-2), word
        total += mixture
    assert total == pytest.approx(goes_on, abs=0.1)


@pytest.mark.parametrize("most", [2, 3000])
def test_beginnings_of_words_have_the_probabilities_of_the_mixture(
    tokenizer: Tokenizer, trained: tuple[WordLSTM, list[str]], monkeypatch: pytest.MonkeyPatch, most: int
):
    """Those of the words that begin so; what is not summed is shared out as by the counts."""
    monkeypatch.setattr(word_ranges, "MOST", most)
    share, said = 0.4, ["she", "was", "seen"]
    model = in_mixture(tokenizer, trained, share)
    state = model.init_state(1, CPU)
    for token in tokenizer.encode("she was seen "):
        state = model.advance(state, torch.tensor([token]))
    assert isinstance(state.recalled, Recalled)
    lstm, known = trained[0], model.counts.words
    number = {word: n for n, word in enumerate(trained[1], OTHER + 1)}
    by_lstm = lstm.log_probs(state.recalled, torch.arange(len(number) + 2)).exp().tolist()
    goes_on = 1 - by_counts(model, said, len(known))[0]
    counted = {word: by_counts(model, said, n)[0] for n, word in enumerate(known)}
    summed = {word: goes_on * by_lstm[number[word]] / (1 - by_lstm[END]) for word in trained[1][:most]}
    unigrams = dict(zip(known, model.counts.unigrams[:-1].tolist(), strict=True))
    rare = max(1e-6, 1 - sum(unigrams[word] for word in summed) / sum(unigrams.values()))
    left = max(0.05, goes_on - sum(summed.values())) / rare
    for letter in "hstwz":
        words = [word for word in known if word.startswith(letter)]
        others = 1 - sum(unigrams[w] for w in words if w in summed) / max(1e-12, sum(unigrams[w] for w in words))
        by_counting = sum(counted[word] for word in words)
        expected = sum(summed.get(word, 0.0) for word in words) + left * others * by_counting
        spelled = by_counts(model, said, 0)[1] * math.exp(
            model.counts.spelling[tokenizer.space_id, tokenizer.encode(letter)[0]]
        )
        mixture = ((1 - share) * by_counting + share * expected + spelled) / goes_on
        found = float(model.scores(state)[0, tokenizer.encode(letter)[0]])
        assert found == pytest.approx(math.log(mixture), abs=2e-2), letter


def test_rows_do_not_mind_each_other(tokenizer: Tokenizer, trained: tuple[WordLSTM, list[str]]):
    model, texts = in_mixture(tokenizer, trained, 0.5), ["he was seen", "she was  se", "aaa he she ", "h wasss see"]
    ids = torch.tensor([tokenizer.encode(text) for text in texts])
    together, alone = model.init_state(4, CPU), [model.init_state(1, CPU) for _ in texts]
    for n in range(ids.shape[1]):
        before = [x.clone() for x in vars(together.recalled).values()]
        after = model.advance(together, ids[:, n])
        assert all(torch.equal(a, b) for a, b in zip(before, vars(together.recalled).values(), strict=True))
        together, alone = after, [model.advance(s, ids[row : row + 1, n]) for row, s in enumerate(alone)]
        assert torch.allclose(model.scores(together), torch.cat([model.scores(s) for s in alone]), atol=1e-2)


def test_a_sentence_is_remembered_from_its_beginning(tokenizer: Tokenizer, trained: tuple[WordLSTM, list[str]]):
    counted, model = (in_mixture(tokenizer, trained, share) for share in (0.0, 0.8))
    for before, right, wrong in (("she", "there", "here"), ("he", "here", "there")):
        said = f"{before} was seen"
        gap = [log_prob(m, tokenizer, said, right) - log_prob(m, tokenizer, said, wrong) for m in (counted, model)]
        assert abs(gap[0]) < 0.7 and gap[1] > 1.5
    state = model.restart(model.advance(model.init_state(1, CPU), torch.tensor([tokenizer.encode("s")[0]])))
    fresh = model.init_state(1, CPU)
    assert isinstance(state.recalled, Recalled) and isinstance(fresh.recalled, Recalled)
    assert torch.equal(state.recalled.query, fresh.recalled.query)


def test_the_share_is_that_which_sentences_want(tokenizer: Tokenizer, trained: tuple[WordLSTM, list[str]]):
    counts, held = count_words(TEXT, tokenizer, 1), TEXT[:2]
    best = mixed(counts, *trained, held, tokenizer)
    own = perplexity(best, held, tokenizer)
    assert best.recurrent and best.recurrent.share == 0.8
    less, none = in_mixture(tokenizer, trained, 0.2), WordLanguageModel(counts, tokenizer)
    assert own < perplexity(less, held, tokenizer) < perplexity(none, held, tokenizer)


def test_files_keep_it(tokenizer: Tokenizer, trained: tuple[WordLSTM, list[str]], tmp_path: Path):
    path, model = tmp_path / "lm.safetensors", in_mixture(tokenizer, trained, 0.5)
    model.save(path, tokenizer, {})
    loaded = WordLanguageModel.load(path, tokenizer)
    assert loaded.recurrent and loaded.recurrent.share == 0.5
    a, b = (log_prob(m, tokenizer, "he was seen", "here") for m in (model, loaded))
    assert a == pytest.approx(b, abs=0.02)
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    words = tensors["recurrent.words"]
    for share in ("nan", "1.1", "half"):
        save_file(tensors, tmp_path / "broken.safetensors", metadata | {"share": share})
        with pytest.raises(LanguageModelError, match="do not fit together"):
            WordLanguageModel.load(tmp_path / "broken.safetensors", tokenizer)
    for name, broken in (
        ("recurrent.words", words + 9999),
        ("recurrent.words", words[1:]),
        ("recurrent.words", words[:, None]),
        ("recurrent.words", np.asarray(words[0])),
        ("recurrent.lstm.query.weight", tensors["recurrent.lstm.query.weight"][0]),
        ("recurrent.lstm.query.weight", tensors["recurrent.lstm.query.weight"][:3]),
        ("recurrent.lstm.bias", None),
    ):
        kept = {n: t for n, t in tensors.items() if n != name} | ({name: broken} if broken is not None else {})
        save_file(kept, tmp_path / "broken.safetensors", metadata)
        with pytest.raises(LanguageModelError, match="do not fit together"):
            WordLanguageModel.load(tmp_path / "broken.safetensors", tokenizer)
