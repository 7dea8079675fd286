"""Training on what the decoder writes by itself: fewer expected errors, by policy gradient.

Along the CTC path the decoder learns what to do at each frame, not what its decisions lead to. Here it is drawn from
the stochastic process of Raffel 2017 (eqs. 6-8: at each frame, whether to select, and what), several times for each
utterance, and decisions whose texts have more errors than the others' become less likely: REINFORCE (Williams 1992),
for hard decisions as in Luo et al. (2016), the expected errors of Prabhavalkar et al. (2018), each draw's baseline the
mean of the others' (Kool et al. 2019). Knows nothing of encoders and loops.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mocha_model.attention import Memory
from mocha_model.decoder import Decoder
from mocha_model.model import SpeechModel
from mocha_model.streaming import gather_rows, scatter_rows, valid_mask
from mocha_model.tokenizer import Tokenizer
from mocha_training.config import TrainConfig
from mocha_training.mistakes import Texts, costs
from mocha_training.path import Weighted

DISCOUNT = 0.98  # of an error for each frame that a decision is before it


@dataclass(frozen=True)
class Drawn:
    """Texts that the process wrote.

    Attributes:
        tokens: [R, U] int64, eos behind the last, padded with 0; there is no other eos.
        num_tokens: [R] int64, eos counted.
        frames: [R, U] int64, strictly rising, where each was selected; -1 for eos and padding.

    """

    tokens: Tensor
    num_tokens: Tensor
    frames: Tensor


def writable(decoder: Decoder) -> Tensor:
    """What is added to the logits of symbols, [V]: the text ends where the audio does, so there is no eos."""
    return decoder.never.index_fill(0, torch.tensor(Tokenizer.eos_id, device=decoder.never.device), -torch.inf)


@torch.no_grad()
def drawn(decoder: Decoder, memory: Memory, temperature: float) -> Drawn:
    """Draw a text for each row of `memory`, one symbol a frame at most.

    Energies and logits are divided by `temperature`: near 0 it is greedy search.
    """
    attention, energies, width = decoder.attention, decoder.attention.energies, decoder.attention.chunk_width
    first = torch.zeros(len(memory.mask), dtype=torch.int64, device=memory.mask.device)
    state, token, vectors = decoder.init_state(len(first)), first + Tokenizer.sos_id, energies.vectors()
    previous, never = first.clone(), writable(decoder)
    found = [(first[:0], first[:0], first[:0])]  # rows, symbols, frames
    for frame in range(memory.values.shape[1]):
        p = (energies.pairs(0, state.hidden, memory.keys[:, frame], vectors) / temperature).sigmoid()
        row = ((torch.rand_like(p) < p) & memory.mask[:, frame]).nonzero()[:, 0]
        if not len(row):
            continue
        chunk = (frame + torch.arange(1 - width, 1, device=row.device)).clamp(min=0)
        keys, values = memory.keys[row[:, None], chunk], memory.values[row[:, None], chunk]
        before, at = gather_rows(state, row), torch.full_like(row, frame)
        u = torch.zeros_like(keys[..., 0])
        if energies.count > 1:
            u = energies.pairs(1, before.hidden[:, None], keys, vectors)
        context, _ = attention.attend_chunk(u, values, attention.chunk_mask(at, previous[row], first[row]))
        after = decoder.step(token[row], context, before)
        logits = decoder.logits(after.hidden, context).float() / temperature + never
        symbol = torch.multinomial(logits.softmax(1), 1)[:, 0]
        scatter_rows(state, row, after)
        token[row], previous[row] = symbol, at
        found.append((row, symbol, at))
    row, symbol, at = (torch.cat(part) for part in zip(*found, strict=True))
    count = row.bincount(minlength=len(first))
    order = row.argsort(stable=True)
    place = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row[order]]
    tokens = torch.zeros(len(first), int(count.max()) + 1, dtype=torch.int64, device=row.device)
    frames = torch.full_like(tokens, -1)
    tokens[row[order], place], frames[row[order], place] = symbol[order], at[order]
    tokens.scatter_(1, count[:, None], Tokenizer.eos_id)
    return Drawn(tokens, count + 1, frames)


def log_probabilities(decoder: Decoder, memory: Memory, texts: Drawn, temperature: float) -> Tensor:
    """Of what was decided at each frame, [R, T] float32: whether to select and, where it was selected, the symbol.

    The sum over frames is the logarithm of the probability that `drawn` draws these texts at these frames.
    """
    out = decoder.along_path(memory, texts.tokens, texts.num_tokens, texts.frames)
    length = memory.mask.shape[1]
    energies, selects, decides = (x[:, :length] for x in (out.energies, out.selects, out.decides))
    selecting = functional.binary_cross_entropy_with_logits(energies / temperature, selects.float(), reduction="none")
    symbols = (out.logits.float() / temperature + writable(decoder)).log_softmax(2)
    real = texts.frames >= 0
    # Where there is no symbol nothing may be gathered that is minus infinity.
    chosen = symbols.gather(2, texts.tokens.where(real, Tokenizer.first_id)[..., None])[..., 0] * real
    return (-selecting * decides).scatter_add(1, texts.frames.clamp(min=0), chosen)


def advantages(cost: Tensor, draws: int, discount: float) -> Tensor:
    """How much more is wrong from each frame on than in the other draws of an utterance, like `cost` [B draws, T]."""
    ahead, later = torch.zeros_like(cost), torch.zeros_like(cost[:, 0])
    for frame in reversed(range(cost.shape[1])):
        later = cost[:, frame] + discount * later
        ahead[:, frame] = later
    apart = ahead.view(-1, draws, cost.shape[1])
    others = (apart.sum(1, keepdim=True) - apart) / (draws - 1)
    return (apart - others).flatten(0, 1)


def expected_errors(
    model: SpeechModel,
    memory: tuple[Tensor, Tensor],
    tokens: Tensor,
    num_tokens: Tensor,
    space: int,
    draws: int,
    temperature: float,
    discount: float = DISCOUNT,
) -> tuple[Tensor, float]:
    """A number whose gradient lowers the expected costs (`mistakes.costs`) of what the decoder writes by itself.

    Args:
        model: with a monotonic attention.
        memory: [B, T, D], with its lengths [B].
        tokens: [B, U] int64, what was said, eos at the end.
        num_tokens: [B] int64, eos counted.
        space: the symbol between words.
        draws: for each utterance, 2 at least.
        temperature: see `drawn`.
        discount: for each frame between a decision and an error. 1 for the very gradient, less for one with less
            noise that leaves later errors to later decisions.

    Returns:
        It, a scalar per token of the transcripts (eos left out) that says nothing itself, and the draws' word error
        rate.

    """
    decoder, num_frames = model.decoder, memory[1].repeat_interleave(draws)
    was_training = decoder.training
    decoder.eval()  # what is drawn is drawn without dropout
    with torch.autocast(memory[0].device.type, enabled=False):
        values = memory[0].float()
        whole = decoder.attention.prepare(values, valid_mask(memory[1], values.shape[1]))
        keys, heard, mask = (x.repeat_interleave(draws, 0) for x in (whole.keys, whole.values, whole.mask))
        rows = Memory(keys, heard, mask, whole.directions)
        texts = drawn(decoder, rows, temperature)
        cost, rate = costs(
            _texts(texts.tokens, texts.num_tokens),
            texts.frames[:, :-1].cpu().numpy(),
            num_frames.cpu().numpy(),
            values.shape[1],
            _texts(tokens.repeat_interleave(draws, 0), num_tokens.repeat_interleave(draws)),
            space,
        )
        worse = advantages(torch.from_numpy(cost).to(values.device), draws, discount)
        likely = log_probabilities(decoder, rows, texts, temperature)
    decoder.train(was_training)
    return (likely * worse).sum() / (draws * (num_tokens - 1).sum().clamp(min=1)), rate


def policy_losses(
    model: SpeechModel,
    config: TrainConfig,
    memory: tuple[Tensor, Tensor],
    tokens: Tensor,
    num_tokens: Tensor,
    space: int,
) -> Weighted:
    """`expected_errors` as `config` has them, of one view where there are two, and the draws' word error rate."""
    rows = slice(0, len(tokens) // 2 if config.consistency_weight else len(tokens))
    of_rows = ((memory[0][rows], memory[1][rows]), tokens[rows], num_tokens[rows])
    objective, rate = expected_errors(model, *of_rows, space, config.policy_draws, config.policy_temperature)
    return {"policy": (config.policy_weight, objective), "drawn_wer": (0.0, objective.new_tensor(rate))}


def _texts(tokens: Tensor, num_tokens: Tensor) -> Texts:
    """Without the eos at their ends."""
    return Texts(tokens[:, :-1].cpu().numpy(), (num_tokens - 1).cpu().numpy())
