"""Language models of words from plain text: counting, estimating, measuring. Knows nothing of search."""

import gzip
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mocha_model.language import IMPOSSIBLE, Recurrent, WordLanguageModel
from mocha_model.pronunciation import pronounce
from mocha_model.tokenizer import Tokenizer, normalize_text
from mocha_model.word_counts import WordCounts
from mocha_model.word_lstm import WordLSTM

BATCH = 256  # sentences measured together
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)  # of an LSTM in a mixture
LONGEST_WORD = 64  # characters; what is longer is an address or a slip, and would make every word's tree as deep


class TextError(ValueError):
    """A text that cannot be read or used; the message names it."""


def read_lines(paths: list[Path]) -> list[str]:
    """Lines of plain or gzipped UTF-8 text files; raises TextError."""
    lines = []
    for path in paths:
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            lines += data.decode("utf-8").splitlines()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise TextError(f"{path}: not a readable text ({error})") from error
    return lines


def read_sentences(paths: list[Path], tokenizer: Tokenizer) -> list[str]:
    """Normalised lines that the vocabulary can write, of words of 64 characters at most; raises TextError if none."""
    sentences = _writable((normalize_text(line, tokenizer.units) for line in read_lines(paths)), tokenizer)
    if not sentences:
        raise TextError(f"{', '.join(map(str, paths))}: no sentence that the vocabulary can write")
    return sentences


def read_words(path: Path, tokenizer: Tokenizer) -> set[str]:
    """Those words of a text that the vocabulary can write; raises TextError."""
    words = (word for line in read_lines([path]) for word in normalize_text(line, tokenizer.units).split())
    return set(_writable(words, tokenizer))


def _writable(texts: Iterable[str], tokenizer: Tokenizer) -> list[str]:
    known = set(tokenizer.symbols)
    return [t for t in texts if t and known.issuperset(t) and max(map(len, t.split())) <= LONGEST_WORD]


def unseen(lines: Iterable[str], transcripts: Iterable[str]) -> list[str]:
    """`lines` that are not seen in `transcripts` (see `seen_in`): what is measured is not learned from."""
    seen = seen_in(transcripts)
    return [line for line in lines if not seen(line)]


def seen_in(transcripts: Iterable[str], least_words: int = 3) -> Callable[[str], bool]:
    """Tells whether a line contains one of `transcripts`, or stands in one.

    Both are compared as normalised words. Transcripts and lines of fewer than `least_words` words count for nothing:
    such phrases are everybody's.
    """
    said: list[tuple[str, ...]] = []
    begin: dict[tuple[str, ...], list[tuple[str, ...]]] = {}  # transcripts by their first words
    places: dict[tuple[str, ...], list[tuple[int, int]]] = {}  # transcript and word where these words begin
    for words in dict.fromkeys(tuple(normalize_text(transcript).split()) for transcript in transcripts):
        for start in range(len(words) - least_words + 1):
            places.setdefault(words[start : start + least_words], []).append((len(said), start))
        if len(words) >= least_words:
            begin.setdefault(words[:least_words], []).append(words)
        said.append(words)

    def seen(line: str) -> bool:
        words = tuple(normalize_text(line).split())
        runs = [words[start : start + least_words] for start in range(len(words) - least_words + 1)]
        contains = any(words[n : n + len(whole)] == whole for n, run in enumerate(runs) for whole in begin.get(run, ()))
        within = places.get(runs[0], ()) if runs else ()
        return contains or any(said[which][start : start + len(words)] == words for which, start in within)

    return seen


def held_apart(sentences: Sequence[str]) -> tuple[list[str], list[str]]:
    """What of `sentences` is learned from, as often as it occurs, and a twentieth or a thousand to measure with.

    Those occur once, unless all occur again and again. Where nothing would be left, all are learned from.
    """
    counts = Counter(sentences)
    rare = [s for s in counts if counts[s] == 1] or list(counts)
    held = rare[:: max(20, len(rare) // 1000)]
    apart = set(held)
    return [s for s in sentences if s not in apart] or list(sentences), held


def count_words(sentences: list[str], tokenizer: Tokenizer, least: int, others: Iterable[str] = ()) -> WordCounts:
    """Modified Kneser-Ney estimates from `sentences`, interpolated (Chen & Goodman 1999, section 3).

    Trigrams that occur less than `least` times are left out after the estimation, and their masses given to bigrams.
    Words of `others` that no sentence has are each as likely as a word that stands in one place. What they have is
    taken from unknown words, half of it at most; those that stand in sentences keep what they have without them.
    """
    written = {word for s in sentences for word in s.split()}
    all_words = written.union(others)
    if (len(all_words) + 2) ** 3 > np.iinfo(np.int64).max:
        raise TextError(f"the text has {len(all_words)} different words, of which trigrams cannot be numbered")
    words = sorted(all_words, key=tokenizer.encode)
    number = {word: n for n, word in enumerate(words)}
    end, start, stride = len(words), len(words) + 1, len(words) + 2
    flat = np.array([n for s in sentences for n in (start, start, *map(number.__getitem__, s.split()), end)])
    is_target = flat[2:] != start
    trigrams, trigram_counts = _count(_join(stride, flat[:-2], flat[1:-1], flat[2:])[is_target])
    # Of the shorter ones, in how many different places they occur: that is what Kneser and Ney found.
    bigrams, bigram_counts = _count(trigrams % stride**2)
    unigram_counts = np.bincount(bigrams % stride, minlength=end + 1)
    pairs = trigrams // stride
    trigram_masses, trigram_kept = _discounted(pairs, trigram_counts, least)
    bigram_masses, _ = _discounted(bigrams // stride, bigram_counts, 0)
    unigram_masses, _ = _discounted(np.zeros(end + 1, dtype=np.int64), unigram_counts, 0)
    unsaid = unigram_counts == 0
    free = 1 - unigram_masses.sum(dtype=np.float64)
    unigram_masses[unsaid] = min(unigram_masses[~unsaid].min(), free / 2 / max(1, unsaid.sum()))
    contexts, context = np.unique(pairs[trigram_kept], return_inverse=True)
    return WordCounts(
        tuple(words),
        unigram_masses.astype(np.float32),
        (bigrams, bigram_masses),
        (context * stride + trigrams[trigram_kept] % stride, trigram_masses),
        contexts,
        _spelling(words, tokenizer),
        _characters(sentences, tokenizer),
    )


def _join(stride: int, *words: NDArray[np.int64]) -> NDArray[np.int64]:
    key = words[0]
    for word in words[1:]:
        key = key * stride + word
    return key


def _count(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    found, counts = np.unique(keys, return_counts=True)
    return found, counts


def _discounted(
    contexts: NDArray[np.int64], counts: NDArray[np.int64], least: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Masses of the n-grams that occur at least `least` times, and which those are."""
    _, index = np.unique(contexts, return_inverse=True)
    totals = np.bincount(index, weights=counts)
    kept = counts >= least
    masses = (counts - _discounts(counts)[np.minimum(counts, 3)]) / totals[index]
    return masses[kept].astype(np.float32), kept


def _discounts(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """What is taken from n-grams that occur never, once, twice, more often (Chen & Goodman 1999, eq. 26).

    The same from all (eq. 17) in a text so small that one of these would be nothing.
    """
    once, twice, thrice, four = (int((counts == n).sum()) for n in (1, 2, 3, 4))
    share = once / max(1, once + 2 * twice)
    if once and twice and thrice:
        each = 1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four / thrice
        if four and min(each) > 0:
            return np.array([0.0, *each])
    return np.array([0.0, *[share or 0.5] * 3])


def _spelling(words: list[str], tokenizer: Tokenizer) -> NDArray[np.float32]:
    """Log-probabilities of characters after one another in `words`; each pair is taken to have occurred once more."""
    blank, space = tokenizer.blank_id, tokenizer.space_id
    counts = np.zeros((tokenizer.vocab_size, tokenizer.vocab_size))
    letters = [n for n in range(tokenizer.first_id, tokenizer.vocab_size) if n != space]
    counts[np.ix_([*letters, space], letters)] = 1
    counts[letters, blank] = 1
    for word in words:
        ids = tokenizer.encode(word)
        np.add.at(counts, ([space, *ids], [*ids, blank]), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(counts / counts.sum(1, keepdims=True))
    spelling: NDArray[np.float32] = np.nan_to_num(logs, nan=IMPOSSIBLE, neginf=IMPOSSIBLE).astype(np.float32)
    return spelling


def _characters(sentences: list[str], tokenizer: Tokenizer) -> NDArray[np.float32]:
    """Log-probabilities of characters in the text, a space after each word; each is taken to occur once more."""
    counts = np.zeros(tokenizer.vocab_size)
    counts[tokenizer.first_id :] = 1
    for character, count in Counter(" ".join([*sentences, ""])).items():
        counts[tokenizer.encode(character)] += count
    with np.errstate(divide="ignore"):
        logs = np.log(counts / counts.sum())
    characters: NDArray[np.float32] = np.where(counts > 0, logs, 0).astype(np.float32)
    return characters


def perplexity(
    model: WordLanguageModel,
    sentences: list[str],
    tokenizer: Tokenizer,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[float, float]:
    """Per character and per word (the end of a sentence counts as one of each), over whole sentences."""
    total = characters = words = 0.0
    for batch in _batches(sentences):
        ids = [[*tokenizer.encode(s), tokenizer.eos_id] for s in batch]
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(i) for i in ids], batch_first=True)
        state = model.init_state(len(batch), torch.device("cpu"))
        for token in tokens.t():
            told = model.scores(state).gather(1, token[:, None])[:, 0]
            total -= float((told * (token != tokenizer.blank_id)).sum())
            state = model.advance(state, token)
        characters += sum(map(len, ids))
        words += sum(len(s.split()) + 1 for s in batch)
        progress(len(batch))
    return math.exp(total / characters), math.exp(total / words)


def mixed(
    counts: WordCounts, lstm: WordLSTM, words: list[str], sentences: list[str], tokenizer: Tokenizer
) -> WordLanguageModel:
    """`counts` and an LSTM with these `words`, with the one of `SHARES` that is the least surprised by `sentences`."""
    number = {word: n for n, word in enumerate(counts.words)}
    numbers = np.array([number[word] for word in words], dtype=np.int64)
    model = WordLanguageModel(counts, tokenizer, Recurrent(lstm, numbers, SHARES[0]))

    def surprise(share: float) -> tuple[float, float]:
        model.recurrent = Recurrent(lstm, numbers, share)
        return perplexity(model, sentences, tokenizer)

    model.recurrent = Recurrent(lstm, numbers, min(SHARES, key=surprise))
    return model


def said(words: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """What `WordLanguageModel` wants to know of how `words` sound. Raises PronunciationError."""
    listed = list(words)
    phones = pronounce(listed)
    return tuple(phones[word] for word in listed)


def _batches(sentences: list[str]) -> Iterator[list[str]]:
    ordered = sorted(sentences, key=len)
    for start in range(0, len(ordered), BATCH):
        yield ordered[start : start + BATCH]
