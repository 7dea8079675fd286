"""Training of character language models from plain text, for fusion in beam search."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from mocha_model.scorers import CharacterLanguageModel
from mocha_model.tokenizer import Tokenizer, normalize_text, split_text

LENGTH = 96  # symbols per training row


class TextError(ValueError):
    """A text that cannot be read or used; the message names it."""


def read_lines(paths: list[Path]) -> list[str]:
    """Lines of plain or gzipped UTF-8 text files; raises TextError."""
    lines = []
    for path in paths:
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            lines += data.decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TextError(f"{path}: not a readable text ({error})") from error
    return lines


def read_sentences(paths: list[Path], tokenizer: Tokenizer) -> list[str]:
    """Normalised lines that the vocabulary can write; raises TextError where there are none."""
    known, units = set(tokenizer.symbols), tokenizer.units
    cleaned = (normalize_text(line, units) for line in read_lines(paths))
    sentences = [s for s in cleaned if s and known.issuperset(split_text(s, units))]
    if not sentences:
        raise TextError(f"{', '.join(map(str, paths))}: no sentence that the vocabulary can write")
    return sentences


def as_rows(sentences: list[str], tokenizer: Tokenizer, seed: int) -> Tensor:
    """Shuffled sentences as one stream ``sos sentence eos sos ...``, cut into rows [N, LENGTH + 1] int64."""
    order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(seed)).tolist()
    ids = [i for n in order for i in (tokenizer.sos_id, *tokenizer.encode(sentences[n]), tokenizer.eos_id)]
    rows = max(1, len(ids) // (LENGTH + 1))
    ids += [tokenizer.eos_id] * (rows * (LENGTH + 1) - len(ids))
    return torch.tensor(ids[: rows * (LENGTH + 1)]).view(rows, LENGTH + 1)


def perplexity(model: CharacterLanguageModel, sentences: list[str], tokenizer: Tokenizer) -> float:
    """Per character (eos counted), over whole sentences."""
    total, count = 0.0, 0
    with torch.inference_mode():
        for sentence in sentences:
            ids = torch.tensor([[tokenizer.sos_id, *tokenizer.encode(sentence), tokenizer.eos_id]])
            total += float(functional.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    return math.exp(total / count)


def train_language_model(
    sentences: list[str],
    tokenizer: Tokenizer,
    steps: int,
    size: int = 256,
    batch_rows: int = 64,
    seed: int = 0,
    progress: Callable[[float], None] = lambda loss: None,
) -> CharacterLanguageModel:
    """An LSTM over `sentences`; `progress` is told the loss of every step."""
    torch.manual_seed(seed)
    model = CharacterLanguageModel(tokenizer.vocab_size, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    epoch, order, rows = 0, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0)
    for _ in range(steps):
        if len(order) == 0:
            rows = as_rows(sentences, tokenizer, seed + epoch)
            order, epoch = torch.randperm(len(rows)), epoch + 1
        batch, order = rows[order[:batch_rows]], order[batch_rows:]
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        progress(float(loss.detach()))
    return model.eval()
