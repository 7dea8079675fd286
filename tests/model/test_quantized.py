"""LSTM layers in integers: against integer arithmetic, against the layers that they stand for, alone and in company."""

import numpy as np
import pytest
import torch
from tests.conftest import lively_recognizer, sound

from mocha_model import quantized
from mocha_model.config import tiny
from mocha_model.encoder import LSTMLayer
from mocha_model.quantized import LARGEST, QuantizedLinear, QuantizedLSTMLayer
from mocha_model.recognizer import Recognizer
from mocha_model.streaming import map_state

PRODUCTS = (quantized._in_floats, quantized._in_integers)


def integers(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows + inputs + outputs)
    x = torch.randint(-LARGEST, LARGEST + 1, (rows, inputs), generator=generator, dtype=torch.int8)
    return x, torch.randint(-LARGEST, LARGEST + 1, (inputs, outputs), generator=generator, dtype=torch.int8)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 5, 3), (7, 448, 64), (33, 640, 1792)])
def test_products_are_those_of_integers(product: quantized.Product, rows: int, inputs: int, outputs: int):
    x, weight = integers(rows, inputs, outputs)
    expected = x.numpy().astype(np.int64) @ weight.numpy().astype(np.int64)
    assert np.array_equal(product(x, weight).numpy(), expected)


def test_products_in_floats_are_exact_where_sums_are_largest():
    for inputs in (quantized.EXACT_IN_FLOAT32, 4000):
        x = torch.full((3, inputs), LARGEST, dtype=torch.int8)
        weight = torch.full((inputs, 5), LARGEST, dtype=torch.int8)
        weight[-1] -= 1
        expected = LARGEST**2 * inputs - LARGEST
        found = quantized._in_floats(x, weight)
        assert torch.equal(found, torch.full_like(found, expected)), "an odd number, which a rounded sum would not be"


def test_a_product_that_is_not_exact_is_not_chosen_for_its_speed():
    def fast(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x), weight.shape[1])

    def missing(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    assert quantized.fastest((fast, missing, quantized._in_floats)) is quantized._in_floats
    assert quantized.fastest(PRODUCTS) in PRODUCTS


@pytest.mark.parametrize("input_scale", [None, 1 / LARGEST])
def test_a_layer_errs_by_half_a_step_of_each_number_at_most(input_scale: float | None):
    torch.manual_seed(0)
    weight, bias, x = torch.randn(20, 30), torch.randn(20), torch.randn(9, 30).tanh()
    x[4] = 0
    layer = QuantizedLinear(weight, bias, input_scale)
    step_of_x = x.abs().amax(1, keepdim=True) / LARGEST if input_scale is None else torch.full((9, 1), input_scale)
    step_of_weight = weight.abs().amax(1, keepdim=True) / LARGEST
    most = x.abs() @ (step_of_weight / 2).expand_as(weight).t() + (step_of_x / 2) * (
        weight.abs() + step_of_weight / 2
    ).sum(1)
    error = (layer(x) - torch.nn.functional.linear(x, weight, bias)).abs()
    assert (error <= most + 1e-4).all()
    assert error.max() > 1e-3, "nothing was quantised"
    torch.testing.assert_close(layer(x[4:5])[0], bias)


def test_rows_do_not_depend_on_their_company():
    torch.manual_seed(1)
    layer = QuantizedLinear(torch.randn(64, 48), torch.randn(64))
    x = torch.randn(40, 48) * torch.logspace(-2, 2, 40)[:, None]
    together = layer(x)
    for first, last in ((0, 1), (3, 5), (7, 40)):
        assert torch.equal(layer(x[first:last]), together[first:last])


@pytest.mark.parametrize("projection_size", [24, None])
def test_a_layer_does_nearly_what_it_stands_for(projection_size: int | None):
    torch.manual_seed(2)
    layer = LSTMLayer(20, 32, projection_size, 0.3)
    lengths = torch.tensor([9, 4, 0])
    for _ in range(20):  # batch norm statistics
        layer(torch.randn(3, 9, 20), torch.tensor([9, 9, 9]))
    layer.eval()
    x = torch.randn(3, 9, 20)
    with torch.no_grad():
        stream = QuantizedLSTMLayer(layer)
        before = map_state(lambda s: s + torch.rand_like(s), stream.init_state(3))
        expected, _, expected_state = layer.step(x, lengths, before)
        y, num_valid, after = stream.step(x, lengths, before)
        assert y.shape == (3, 9, stream.out_size) and torch.equal(num_valid, lengths)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(y[row, :length], expected[row, :length], atol=0.05, rtol=0.05)
        torch.testing.assert_close(
            (after.hidden, after.cell), (expected_state.hidden, expected_state.cell), atol=0.03, rtol=0.03
        )
        assert torch.equal(after.hidden[2], before.hidden[2]) and torch.equal(after.cell[2], before.cell[2])
        first, _, middle = stream.step(x[:, :2], lengths.clamp(max=2), before)
        rest, _, last = stream.step(x[:, 2:], (lengths - 2).clamp(min=0), middle)
        for row, length in enumerate(lengths):
            assert torch.equal(torch.cat([first, rest], 1)[row, :length], y[row, :length]), "blocks are not told apart"
        assert torch.equal(last.cell, after.cell)
        nothing, _, same = stream.step(x[:, :0], lengths * 0, before)
        assert nothing.shape == (3, 0, stream.out_size) and same is before


def test_what_looks_ahead_is_of_integers_too():
    encoder, x = lively_recognizer(tiny(30).with_look_ahead(2)).model.encoder, torch.randn(2, 30, 48)
    lengths = torch.tensor([30, 17])
    with torch.no_grad():
        expected, num_expected, _ = encoder.step(x, lengths, encoder.init_state(2))
        stream = quantized.quantized(encoder)
        assert all(isinstance(ahead.later, QuantizedLinear) for ahead in stream.look_ahead)
        y, num_valid, _ = stream.step(x, lengths, stream.init_state(2))
    assert len(stream.look_ahead) and torch.equal(num_valid, num_expected)
    for row, length in enumerate(num_valid):
        torch.testing.assert_close(y[row, :length], expected[row, :length], atol=0.1, rtol=0.1)
        assert not torch.equal(y[row, :length], expected[row, :length])


@pytest.mark.parametrize("company", [1, 5])
def test_what_is_below_rounds_alike_in_every_company(bundled: Recognizer, company: int):
    """Else a number on the edge of two integers is one of them in one batch and the other in another."""
    model, samples = bundled.model, sound(40_000)
    grid = quantized.quantized(model.encoder).grid
    with torch.inference_mode():
        frames, lengths = model.features(samples[None], torch.tensor([len(samples)]))
        x = frames.reshape(*frames.shape[:2], 1, -1).transpose(2, 3)
        whole, in_blocks, states = x, [], [layer.init_state(company) for layer in grid]
        for layer in grid:
            whole, lengths, _ = layer.step(whole, lengths, layer.init_state(1))
        for start in range(0, x.shape[1], 8):
            block = x[:, start : start + 8].expand(company, -1, -1, -1)
            valid = torch.full((company,), block.shape[1])
            for n, layer in enumerate(grid):
                block, valid, states[n] = layer.step(block, valid, states[n])
            in_blocks.append(block[-1, : int(valid[-1])])
    assert torch.equal(torch.cat(in_blocks), whole[0, : int(lengths[0])])
