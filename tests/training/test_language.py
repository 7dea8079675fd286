"""Language models of words: estimates against their definition, characters against words, files, the command."""

import gzip
import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

from mocha_model.language import LanguageModelError, VocabularyError, WordLanguageModel
from mocha_model.prefix_tree import prefix_tree
from mocha_model.tokenizer import Tokenizer
from mocha_training.language import (
    TextError,
    count_words,
    held_apart,
    perplexity,
    read_lines,
    read_sentences,
    unseen,
)
from tests.training.made_up import needs_voice, said

TEXT = [
    "the cat sat on the mat",
    "the cat ate the rat",
    "a rat sat on the mat",
    "the mat is a mat",
    "the rat ate",
    "cats ate the mat",
    "cat",
]
LONGER = [*TEXT, *["the cat sat on a cat"] * 2, *["a rat ate the mat", "rats"] * 3, "rats", "mats", "mats", "sat a cat"]
BEGIN, END = "<begin>", "<end>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_texts(["abcdefghijklmnopqrstuvwxyz '"])


def word_probability(text: list[str], least: int) -> object:
    """Interpolated modified Kneser-Ney by its definition (Chen & Goodman 1999, eqs. 17 and 26), without any table."""
    triples = Counter(
        t for s in text for w in [[BEGIN, BEGIN, *s.split(), END]] for t in zip(w, w[1:], w[2:], strict=False)
    )
    pairs = Counter((b, c) for _, b, c in triples)
    singles = Counter(c for _, c in pairs)

    def discount(counts: Counter[object], n: int) -> float:
        n1, n2, n3, n4 = (sum(m == k for m in counts.values()) for k in (1, 2, 3, 4))
        y = n1 / (n1 + 2 * n2)
        if not n3 or not n4:
            return y
        each = 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3
        return each[min(n, 3) - 1] if min(each) > 0 else y

    def level(counts: Counter[object], context: tuple[str, ...], word: str, least: int, below: float) -> float:
        own = {g: n for g, n in counts.items() if g[:-1] == context}  # type: ignore[index]
        if not own:
            return below
        total = sum(own.values())
        kept = {g[-1]: (n - discount(counts, n)) / total for g, n in own.items() if n >= least}  # type: ignore[index]
        return kept.get(word, 0.0) + (1 - sum(kept.values())) * below

    def probability(word: str | None, a: str, b: str) -> float:
        """Of `word` after a b; of None, any word that the text has not."""
        total = sum(singles.values())
        own = {w: (n - discount(singles, n)) / total for w, n in singles.items()}  # type: ignore[arg-type]
        below = 1 - sum(own.values()) if word is None else own.get(word, 0.0)
        name = "<unknown>" if word is None else word
        return level(triples, (a, b), name, least, level(pairs, (b,), name, 0, below))

    return probability


def test_a_text_in_which_no_triple_occurs_twice_has_a_model(tokenizer: Tokenizer):
    model = WordLanguageModel(count_words(["the cat sat", "a dog ran home"], tokenizer, 2), tokenizer)
    likely, unlikely = (perplexity(model, [s], tokenizer)[0] for s in ("the cat sat", "cat ran the"))
    assert 1 < likely < unlikely


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("sentence", ["the cat sat on the mat", "a mat", "rat is on the cat sat", "the dog ate a cat"])
@pytest.mark.parametrize("text", [TEXT, LONGER], ids=["few", "more"])
def test_characters_multiply_to_words(tokenizer: Tokenizer, text: list[str], least: int, sentence: str):
    model = WordLanguageModel(count_words(text, tokenizer, least), tokenizer)
    probability = word_probability(text, least)
    known = {w for s in text for w in s.split()}
    spelling = torch.from_numpy(model.counts.spelling)

    def spelled(word: str) -> float:
        ids = [tokenizer.space_id, *tokenizer.encode(word), tokenizer.blank_id]
        return math.exp(sum(float(spelling[a, b]) for a, b in itertools.pairwise(ids)))

    expected, a, b = 0.0, BEGIN, BEGIN
    expected -= math.log(1 - probability(END, a, b))  # type: ignore[operator]  # there is a first word
    for word in sentence.split():
        p = probability(None, a, b) * spelled(word)  # type: ignore[operator]
        p += probability(word, a, b) if word in known else 0.0  # type: ignore[operator]
        expected += math.log(p)
        a, b = b, (word if word in known else "<unknown>")
    expected += math.log(probability(END, a, b))  # type: ignore[operator]

    state, total = model.init_state(1, torch.device("cpu")), 0.0
    for token in [*tokenizer.encode(sentence), tokenizer.eos_id]:
        scores = model.scores(state)[0]
        told = torch.cat([scores[4:], scores[[tokenizer.eos_id]]]).exp().sum()
        before_a_word = int(state.last[0]) == tokenizer.space_id  # the end of the sentence comes on top there
        assert float(told) == pytest.approx(1, abs=1e-5) or (before_a_word and float(told) > 1)
        total += float(scores[token])
        state = model.advance(state, torch.tensor([token]))
    assert total == pytest.approx(expected, abs=1e-4)


@given(st.sets(st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12))
def test_tree_leads_to_the_words_that_begin_so(written: set[tuple[int, ...]]):
    words = sorted(written)
    children, bounds = prefix_tree([list(word) for word in words], vocab_size=5)
    nowhere = len(children) - 1
    for prefix in itertools.chain([()], *(itertools.product(range(1, 5), repeat=n) for n in range(1, 4))):
        node = 0
        for letter in prefix:
            node = int(children[node, letter])
        begin = [n for n, word in enumerate(words) if word[: len(prefix)] == prefix]
        assert (node != nowhere) == bool(begin)
        ranges = [range(*bounds[node, at : at + 2].tolist()) for at in range(5)]
        assert [words[n] for n in ranges[0]] == [prefix] * (prefix in words)  # the blank: what is complete
        for letter in range(1, 5):
            assert list(ranges[letter]) == [n for n in begin if words[n][len(prefix) :][:1] == (letter,)]


def test_words_that_no_sentence_has_are_rare_words(tokenizer: Tokenizer):
    plain, more = (count_words(LONGER, tokenizer, 1, others) for others in ((), ("zebu", "aye", "cat")))
    assert set(more.words) - set(plain.words) == {"zebu", "aye"}
    counts, before = (dict(zip(c.words, c.unigrams.tolist(), strict=False)) for c in (more, plain))
    assert {word: counts[word] for word in before} == before, "words of sentences keep what they have"
    places = Counter(b for a, b in {p for s in LONGER for p in itertools.pairwise([BEGIN, *s.split()])})
    rare = next(word for word, count in places.items() if count == 1)
    assert counts["zebu"] == counts["aye"] == counts[rare] > 0
    many = count_words(LONGER, tokenizer, 1, map("".join, itertools.product("xyz", repeat=5)))
    for listed in (more, many):
        rest = (1 - float(listed.unigrams.sum())) / (1 - float(plain.unigrams.sum()))
        assert 0.499 < rest < 1, "and words that are not in the list remain possible"
    model = WordLanguageModel(more, tokenizer)
    known, unknown = (perplexity(model, [s], tokenizer)[1] for s in ("the zebu sat", "the zbeu sat"))
    assert known < unknown / 2


def test_an_unknown_word_may_be_long(tokenizer: Tokenizer):
    model = WordLanguageModel(count_words(TEXT, tokenizer, 1), tokenizer)
    state = model.init_state(1, torch.device("cpu"))
    for token in tokenizer.encode("hippopotomonstrosesquippedaliophobia"):
        state = model.advance(state, torch.tensor([token]))
        scores = model.scores(state)[0]
        assert float(scores[4:].exp().sum() + scores[tokenizer.eos_id].exp()) == pytest.approx(1, abs=1e-5)


def test_rows_do_not_mind_each_other(tokenizer: Tokenizer):
    model = WordLanguageModel(count_words(TEXT, tokenizer, 1), tokenizer)
    texts = ["the cat sat", "a dog is it", "cats on the"]
    together = model.init_state(3, torch.device("cpu"))
    alone = [model.init_state(1, torch.device("cpu")) for _ in texts]
    for column in zip(*map(tokenizer.encode, texts), strict=True):
        together = model.advance(together, torch.tensor(column))
        alone = [model.advance(s, torch.tensor([t])) for s, t in zip(alone, column, strict=True)]
        torch.testing.assert_close(model.scores(together), torch.cat([model.scores(s) for s in alone]))
    fresh = model.scores(model.restart(together))
    torch.testing.assert_close(fresh, model.scores(model.init_state(3, torch.device("cpu"))))


def test_the_prior_is_of_characters_in_the_text(tokenizer: Tokenizer):
    prior = WordLanguageModel(count_words(TEXT, tokenizer, 1), tokenizer).prior()
    occur = Counter("".join(f"{s} " for s in TEXT)) + Counter(
        tokenizer.symbols[Tokenizer.unk_id + 1 :]
    )  # each once more
    logs = {c: math.log(n / occur.total()) for c, n in occur.items()}
    mean = sum(n * logs[c] for c, n in occur.items()) / occur.total()
    told = {tokenizer.symbol(n): float(x) for n, x in enumerate(prior) if n > Tokenizer.unk_id}
    assert told == pytest.approx({c: log - mean for c, log in logs.items()}, abs=1e-5)
    assert not prior[: Tokenizer.unk_id + 1].any(), "blank is no character"


def test_files(tokenizer: Tokenizer, tmp_path: Path):
    model, path = WordLanguageModel(count_words(TEXT, tokenizer, 1), tokenizer), tmp_path / "lm.safetensors"
    model.save(path, tokenizer, {})
    again = WordLanguageModel.load(path, tokenizer)
    assert again.counts.words == model.counts.words
    assert torch.equal(again.prior(), model.prior())
    assert perplexity(again, TEXT, tokenizer) == pytest.approx(perplexity(model, TEXT, tokenizer), rel=0.01)
    (tmp_path / "before.safetensors").hardlink_to(path)
    WordLanguageModel(count_words(["a cat"], tokenizer, 1), tokenizer).save(path, tokenizer, {})
    before = WordLanguageModel.load(tmp_path / "before.safetensors", tokenizer)
    assert before.counts.words == model.counts.words, "a file is replaced when all of the new one is written"
    model.save(path, tokenizer, {})
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(VocabularyError, match="another vocabulary"):
        WordLanguageModel.load(path, Tokenizer.from_texts(["xyz"]))
    with pytest.raises(LanguageModelError, match="not a readable"):
        WordLanguageModel.load(Path(__file__), tokenizer)
    with safe_open(path, framework="numpy") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    for name, wrong in (
        ("bigrams.sizes", None),
        ("trigrams.sizes", np.zeros(99, np.int32)),
        ("trigrams.sizes", tensors["trigrams.sizes"] + 0.5),
        ("bigrams.masses", tensors["bigrams.masses"][1:]),
        ("bigrams.words", tensors["bigrams.words"] + 99),
        ("unigrams", tensors["unigrams"][1:]),
        ("spelling", tensors["spelling"][:5, :5]),
        ("characters", tensors["characters"][None]),
    ):
        kept = {n: t for n, t in tensors.items() if n != name} | ({} if wrong is None else {name: wrong})
        save_file(kept, path, metadata)
        with pytest.raises(LanguageModelError, match="do not fit together"):
            WordLanguageModel.load(path, tokenizer)
    for vocabulary in ("[", "null", "5"):
        save_file(tensors, path, metadata | {"vocabulary": vocabulary})
        with pytest.raises(LanguageModelError, match="do not fit together"):
            WordLanguageModel.load(path, tokenizer)
    with pytest.raises(VocabularyError, match="recogniser of characters"):
        WordLanguageModel(model.counts, Tokenizer.from_texts(["aa b"], "words"))


def test_what_was_read_is_less_of_a_surprise(tokenizer: Tokenizer):
    model = WordLanguageModel(count_words(TEXT, tokenizer, 1), tokenizer)
    letter, word = perplexity(model, TEXT, tokenizer)
    other_letter, other_word = perplexity(model, ["mat the sat is", "zebras grazed"], tokenizer)
    assert 1 < letter < other_letter < tokenizer.vocab_size and letter < word < other_word


def test_text_that_cannot_be_used(tokenizer: Tokenizer, tmp_path: Path):
    (tmp_path / "greek.txt").write_text("καλημέρα\n")
    with pytest.raises(TextError, match="no sentence"):
        read_sentences([tmp_path / "greek.txt"], tokenizer)
    with pytest.raises(TextError, match="not a readable text"):
        read_sentences([tmp_path / "none.txt"], tokenizer)
    (tmp_path / "long.txt").write_text(f"the cat\n{'a' * 65} sat\n{'a' * 64}\n")
    assert read_sentences([tmp_path / "long.txt"], tokenizer) == ["the cat", "a" * 64]


DAMAGES = {"cut": lambda data: data[:30], "overwritten": lambda data: data[:10] + b"\xff" * 20}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_broken_gzip_files_are_named(damage: Callable[[bytes], bytes], tmp_path: Path):
    path = tmp_path / "text.gz"
    path.write_bytes(damage(gzip.compress(b"the cat sat\n" * 99)))
    with pytest.raises(TextError, match=f"{path}: not a readable text"):
        read_lines([path])


@needs_voice
def test_the_command_writes_what_evaluate_reads(tmp_path: Path):
    import typer

    from mocha_model.checkpoint import load_checkpoint
    from mocha_training.cli import train_lm

    text, out = tmp_path / "text.txt", tmp_path / "lm.safetensors"
    text.write_text("\n".join(f"{s.capitalize()}." for s in TEXT * 10))
    app = typer.Typer()
    app.command()(train_lm)
    done = CliRunner().invoke(app, ["--text", str(text), "--out", str(out), "--least", "1"])
    assert done.exit_code == 0, done.output
    assert WordLanguageModel.load(out, load_checkpoint(None).tokenizer).counts.words[:3] == ("a", "ate", "cat")
    assert CliRunner().invoke(app, ["--text", str(tmp_path / "none"), "--out", str(out)]).exit_code == 1
    words = tmp_path / "words.txt"
    words.write_text("Zebu 12\nжук aye\n")  # frequencies, and words of other letters, are no words here
    options = ["--text", str(text), "--out", str(out), "--least", "1", "--words", str(words), "--lstm-epochs", "1"]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    recogniser = load_checkpoint(None)
    made = WordLanguageModel.load(out, recogniser.tokenizer)
    lexicon = made.lexicon(recogniser.config.phones)
    assert lexicon is not None and lexicon.lengths[: len(made.counts.words)].all()
    own = {word for s in TEXT for word in s.split()}
    assert made.recurrent and {"cat", "mat"} <= {made.counts.words[n] for n in made.recurrent.words} <= own
    assert {"zebu", "aye"} == set(made.counts.words) - own


def test_words_that_cannot_be_said_are_told_before_the_lstm_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    monkeypatch.setattr("mocha_training.cli.train_word_lstm", lambda *_: pytest.fail("hours are lost"))
    monkeypatch.setenv("PATH", "")
    command = ("train-lm", "--text", tmp_path / "text.txt", "--out", tmp_path / "lm.safetensors", "--lstm-epochs", 1)
    status, output = said(*command)
    assert status == 1 and "install the Debian package espeak-ng" in output


def test_what_stands_in_a_held_out_transcript_or_contains_one_is_left_out():
    transcripts = ["The cat sat, on the mat.", "Oh no", "a rat ate it"]
    kept = ["the cat ate", "oh no not again", "it was a rat", "cat sat", "sat on a mat", "rat ate it all", "a rat ate"]
    left_out = ["The CAT sat on the mat", "cat sat on", "and the cat sat on the mat again", "so a rat ate it!"]
    left_out += ["a rat ate it"]
    kept.remove("a rat ate")  # stands in the third transcript
    assert unseen([*kept, *left_out, "a rat ate"], transcripts) == kept
    assert unseen(left_out, []) == left_out


def test_what_is_said_often_is_learned_as_often_and_not_held_out():
    rare = [f"sentence {n}" for n in range(45)]
    kept, held = held_apart(["yes", *rare, "yes", "no", "no"])
    assert held == [rare[0], rare[20], rare[40]]
    assert Counter(kept) == Counter({"yes": 2, "no": 2} | {s: 1 for s in rare if s not in held})
    assert held_apart(["yes", "yes", "no", "no"]) == (["no", "no"], ["yes"])
    assert held_apart(["yes"]) == (["yes"], ["yes"])


TEXTS = st.lists(st.lists(st.sampled_from("ab"), max_size=6).map(" ".join), max_size=4)


@given(TEXTS, TEXTS)
def test_what_is_left_out_is_what_the_definition_says(transcripts: list[str], lines: list[str]):
    def within(part: str, whole: str) -> bool:
        return len(part.split()) >= 3 and f" {part} " in f" {whole} "

    kept = [line for line in lines if not any(within(line, t) or within(t, line) for t in transcripts)]
    assert unseen(lines, transcripts) == kept


def test_long_transcripts_take_no_more_memory_than_they_have_words():
    words = [f"w{n}" for n in range(300)]
    tracemalloc.start()
    left = unseen([" ".join(words[7:-7]), "w1 w2 w4"], [" ".join(words)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert left == ["w1 w2 w4"] and peak < 5e6


def test_more_words_than_trigrams_can_be_numbered_of_are_refused():
    tokenizer = Tokenizer.from_texts(["abc 0123456789"])
    with pytest.raises(TextError, match="different words"):
        count_words(["a b"], tokenizer, 1, map(str, range(2_097_150)))
