"""Phrases: what they are worth to a search, what their words cost it, and how they sound."""

import logging
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.conftest import lively_recognizer, sound
from tests.training.made_up import needs_voice

from mocha_model import phrases
from mocha_model.config import DecoderConfig, ModelConfig
from mocha_model.emissions import text_of
from mocha_model.joint import JointConfig, JointSearch, wording
from mocha_model.language import WordLanguageModel
from mocha_model.phrases import SPELLED, LivePhrases, PhraseBook, Wording
from mocha_model.pronounced import ASTRAY, UNKNOWN, Lexicon
from mocha_model.pronunciation import pronounce
from mocha_model.recognizer import Recognizer, joint_fusion
from mocha_model.scorers import Fusion, Scorer
from mocha_model.tokenizer import Tokenizer
from mocha_training.language import count_words


def test_phrases_earn_their_bonus_only_when_complete():
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    book = PhraseBook(tokenizer, bonus=1.0)
    root = book.add(["New York!", "new", "bat"])

    def total(text: str) -> float:
        return worth_of(book, root, tokenizer.encode(text))

    assert total("bat ") == 4 and total("a bat ") == 4
    assert total("bad ") == 0 and total("bath ") == 0 and total("abat ") == 0
    assert total("new ") == 4 and total("new bat ") == 8
    assert total("new york ") == 9 and total("new yolk ") == 4 and total("new yo") == 6


def test_what_words_of_phrases_cost_is_paid_back_with_their_bonus():
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    bat = tokenizer.encode("bat")

    class Priced(Wording):
        def __init__(self) -> None:
            self.lexicon = Lexicon(("x",), torch.tensor([[1]]), torch.tensor([1]))

        def labels(self, words: Iterable[str]) -> dict[str, list[int]]:
            return {}

        def price(self, word: Sequence[int], ends: bool, sounds: bool) -> float:
            """Of a word that is known as far as "ba"."""
            return 10.0 * (list(word) == bat) + 5.0 * ends

    book = PhraseBook(tokenizer, 1.0, Priced())
    root = book.add(["a bat"])

    def total(text: str) -> float:
        return worth_of(book, root, tokenizer.encode(text))

    assert total("a ba") == 4 + 5 and total("a bat") == 5 + 15 and total("a bat ") == 6 + 20
    assert total("a bad") == total("a bats") == total("b") == 0
    assert worth_of(book, root, [*tokenizer.encode("a bat"), Tokenizer.eos_id]) == 6 + 20
    for text, bonus in (("a bat ", 6), ("a bat", 5), ("a bad", 0)):
        assert worth_of(book, root, tokenizer.encode(text), LivePhrases(book)) == bonus


def test_a_phrase_may_begin_inside_another_that_is_not_said():
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    book = PhraseBook(tokenizer, bonus=1.0)
    root = book.add(["jan kowalski", "smith", "jan kowalska novak", "the new york show", "york"])

    def total(text: str) -> float:
        return worth_of(book, root, tokenizer.encode(text))

    assert total("jan smith ") == 6 and total("jan jan kowalski ") == 13 and total("jan smi") == 3
    assert total("the new york ") == 13 and total("the new york times ") == 5 and total("the new york show ") == 18
    assert total("jansmith ") == total("jan s ") == 0


@pytest.mark.parametrize("seed", range(20))
def test_phrases_are_found_as_defined(seed: int):
    """At the end of each word the longest phrase that the text ends with, and breaks none that was found before."""
    tokenizer, rng = Tokenizer.from_texts(["abc "]), random.Random(seed)
    phrases = {tuple(rng.choices(["a", "b", "ab", "aa"], k=rng.randint(1, 4))) for _ in range(rng.randint(1, 6))}
    words = rng.choices(["a", "b", "ab", "ca", "aa"], k=200)
    book = PhraseBook(tokenizer, bonus=1.0)
    state, worth = book.at(torch.tensor([book.add([" ".join(phrase) for phrase in sorted(phrases)])])), 0.0
    found: list[range] = []
    for end in range(1, len(words) + 1):
        for start in range(max(0, end - 4), end):
            broken = any(one.start < start < one.stop for one in found)
            if tuple(words[start:end]) in phrases and not broken:
                found = [*(one for one in found if one.stop <= start), range(start, end)]
                break
        symbols = tokenizer.encode(words[end - 1] + " ")
        said = sum(len(words[n]) + 1 for one in found for n in one)
        for symbol in symbols:
            if symbol == tokenizer.space_id:
                assert worth + float(book.scores(state)[0, Tokenizer.eos_id]) == said
            worth, state = worth + float(book.scores(state)[0, symbol]), book.advance(state, torch.tensor([symbol]))
        assert worth + float(book.scores(state)[0, Tokenizer.eos_id]) == said
    assert found


def worth_of(book: PhraseBook, root: int, tokens: list[int], scorer: Scorer | None = None) -> float:
    """Of `tokens`, to the search that has the book, or another `scorer` of the same phrases."""
    state, worth, scorer = book.at(torch.tensor([root])), 0.0, scorer or book
    for token in tokens:
        worth += float(scorer.scores(state)[0, token])
        state = scorer.advance(state, torch.tensor([token]))
    return worth


def test_each_row_has_its_own_phrases():
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    book, rng = PhraseBook(tokenizer), random.Random(0)
    lists: dict[int, list[str]] = {}
    for turn in range(200):
        if turn % 3 == 2:
            gone = rng.choice(list(lists))
            book.remove(gone)
            del lists[gone]
        phrases = ["".join(rng.choices("abcd", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5))]
        root = book.add(phrases)
        if root in lists:
            assert set(lists[root]) == set(phrases)
            book.remove(root)
        else:
            lists[root] = phrases
    for root, phrases in lists.items():  # each is worth what it would be alone
        alone = PhraseBook(tokenizer)
        for _ in range(5):
            tokens = tokenizer.encode(" ".join([rng.choice(phrases), *rng.choices("abcd", k=3)]) + " ")
            assert worth_of(book, root, tokens) == worth_of(alone, alone.add(phrases), tokens)
            alone = PhraseBook(tokenizer)
    assert book.add([]) == book.add(["?!"]) == 0 and worth_of(book, 0, tokenizer.encode("abcd ")) == 0
    for root in lists:
        book.remove(root)
    assert len(book) == 0


def test_the_same_phrases_of_several_rows_are_kept_once():
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    book, tokens = PhraseBook(tokenizer), tokenizer.encode("bad ")
    root = book.add(["Bad", "a cab"])
    worth, other = worth_of(book, root, tokens), book.add(["bad"])
    assert book.add(["a cab", "bad", "bad"]) == root != other and len(book) == 2
    book.remove(root)
    assert worth_of(book, root, tokens) == worth > 0 and len(book) == 2
    book.remove(root)
    assert len(book) == 1 and book.add(["a cab", "bad"]) != other
    assert worth_of(book, other, tokens) > 0


def test_lists_that_come_and_go_leave_their_room_to_others():
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    book, rng = PhraseBook(tokenizer, bonus=1.0), random.Random(0)
    lists: dict[int, list[str]] = {}
    for _ in range(200):
        if len(lists) == 5:
            gone = rng.choice(list(lists))
            book.remove(gone)
            del lists[gone]
        phrases = ["".join(rng.choices("abcdefgh", k=10)) for _ in range(rng.randint(10, 40))]
        lists[book.add(phrases)] = phrases
    assert len(book._table.worth) < 10_000  # five lists of at most 440 nodes are alive
    for root, phrases in lists.items():
        assert all(worth_of(book, root, tokenizer.encode(phrase + " ")) == 11 for phrase in phrases)


def test_a_search_goes_on_while_the_table_grows(monkeypatch: pytest.MonkeyPatch):
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    book, tokens, roots = PhraseBook(tokenizer, bonus=1.0), tokenizer.encode("bad "), []
    bad, cab = book.add(["bad"]), book.add(["a cab"])
    grows, may_go_on, longer = threading.Event(), threading.Event(), phrases._longer

    def slowly(x: torch.Tensor, more: int) -> torch.Tensor:
        grows.set()
        assert may_go_on.wait(60)
        return longer(x, more)

    monkeypatch.setattr(phrases, "_longer", slowly)
    adding = threading.Thread(target=lambda: roots.append(book.add(["bad" * 20])))
    adding.start()
    assert grows.wait(60)
    assert worth_of(book, bad, tokens) == 4 and worth_of(book, cab, tokenizer.encode("a cab ")) == 6
    book.remove(cab)
    assert book.add(["bad"]) == bad and not roots
    book.remove(bad)
    book.remove(bad)
    assert len(book) == 0
    may_go_on.set()
    adding.join()
    assert worth_of(book, roots[0], tokenizer.encode("bad" * 20 + " ")) == 61 and len(book) == 1


def test_phrases_are_written_as_the_recogniser_writes_or_left_out(caplog: pytest.LogCaptureFixture):
    tokenizer = Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz "])
    book = PhraseBook(tokenizer, bonus=1.0)
    phrases._warn.cache_clear()
    root = book.add(["Café Zoë", "?!"])
    assert worth_of(book, root, tokenizer.encode("cafe zoe ")) == 9 and not caplog.messages
    assert book.add(["R2D2", "日本"]) == 0 and book.add(["covid 19", "zoe cafe", "Zoé Café"]) == book.add(["zoe cafe"])
    assert len(caplog.messages) == 1 and "left out" in caplog.messages[0] and "covid" not in caplog.text
    of_all = PhraseBook(Tokenizer.from_texts(["café"]), bonus=1.0)
    assert worth_of(of_all, of_all.add(["Café"]), of_all._tokenizer.encode("café ")) == 5, "which it does write"


@torch.inference_mode()
def test_a_phrase_that_ends_a_segment_keeps_its_bonus(lively: Recognizer):
    tokenizer, decoder = lively.tokenizer, lively.model.decoder
    book = PhraseBook(tokenizer, bonus=1.0)
    root = book.add(["call kowalski", "bat"])

    def total(text: str) -> float:
        return worth_of(book, root, [*tokenizer.encode(text), Tokenizer.eos_id])

    assert total("call kowalski") == total("call kowalski ") == 14
    assert total("call kowalsk") == total("call") == total("call ") == total("a") == 0
    labels = torch.full((1, 3, tokenizer.vocab_size), -20.0)
    for frame, symbol in enumerate(tokenizer.encode("bad")):
        labels[0, frame, symbol] = 0.0
    labels[0, 2, tokenizer.encode("t")] = -2.0
    search = JointSearch(decoder, DecoderConfig(), tokenizer.space_id, JointConfig(8), Fusion(((1.0, book),)))
    state = search.init_state(1, (book.at(torch.tensor([root])),))
    memory = torch.zeros(1, 3, decoder.attention.energies.memory_size)
    told, state = search.step(memory, labels, torch.tensor([3]), state)
    rest, _ = search.flush(torch.tensor([True]), state)
    assert tokenizer.decode(s.token for s in told + rest) == "bat"


def test_greedy_search_follows_the_phrases_of_each_row(lively: Recognizer):
    samples = sound(60_000)
    plain = Recognizer(lively.model, lively.tokenizer)
    heard = [text_of(plain.transcribe(samples))] * 2
    favoured = ["qzqz", "jj"]
    recognizer = Recognizer(lively.model, lively.tokenizer, phrases=PhraseBook(lively.tokenizer, bonus=100.0))
    roots = torch.tensor([0, recognizer.phrases.add(favoured)])
    state = recognizer.init_state(2, roots)
    both = torch.stack([samples, samples])
    for _ in range(2):  # the phrases stay when a stream begins anew
        found, state = recognizer.step(both, torch.tensor([len(samples)] * 2), state)
        rest, state = recognizer.flush(state, torch.tensor([True, True]))
        texts = [text_of(a + b) for a, b in zip(found, rest, strict=True)]
        assert texts[0] == heard[0] and texts[1] != heard[1]
        assert set(texts[1].split()) & set(favoured)


def test_phrases_get_back_what_words_cost_that_are_not_known():
    tokenizer = lively_recognizer().tokenizer
    language = WordLanguageModel(count_words(["a", "b", "abb"] * 4, tokenizer, 1), tokenizer, said=(("x",), (), ("y",)))
    assert language.counts.words == ("a", "abb", "b")
    config = ModelConfig(vocab_size=tokenizer.vocab_size, phones=("x", "y"))
    fusion = joint_fusion(language, config, language_weight=2.0)
    words, space = wording(fusion, tokenizer), tokenizer.space_id
    assert words is not None and wording(joint_fusion(language, config, phone_weight=0), tokenizer) is None
    for text, known in (("a", True), ("abb", True), ("b", True), ("ab", False), ("abba", False), ("baab", False)):
        word, state, astray = tokenizer.encode(text), language.init_state(1, torch.device("cpu")), 0.0
        for place, symbol in enumerate(word, 1):
            state = language.advance(state, torch.tensor([symbol]))
            gone = bool(language.astray(state))
            astray += ASTRAY * gone
            back = astray + gone * SPELLED * 2.0 * float(state.spelled)
            assert words.price(word[:place], False, False) == pytest.approx(-back, abs=1e-4)
        number = language.advance(state, torch.tensor([space])).previous
        silent = fusion.words.lexicon.lengths[number] == 0
        assert bool(silent) == (text not in ("a", "b"))
        spelled = state.spelled + language._spelling[word[-1], Tokenizer.blank_id]
        back = astray + (not known) * SPELLED * 2.0 * float(spelled)
        assert words.price(word, True, True) == pytest.approx(-back, abs=1e-4)
        assert words.price(word, True, False) == pytest.approx(-back - UNKNOWN * bool(silent), abs=1e-4)


def asked(words: Sequence[str], spoken: Iterable[str]) -> tuple[Tokenizer, Fusion, tuple[str, ...]]:
    """A search that knows `words`, and hears the phones of these and of `spoken`."""
    tokenizer, said = lively_recognizer().tokenizer, pronounce([*words, *spoken])
    heard = tuple(sorted({phone for phones in said.values() for phone in phones}))
    counts = count_words(list(words) * 4, tokenizer, 1)
    language = WordLanguageModel(counts, tokenizer, said=tuple(said[word] for word in counts.words))
    config = ModelConfig(vocab_size=tokenizer.vocab_size, phones=heard)
    return tokenizer, joint_fusion(language, config, prior_weight=0.0), heard


@needs_voice
def test_words_of_phrases_sound_as_espeak_says_where_the_search_does_not_know_them():
    tokenizer, fusion, heard = asked(["tea", "extraordinarily"], ["jan", "kowalski"])
    book, said = PhraseBook(tokenizer, 1.0, wording(fusion, tokenizer)), pronounce(["jan", "kowalski"])
    assert book.sounds(book.at(torch.tensor([0]))) is None
    gone, root = book.add(["kowalski"]), book.add(["Jan Kowalski", "tea", "zhivago", "b\u2488"])  # says two lines
    book.remove(gone)
    assert book.add(["tea"]) != root

    def sounds(text: str, ended: bool = True) -> tuple[str, ...]:
        state = book.at(torch.tensor([root]))
        for token in tokenizer.encode(text):
            state = book.advance(state, torch.tensor([token]))
        found = book.sounds(state, ended)
        assert found is not None and found.shape == (1, fusion.words.lexicon.labels.shape[1])
        return tuple(heard[n - 1] for n in found[0].tolist() if n)

    assert sounds("jan ") == said["jan"] and sounds("jan kowalski ") == said["kowalski"]
    assert sounds("jan", ended=False) == said["jan"] and sounds("jan kowalski", ended=False) == said["kowalski"]
    assert sounds("tea ") == (), "the search knows that"
    assert sounds("zhivago ") == (), "nobody hears its phones"
    assert sounds("kowalski ") == sounds("ja", ended=False) == sounds("jan", ended=True) == sounds("jan ", False) == ()


@needs_voice
@torch.inference_mode()
@pytest.mark.parametrize("text", ["ti", "to", "ti tea", "to tea"])
def test_a_search_writes_the_name_that_sounds_like_what_was_heard(text: str):
    """Two names, neither of which the search knows and between which spelling cannot tell."""
    tokenizer, fusion, heard = asked(["tea"], ["ti", "to"])
    recognizer = lively_recognizer()
    book = PhraseBook(tokenizer, 3.0, wording(fusion, tokenizer))
    root = book.add(["ti", "to"])
    fusion = replace(fusion, parts=(*fusion.parts, (1.0, book)))
    labels, sounds = torch.full((1, 16, tokenizer.vocab_size), -9.0), torch.full((1, 16, len(heard) + 1), -9.0)
    labels[..., Tokenizer.blank_id] = sounds[..., 0] = 0.0
    for frame, symbol in enumerate(tokenizer.encode(text), 3):
        labels[:, frame, symbol] = 9.0
    labels[:, 4, tokenizer.encode("io")] = 9.0
    said = [phone for word in text.split() for phone in pronounce([word])[word]]
    for frame, phone in zip((3, 4, 7, 8), said, strict=False):
        sounds[:, frame, 1 + heard.index(phone)] = 9.0
    search = JointSearch(recognizer.model.decoder, DecoderConfig(), tokenizer.space_id, JointConfig(8), fusion)
    before = fusion.init_state(1, torch.device("cpu"))[:-1]
    state = search.init_state(1, (*before, book.at(torch.tensor([root]))))
    memory = torch.zeros(1, 16, recognizer.model.config.encoder.output_size)
    told, state = search.step(memory, labels, torch.tensor([16]), state, phones=sounds.log_softmax(2))
    rest, _ = search.flush(torch.tensor([True]), state)
    assert tokenizer.decode(s.token for s in told + rest).strip() == text


@needs_voice
def test_without_espeak_names_are_known_by_their_spelling(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tokenizer, fusion, _ = asked(["tea", "extraordinarily"], ["kowalski"])
    words = wording(fusion, tokenizer)
    monkeypatch.setenv("PATH", "")
    phrases._warn.cache_clear()
    phrases._said.cache_clear()
    book = PhraseBook(tokenizer, 1.0, words)
    root, _ = book.add(["kowalski"]), book.add(["kowalski"])
    (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "Debian package espeak-ng" in warning.getMessage()
    given_back = words.price(tokenizer.encode("kowalski"), True, False)
    assert worth_of(book, root, tokenizer.encode("kowalski ")) == pytest.approx(9 + given_back, abs=1e-4)
    monkeypatch.undo()
    assert words.labels(["kowalski", "tea"]).keys() == {"kowalski"}
