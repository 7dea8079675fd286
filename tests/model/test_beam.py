"""Beam search: width 1 is greedy search, wide beams are exhaustive search, chunking and company change nothing."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from tests.conftest import lively_recognizer
from torch import Tensor
from torch.nn.functional import logsigmoid

from mocha_model.beam import BeamConfig, BeamSearch
from mocha_model.config import DecoderConfig
from mocha_model.emissions import Emission, text_of
from mocha_model.hypotheses import MAX_UNSTABLE
from mocha_model.joint import JointConfig, JointSearch
from mocha_model.recognizer import Recognizer
from mocha_model.scorers import Fusion, PhraseBook
from mocha_model.streaming import map_state, state_bytes
from mocha_model.tokenizer import Tokenizer


def sound(count: int) -> Tensor:
    noise = torch.randn(count, generator=torch.Generator().manual_seed(3)) * 0.1
    return noise * (torch.arange(count) / 5000).sin().abs()


def frames_of(emissions: list[Emission]) -> list[tuple[str, int]]:
    return [(e.text, e.frame) for e in emissions]


def test_one_hypothesis_is_greedy_search(lively: Recognizer):
    samples = sound(60_000)
    beam = Recognizer(lively.model, lively.tokenizer, None, BeamConfig(width=1))
    greedy = lively.transcribe(samples)
    assert len(greedy) > 10
    assert frames_of(beam.transcribe(samples)) == frames_of(greedy)


@pytest.mark.parametrize(
    "config",
    [
        *(BeamConfig(6, 5.0), BeamConfig(6, 5.0, patience=3)),
        *(JointConfig(6, 5.0), JointConfig(6, 5.0, patience=3), JointConfig(6, 5.0, patience=8, caution=0.3)),
    ],
)
def test_chunks_and_company_change_nothing_and_nothing_is_retracted(
    lively: Recognizer, config: BeamConfig | JointConfig
):
    samples, wide = sound(60_000), Recognizer(lively.model, lively.tokenizer, None, config)
    whole = wide.transcribe(samples)
    assert len(whole) > 10
    randomness, told, start = random.Random(1), [], 0
    state = wide.init_state(3)
    size = state_bytes(state)
    while start < len(samples):
        piece = samples[start : start + randomness.randint(1, 4000)]
        start += len(piece)
        company = torch.stack([torch.randn(len(piece)), piece, torch.randn(len(piece))])
        lengths = torch.tensor([len(piece) // 2, len(piece), 0])
        found, state = wide.step(company, lengths, state)
        told += found[1]
    rest, state = wide.flush(state, torch.tensor([False, True, False]))
    for a, b in zip(told + rest[1], whole, strict=True):
        assert (a.text, a.frame, a.certain) == (b.text, b.frame, b.certain)
        assert a.p == pytest.approx(b.p, abs=1e-4)
    assert all(e.certain is not None and e.certain >= e.frame for e in whole)
    assert state_bytes(state) == size


@pytest.mark.parametrize("config", [None, BeamConfig(3), JointConfig(3)])
def test_a_fresh_state_shares_no_memory_with_itself(lively: Recognizer, config: BeamConfig | JointConfig | None):
    """Rows are written into states in place: what shared memory would be overwritten."""
    phrases = PhraseBook(lively.tokenizer)
    recognizer = Recognizer(lively.model, lively.tokenizer, None, config, phrases=phrases)
    places: list[int] = []
    map_state(lambda x: places.append(x.data_ptr()) if x.numel() else None, recognizer.init_state(2))
    assert len(places) > 10 and len(set(places)) == len(places)


def exhaustive(recognizer: Recognizer, memory: Tensor, symbols: list[int], weight: float) -> tuple[float, list[int]]:
    """Best score and symbols over every sequence that the online process can give, by plain recursion."""
    decoder, attention = recognizer.model.decoder, recognizer.model.decoder.attention
    keys = attention.energies.memory_projection(memory)
    best: tuple[float, list[int]] = (-float("inf"), [])

    def follow(state, token: int, t: int, repeats: int, score: float, path: list[int]) -> None:  # type: ignore[no-untyped-def]
        nonlocal best
        for j in range(t, len(memory)):
            e, u = attention.both_energies(state.hidden, keys[None], attention.energies.directions())
            cut = j == t and repeats == 1  # one emission per frame keeps the sequences few
            if cut or e[0, j] < 0:
                score += 0.0 if cut else weight * float(logsigmoid(-e[0, j]))
                continue
            score += weight * float(logsigmoid(e[0, j]))
            first = max(0, j - attention.chunk_width + 1)
            context = u[0, first : j + 1].softmax(0) @ memory[first : j + 1]
            after = decoder.step(torch.tensor([token]), context[None], state)
            logits = decoder.logits(after.hidden, context[None])[0]
            logits[[Tokenizer.blank_id, Tokenizer.sos_id, Tokenizer.unk_id]] = -torch.inf
            logits[Tokenizer.eos_id] = -torch.inf
            log_probs = logits.log_softmax(0)
            for symbol in symbols:
                again = repeats + 1 if j == t and path else 1
                follow(after, symbol, j, again, score + float(log_probs[symbol]), [*path, symbol])
            return
        if score > best[0]:
            best = (score, path)

    follow(decoder.init_state(1), Tokenizer.sos_id, 0, 0, 0.0, [])
    return best


@dataclass(frozen=True)
class Only:
    """A scorer that allows some symbols."""

    allowed: list[int]
    vocab_size: int

    def init_state(self, batch_size: int, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, device=device)

    def scores(self, state: Tensor) -> Tensor:
        row = torch.full((self.vocab_size,), -torch.inf)
        row[self.allowed] = 0
        return row.expand(len(state), -1)

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        return state

    def restart(self, state: Tensor) -> Tensor:
        return state


@pytest.mark.parametrize("weight", [0.0, 1.0])
@torch.inference_mode()
def test_a_wide_beam_finds_the_best_sequence(lively: Recognizer, weight: float):
    model = lively.model
    memory, _ = model.encode(*model.features(sound(7_000)[None] * 3, torch.tensor([7_000])))
    allowed = lively.tokenizer.encode("xf")
    with torch.no_grad():
        eos = float(model.decoder.output.bias[Tokenizer.eos_id])
        model.decoder.output.bias[Tokenizer.eos_id] = -1e9
    try:
        score, best = exhaustive(lively, memory[0], allowed, weight)
        only = Only(allowed, lively.tokenizer.vocab_size)
        config = BeamConfig(width=3000, threshold=1e9, selection_weight=weight)
        limits = DecoderConfig(max_emissions_per_frame=1, endpoint_frames=1000)
        search = BeamSearch(model.decoder, limits, 4, config, Fusion(((1.0, only),)))
        lengths = torch.tensor([memory.shape[1]])
        labels = model.ctc(memory)
        told, state = search.step(memory, labels, lengths, search.init_state(1))
        kept = state.hypotheses
        k = int(kept.score[0].argmax())
        found = [s.token for s in told] + kept.tokens[0, k, : int(kept.length[0, k])].tolist()
    finally:
        with torch.no_grad():
            model.decoder.output.bias[Tokenizer.eos_id] = eos
    assert len(best) >= 3
    assert found == best
    assert float(kept.score[0, k]) == pytest.approx(score, abs=1e-3)


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

    def price(word: Sequence[int], ends: bool) -> float:
        """Of a word that is known as far as "ba"."""
        return 10.0 * (list(word) == bat) + 5.0 * ends

    book = PhraseBook(tokenizer, 1.0, price)
    root = book.add(["a bat"])

    def total(text: str) -> float:
        return worth_of(book, root, tokenizer.encode(text))

    assert total("a ba") == 4 + 5 and total("a bat") == 5 + 15 and total("a bat ") == 6 + 20
    assert total("a bad") == total("a bats") == total("b") == 0
    assert worth_of(book, root, [*tokenizer.encode("a bat"), Tokenizer.eos_id]) == 6 + 20


def worth_of(book: PhraseBook, root: int, tokens: list[int]) -> float:
    state, worth = book.at(torch.tensor([root])), 0.0
    for token in tokens:
        worth += float(book.scores(state)[0, token])
        state = book.advance(state, torch.tensor([token]))
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
        assert root not in lists
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
    assert len(book._worth) < 10_000  # five lists of at most 440 nodes are alive
    for root, phrases in lists.items():
        assert all(worth_of(book, root, tokenizer.encode(phrase + " ")) == 11 for phrase in phrases)


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
    phrases = ["qzqz", "jj"]
    recognizer = Recognizer(lively.model, lively.tokenizer, phrases=PhraseBook(lively.tokenizer, bonus=100.0))
    roots = torch.tensor([0, recognizer.phrases.add(phrases)])
    state = recognizer.init_state(2, roots)
    both = torch.stack([samples, samples])
    for _ in range(2):  # the phrases stay when a stream begins anew
        found, state = recognizer.step(both, torch.tensor([len(samples)] * 2), state)
        rest, state = recognizer.flush(state, torch.tensor([True, True]))
        texts = [text_of(a + b) for a, b in zip(found, rest, strict=True)]
        assert texts[0] == heard[0] and texts[1] != heard[1]
        assert set(texts[1].split()) & set(phrases)


def test_fusion_steers_the_search(lively: Recognizer):
    samples = sound(60_000)
    only = Only(lively.tokenizer.encode("qz"), lively.tokenizer.vocab_size)
    steered = Recognizer(lively.model, lively.tokenizer, None, BeamConfig(4, 100.0), Fusion(((1.0, only),)))
    text = "".join(e.text for e in steered.transcribe(samples))
    assert set(text) <= set("qz") and len(text) > 3
    assert all(len(list(group)) < 200 for _, group in itertools.groupby(text))


@dataclass(frozen=True)
class Counting:
    """A scorer that leaves open what the first symbols are, and says what each after them is."""

    num_open: int
    vocab_size: int

    def init_state(self, batch_size: int, device: torch.device) -> Tensor:
        return torch.zeros(batch_size, dtype=torch.int64, device=device)

    def symbol(self, place: int) -> int:
        return 6 + place % 7

    def scores(self, state: Tensor) -> Tensor:
        scores = torch.full((len(state), self.vocab_size), -torch.inf)
        for row, place in enumerate(state.tolist()):
            scores[row, [4, 5] if place < self.num_open else [self.symbol(place)]] = 0
        return scores

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        return state + 1

    def restart(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state)


@pytest.mark.parametrize("num_open", [1, 4])
@torch.inference_mode()
def test_no_symbol_is_lost_where_hypotheses_agree_late(num_open: int):
    """Whenever the audio ends: what is told then, and what was told before, is all that was written."""
    recognizer = lively_recognizer()
    decoder, vocab = recognizer.model.decoder, recognizer.tokenizer.vocab_size
    decoder.attention.energies.bias[0] = 100.0  # it always fires
    limits, counting = DecoderConfig(max_emissions_per_frame=3), Counting(num_open, vocab)
    search = BeamSearch(decoder, limits, -1, BeamConfig(2**num_open, 1e9), Fusion(((1.0, counting),)))
    frames = MAX_UNSTABLE // 3 + 8
    memory = torch.randn(1, frames, decoder.attention.energies.memory_size)
    state, told = search.init_state(1), list[int]()
    for t in range(frames):
        found, state = search.step(memory[:, [t]], torch.zeros(1, 1, vocab), torch.tensor([1]), state)
        told += [s.token for s in found]
        rest, _ = search.flush(torch.tensor([True]), state)
        whole = told + [s.token for s in rest]
        count = 3 * (t + 1) + limits.max_emissions_at_end
        assert set(whole[:num_open]) <= {4, 5}
        assert whole[num_open:] == [*map(counting.symbol, range(num_open, count)), Tokenizer.eos_id]
