"""How words sound: what a word gains, against the definition of CTC, and what a search makes of it."""

import itertools
import math

import pytest
import torch
from tests.conftest import lively_recognizer
from torch import Tensor
from torch.nn.functional import ctc_loss

from mocha_model.config import DecoderConfig, ModelConfig, tiny
from mocha_model.joint import JointConfig, JointSearch
from mocha_model.language import WordLanguageModel
from mocha_model.pronounced import LEAST_LOG_PROB, REACH, UNKNOWN, WORST, Lexicon, WordReader
from mocha_model.recognizer import joint_fusion
from mocha_model.tokenizer import Tokenizer
from mocha_training.language import count_words

PHONES = ("x", "y")
WORDS = ((1,), (2,), (1, 2), (2, 2), ())  # by number; the last has no phones that are known
FRAMES = 5


def reader(weight: float = 1.0, bonus: float = 0.0) -> WordReader:
    lexicon = Lexicon.of([tuple(PHONES[n - 1] for n in word) for word in WORDS], PHONES)
    assert lexicon is not None
    return WordReader(lexicon, weight, bonus)


def heard(seed: int, num_frames: int = FRAMES) -> Tensor:
    """Log-probabilities [T, 3] of two phones and the blank."""
    scores = torch.randn(num_frames, 3, generator=torch.Generator().manual_seed(seed))
    return scores.log_softmax(1)


def up_to(log_probs: Tensor, frame: int) -> Tensor:
    """The window [1, K, P] that ends with `frame`; blanks before the first."""
    window = torch.full((REACH, log_probs.shape[1]), LEAST_LOG_PROB)
    window[:, 0] = 0
    kept = log_probs[: frame + 1][-REACH:]
    window[REACH - len(kept) :] = kept
    return window[None]


def read(log_probs: Tensor, *words: tuple[int, int], end: int | None = None, of: WordReader | None = None) -> float:
    """What words gain in all, each read at a frame; with `end` -1 as the last after so many frames."""
    words_of, only = of or reader(), torch.tensor([0])
    state, total = words_of.init_state(only), 0.0
    for word, frame in words:
        at = torch.tensor([frame])
        state, gain = words_of.read(state, torch.tensor([word]), up_to(log_probs, frame), only, at)
        total += float(gain)
    if end is not None:
        total += float(words_of.close(state, torch.tensor([-1]), up_to(log_probs, end), only, torch.tensor([end])))
    return total


def begins_in_time(path: tuple[int, ...], phones: list[int], limits: list[int | None]) -> bool:
    """Whether what a path spells begins with `phones`, each of which begins by its limit, if it has one."""
    spelled = [(label, t) for t, label in enumerate(path) if label and (t == 0 or path[t - 1] != label)]
    return len(spelled) >= len(phones) and all(
        label == phone and (limit is None or t <= limit)
        for (label, t), phone, limit in zip(spelled, phones, limits, strict=False)
    )


@pytest.mark.parametrize("words", [((0, 2),), ((2, 3),), ((0, 1), (1, 4)), ((1, 1), (3, 4)), ((0, 0), (0, 2), (1, 3))])
def test_words_gain_how_likely_it_is_that_what_was_heard_begins_with_them(words: tuple[tuple[int, int], ...]):
    """The sum over all paths that begin with their phones, the last phone of each word by the frame it is read at."""
    log_probs = heard(len(words))
    phones = [phone for word, _ in words for phone in WORDS[word]]
    limits = [limit for word, frame in words for limit in [None] * (len(WORDS[word]) - 1) + [frame]]
    paths = itertools.product(range(3), repeat=FRAMES)
    total = sum(
        math.exp(sum(float(log_probs[t, label]) for t, label in enumerate(path)))
        for path in paths
        if begins_in_time(path, phones, limits)
    )
    assert read(log_probs, *words) == pytest.approx(math.log(total), abs=1e-3)


def test_all_words_at_the_end_gain_what_ctc_says_of_their_phones():
    log_probs = heard(7, 30)
    words = [2, 3, 0, 0, 1]
    phones = [phone for word in words for phone in WORDS[word]]
    lengths = torch.tensor([30]), torch.tensor([len(phones)])
    expected = -float(ctc_loss(log_probs[:, None], torch.tensor([phones]), *lengths, reduction="sum"))
    assert read(log_probs, *((word, 29) for word in words), end=29) == pytest.approx(expected, abs=1e-3)
    weighed = read(log_probs, *((word, 29) for word in words), end=29, of=reader(0.5, 0.25))
    assert weighed == pytest.approx(0.5 * expected + 0.25 * len(phones), abs=1e-3)


def test_a_word_whose_phones_are_not_known_may_have_ended_at_any_frame():
    log_probs = heard(3, 20)
    assert read(log_probs, (4, 9)) == UNKNOWN
    found = read(log_probs, (4, 9), (1, 19)) - UNKNOWN
    # From each of the K frames up to 9 on: blanks, and then the phone.
    silence, phone = log_probs[:, 0].tolist(), log_probs[:, 2].tolist()
    total, ended = 0.0, {t: 1 / REACH for t in range(9 - REACH + 1, 10)}
    waits = 0.0
    for t in range(20):
        before = ended.get(t - 1, 0.0) if t <= 10 else waits
        total += before * math.exp(phone[t])
        waits = before * math.exp(silence[t]) if t > 9 else ended[t]
    assert found == pytest.approx(math.log(total), abs=1e-3) and found < 0


def test_what_cannot_be_heard_gains_the_worst_and_no_less():
    silence = torch.tensor([[0.0, -torch.inf, -torch.inf]]).repeat(10, 1)
    assert read(silence, (2, 9)) == WORST
    later = torch.cat([silence, heard(4, 10)])
    assert math.isfinite(read(later, (2, 9), (1, 19), end=19))


def test_what_is_far_back_was_silence():
    near, far = heard(5, 10), heard(6, 10)
    pause = torch.tensor([[-50.0, -0.7, -0.7]]).repeat(REACH, 1)  # beyond reach, whatever it was
    early = read(near, (0, 9))
    ended = read(near, (0, 9), end=9) - early  # and nothing else was said
    both = read(torch.cat([near, pause, far]), (0, 9), (1, REACH + 19))
    tail = torch.cat([pause, far])[-REACH:]
    assert both - early == pytest.approx(ended + read(tail, (1, REACH - 1)), abs=1e-3)


@pytest.mark.parametrize("at_once", [2, 1024])
def test_rows_do_not_mind_one_another(monkeypatch: pytest.MonkeyPatch, at_once: int):
    monkeypatch.setattr("mocha_model.pronounced.AT_ONCE", at_once)
    words_of, log_probs = reader(), [heard(8, 12), heard(9, 12)]
    windows, now = torch.cat([up_to(x, 11) for x in log_probs]), torch.tensor([11, 11, 11])
    start, words, streams = words_of.init_state(torch.tensor([0, 0, 0])), (2, 1, 1), (0, 1, 0)
    state, gain = words_of.read(start, torch.tensor(words), windows, torch.tensor(streams), now)
    for row, (word, stream) in enumerate(zip(words, streams, strict=True)):
        start, only = words_of.init_state(torch.tensor([0])), torch.tensor([0])
        alone, own = words_of.read(start, torch.tensor([word]), windows[[stream]], only, now[:1])
        torch.testing.assert_close(gain[row : row + 1], own)
        torch.testing.assert_close(state.blank[row : row + 1], alone.blank)


@torch.inference_mode()
@pytest.mark.parametrize("said", ["a", "b"])
def test_a_search_writes_the_word_that_sounds_like_what_was_heard(said: str):
    """Two words between which neither spelling nor language model can tell."""
    recognizer = lively_recognizer()
    tokenizer = recognizer.tokenizer
    counts = count_words(["a", "b"] * 4, tokenizer, 1)
    language = WordLanguageModel(counts, tokenizer, said=(("x",), ("y",)))
    config = ModelConfig(vocab_size=tokenizer.vocab_size, phones=PHONES)
    memory = recognizer.model.decoder.output.weight.new_zeros(1, 12, recognizer.model.config.encoder.output_size)
    labels = torch.full((1, 12, tokenizer.vocab_size), -9.0)
    labels[..., Tokenizer.blank_id] = 0.0
    for symbol in "ab":
        labels[:, 4, tokenizer.encode(symbol)[0]] = 3.0
    phones = torch.full((1, 12, 3), -6.0)
    phones[..., 0] = 0.0
    phones[:, 4, 1 + "ab".index(said)] = 6.0
    limits = DecoderConfig(endpoint_frames=1000)
    found = {}
    for weight in (None, 0):
        fusion = joint_fusion(language, config, prior_weight=0.0, phone_weight=weight)
        search = JointSearch(recognizer.model.decoder, limits, tokenizer.space_id, JointConfig(8), fusion)
        given = {"phones": phones.log_softmax(2)} if fusion.words else {}
        told, state = search.step(memory, labels, torch.tensor([12]), search.init_state(1), **given)
        rest, _ = search.flush(torch.tensor([True]), state)
        found[weight] = "".join(
            tokenizer.symbol(s.token) for s in (*told, *rest) if s.token >= Tokenizer.first_id
        ).strip()
    assert found[None] == said
    assert found[0] in ("a", "b")


def test_a_few_words_may_have_phones_that_nobody_hears():
    lexicon = Lexicon.of([*[("x", "y")] * 19, ("x", "z"), ()], PHONES)
    assert lexicon is not None and lexicon.lengths.tolist() == [2] * 19 + [0, 0]
    assert lexicon.labels[0].tolist() == [1, 2]
    assert Lexicon.of([*[("x", "y")] * 18, ("x", "z")], PHONES) is None


def test_phones_of_others_are_not_asked():
    tokenizer = lively_recognizer().tokenizer
    counts = count_words(["a", "b"] * 4, tokenizer, 1)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, phones=("x", "z"))
    for said, asked in ((("x",), True), (("y",), False)):
        language = WordLanguageModel(counts, tokenizer, said=(said, ()))
        assert (joint_fusion(language, config).words is not None) == asked
    assert joint_fusion(WordLanguageModel(counts, tokenizer), config).words is None
    assert joint_fusion(language, replace_phones(config, ())).words is None


def replace_phones(config: ModelConfig, phones: tuple[str, ...]) -> ModelConfig:
    return config.model_copy(update={"phones": phones})


def test_a_head_of_phones_needs_a_layer_below_the_last():
    alone = tiny(20).encoder.model_copy(update={"lstm_sizes": (16,)})
    with pytest.raises(ValueError, match="below the last of at least two LSTM layers"):
        ModelConfig.model_validate(tiny(20).model_dump() | {"encoder": alone.model_dump(), "phones": PHONES})
