"""The decoder along a known path, against algorithm 1 followed line by line."""

import torch
from torch.nn.functional import logsigmoid

from mocha_model.config import tiny
from mocha_model.decoder_loop import along_path
from mocha_model.model import SpeechModel
from mocha_model.tokenizer import Tokenizer


@torch.no_grad()
def test_along_path_is_algorithm_1_with_the_selections_given():
    torch.manual_seed(0)
    model = SpeechModel(tiny(12)).double().eval()
    decoder, attention = model.decoder, model.decoder.attention
    memory, num_memory = torch.randn(2, 20, 16).double(), torch.tensor([20, 15])
    tokens, num_tokens = torch.tensor([[4, 5, 6, 7, 3], [5, 6, 3, 0, 0]]), torch.tensor([5, 3])
    frames = torch.tensor([[1, 4, 5, 11, -1], [0, 14, -1, -1, -1]])
    out = model.along_path(memory, num_memory, tokens, num_tokens, frames)
    each = torch.where(out.selects, logsigmoid(out.energies), logsigmoid(-out.energies))
    for row in range(2):
        h = memory[row : row + 1, : num_memory[row]]
        keys = attention.prepare(h, torch.ones(h.shape[:2], dtype=torch.bool))
        state, previous, start, expected = decoder.init_state(1), torch.tensor([Tokenizer.sos_id]), 0, 0.0
        for i in range(int(num_tokens[row])):
            e, u = attention.both_energies(state.hidden, keys.keys, keys.directions)
            chosen = int(frames[row, i])
            last = chosen if chosen >= 0 else h.shape[1]
            expected += float(logsigmoid(-e[0, start:last]).sum())
            context = torch.zeros_like(h[:, 0])
            if chosen >= 0:
                expected += float(logsigmoid(e[0, chosen]))
                chunk = slice(max(0, chosen - attention.chunk_width + 1), chosen + 1)
                context = (u[0, chunk].double().softmax(0)[:, None] * h[0, chunk]).sum(0)[None]
                start = chosen
            state = decoder.step(previous, context, state)
            torch.testing.assert_close(out.logits[row, i], decoder.logits(state.hidden, context)[0], atol=1e-6, rtol=0)
            previous = tokens[row, i : i + 1]
        torch.testing.assert_close(float(each[row][out.decides[row]].sum()), expected, rtol=1e-6, atol=0)


def test_the_loop_passes_gradcheck():
    torch.manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    inside = torch.ones(2, 4, 3, dtype=torch.bool)
    inside[0, 0, :2] = False  # before the start of the memory
    inside[1, 3] = False  # the zero context
    weights = (random(6, 16), random(4, 16), random(4, 5), random(5))
    assert torch.autograd.gradcheck(
        along_path, (random(2, 4, 16), random(2, 4, 3, 5), random(2, 4, 3, 6), inside, *weights)
    )
