"""Attention over any memory: number words to digits, side by side for three mechanisms, in about a minute on a CPU.

The words name ones before tens, as German does ("three-and-twenty" is 23), so every pair of digits is locally
reordered. The memory is plain word embeddings without an encoder: only attention can see more than one word at once.
MoChA looks back over a chunk from where its hard pointer stands and learns the task; hard monotonic attention sees one
word at a time, has gone past the ones when it finds the tens, and has to guess every second digit.

Run: python docs/examples/number_words.py
"""

import torch
from torch import Tensor, nn

from mocha_model.config import AttentionConfig, DecoderConfig, EncoderConfig, ModelConfig
from mocha_model.decoder import Decoder
from mocha_model.offline import decode_softly
from mocha_model.search import GreedySearch
from mocha_model.tokenizer import Tokenizer

ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = [*ONES, "and", *TENS]
DIGITS = Tokenizer.from_texts(["0123456789"])


def sample(batch_size: int, num_numbers: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Word ids [B, 3 N] and digit ids [B, 2 N + 1] that end with eos."""
    ones = torch.randint(len(ONES), (batch_size, num_numbers), generator=generator)
    tens = torch.randint(len(TENS), (batch_size, num_numbers), generator=generator)
    words = torch.stack([ones, torch.full_like(ones, WORDS.index("and")), tens + WORDS.index("twenty")], 2).flatten(1)
    zero = DIGITS.encode("0")[0]
    digits = torch.stack([tens + 2, ones + 1], 2).flatten(1) + zero
    return words, nn.functional.pad(digits, (0, 1), value=DIGITS.eos_id)


class Words(nn.Module):
    """Embeddings of words and of their places: a memory [B, T, 32] in which no entry knows its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(len(WORDS), 32), nn.Embedding(64, 32)

    def forward(self, words: Tensor) -> Tensor:
        """[B, T] int64 to [B, T, 32]."""
        memory: Tensor = self.word(words) + self.place(torch.arange(words.shape[1]))
        return memory


def build(mechanism: str) -> tuple[Words, Decoder]:
    """Word embeddings as the memory, and a decoder with the attention to be tried."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=DIGITS.vocab_size,
        encoder=EncoderConfig(projection_size=32),
        attention=AttentionConfig.model_validate(
            {"mechanism": mechanism, "chunk_width": 3, "size": 32, "initial_bias": -1.0}
        ),
        decoder=DecoderConfig(embedding_size=16, lstm_size=64),
    )
    return Words(), Decoder(config)


def train(mechanism: str, steps: int, num_numbers: int = 4) -> tuple[Words, Decoder]:
    """Teacher forcing with expected attention and noise before the sigmoid, as in the papers."""
    embedding, decoder = build(mechanism)
    scalars = decoder.attention.energies.scalars  # g and r have far to go
    others = [p for p in (*embedding.parameters(), *decoder.parameters()) if all(p is not s for s in scalars)]
    optimizer = torch.optim.Adam([{"params": others}, {"params": scalars, "lr": 5e-2}], lr=5e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        words, digits = sample(32, num_numbers, generator)
        memory = decoder.attention.prepare(embedding(words), torch.ones_like(words, dtype=torch.bool))
        out = decoder.teacher_forced(memory, digits, noise_std=min(1.0, 2 * step / steps))
        loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), digits.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
    return embedding, decoder.eval()


@torch.inference_mode()
def accuracy(embedding: Words, decoder: Decoder, online: bool, num_numbers: int = 4) -> float:
    """Share of digits in the right place on sequences not seen before, by hard online or soft decoding."""
    words, digits = sample(200, num_numbers, torch.Generator().manual_seed(2))
    memory, lengths = embedding(words), torch.full((200,), words.shape[1])
    if online:
        search = GreedySearch(decoder, DecoderConfig(), space_id=DIGITS.encode(" ")[0])
        heard = torch.eye(DIGITS.vocab_size)[torch.full_like(words, DIGITS.unk_id)]  # a symbol everywhere: no pause
        symbols, state = search.step(memory, heard, lengths, search.init_state(200))
        symbols += search.flush(torch.ones(200, dtype=torch.bool), state)[0]
        read: list[list[int]] = [[] for _ in range(200)]
        for symbol in symbols:
            read[symbol.row] += [symbol.token] if symbol.token != DIGITS.eos_id else []
    else:
        read = decode_softly(decoder, memory, lengths)
    right = sum(
        a == b for row, truth in zip(read, digits.tolist(), strict=True) for a, b in zip(row, truth, strict=False)
    )
    return right / (200 * 2 * num_numbers)


if __name__ == "__main__":
    print("mechanism    soft  online   (share of digits right)")
    for name in ("softmax", "monotonic", "mocha"):
        trained = train(name, steps=500)
        hard = f"{accuracy(*trained, online=True):.2f}" if name != "softmax" else "-"
        print(f"{name:10s}   {accuracy(*trained, online=False):.2f}    {hard}")
