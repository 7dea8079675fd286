"""LSTM layers for inference on a CPU, whose products are of integers of eight bits.

Weights are integers times a scale for each output, inputs integers times a scale for each row (symmetric, as in Jacob
et al. 2018, sections 2.1 and 2.4, with scales of their own). So what a stream reads depends on no other; and sums of
such products are exact in any order, so it is the same in batches and blocks of every size and on every processor.
Those that multiply integers fast take a seventh of the time of float32. Gates and cells are float32.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mocha_model.encoder import Encoder, LookAhead, LSTMLayer, RecurrentState, next_state
from mocha_model.streaming import is_uniform, where_rows

LARGEST = 127  # of an integer; symmetric
EXACT_IN_FLOAT32 = 2**24 // LARGEST**2  # so many products' sum is exact in any order
Product = Callable[[Tensor, Tensor], Tensor]


def in_integers(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [O, I] float32 as integers [O, I] int8 and their scales [O, 1] float32, one for each output.

    Scales have 16 bits, so that all multiples of them are exact, and what is `dequantized` has the same integers and
    scales again.
    """
    fraction, exponent = torch.frexp(weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST)
    scale = torch.ldexp((fraction * 2**16).round() / 2**16, exponent)
    return (weight / scale).round().to(torch.int8), scale


def dequantized(integers: Tensor, scale: Tensor) -> Tensor:
    """The weight [O, I] float32 of `integers` [O, I] int8 and their `scale` [O, 1] float32."""
    return integers.float() * scale


def _floats(weight: Tensor) -> Tensor:
    """Integers `weight` [I, O] as floats in which the sums of its products are exact."""
    return weight.float() if len(weight) <= EXACT_IN_FLOAT32 else weight.double()


def _in_floats(x: Tensor, weight: Tensor) -> Tensor:
    """The product [R, O] float32 of integers x [R, I] and weight [I, O], on processors that are slow with integers."""
    weight = _floats(weight)
    return (x.to(weight.dtype) @ weight).float()


def _in_integers(x: Tensor, weight: Tensor) -> Tensor:
    """The same by PyTorch's product of integers."""
    return torch._int_mm(x, weight).float()


def fastest(products: Sequence[Product]) -> Product:
    """Whichever takes the least time here, of those that are exact; they give the same."""
    x = torch.full((64, 448), LARGEST, dtype=torch.int8)
    weight = torch.full((448, 1792), LARGEST, dtype=torch.int8)
    weight[::2, ::2] = -LARGEST  # every other sum is as large as sums get, the rest cancel out
    expected = _in_floats(x, weight)

    def seconds(product: Product) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            try:
                exact = torch.equal(product(x, weight), expected)
            except RuntimeError:  # this processor has none
                return math.inf
            times.append(time.perf_counter() - began if exact else math.inf)
        return min(times)

    return min(products, key=seconds)


@cache
def _product() -> Product:
    return fastest((_in_floats, _in_integers))


class QuantizedLinear(nn.Module):
    """``factor * (x @ weight.T) + bias``, x [R, I] in integers, weight [O, I] too."""

    def __init__(self, weight: Tensor, bias: Tensor, input_scale: float | None = None, factor: Tensor | None = None):
        """`input_scale`: of inputs whose range is known, else each row has its own; `factor` [O], or of ones."""
        super().__init__()
        self.input_scale = input_scale
        integers, scale = in_integers(weight)
        integers = integers.t().contiguous()  # [I, O]
        self.register_buffer("weight", integers if _product() is _in_integers else _floats(integers))
        scale = scale.flatten() * (1.0 if input_scale is None else input_scale)
        self.register_buffer("scale", scale if factor is None else scale * factor)
        self.register_buffer("bias", bias.clone())

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """[R, I] float32 -> [R, O] float32."""
        return self.added(x, self.bias)

    def added(self, x: Tensor, bias: Tensor) -> Tensor:
        """The same with another `bias` [R, O]."""
        if self.input_scale is not None:
            product = _product()((x / self.input_scale).round().to(torch.int8), self.weight)
            return torch.addcmul(bias, product, self.scale)
        scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LARGEST
        product = _product()((x / scale).round().to(torch.int8), self.weight)
        return torch.addcmul(bias, product * scale, self.scale)


class QuantizedLSTMLayer(nn.Module):
    """What an `LSTMLayer` in eval mode does, nearly; the same step and state."""

    def __init__(self, layer: LSTMLayer) -> None:
        super().__init__()
        self.out_size, self.lstm_size = layer.out_size, layer.lstm.hidden_size
        weight_in, weight_hidden, bias_in, bias_hidden = layer.lstm.parameters()
        self.from_input = QuantizedLinear(weight_in, bias_in + bias_hidden)
        self.from_hidden = QuantizedLinear(weight_hidden, torch.zeros(len(weight_hidden)), 1 / LARGEST)
        self.projection = None
        if layer.projection is not None and layer.norm is not None:
            norm = layer.norm
            assert norm.running_mean is not None and norm.running_var is not None
            factor = norm.weight * (norm.running_var + norm.eps).rsqrt()
            bias = norm.bias - norm.running_mean * factor
            self.projection = QuantizedLinear(layer.projection.weight, bias, 1 / LARGEST, factor)

    def init_state(self, batch_size: int) -> RecurrentState:
        """Zeros [B, S]."""
        zeros = self.from_input.scale.new_zeros(batch_size, self.lstm_size)
        return RecurrentState(zeros, zeros.clone())

    def step(self, x: Tensor, num_valid: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, RecurrentState]:
        """[B, T, I] -> [B, T, O]."""
        batch_size, num_items, in_size = x.shape
        if num_items == 0:
            return x.new_zeros(batch_size, 0, self.out_size), num_valid, state
        from_input = self.from_input(x.transpose(0, 1).reshape(-1, in_size))
        uniform, outputs = is_uniform(num_valid, num_items), []
        for item, bias in enumerate(from_input.view(num_items, batch_size, -1)):
            new = next_state(self.from_hidden.added(state.hidden, bias), state.cell)
            state = new if uniform else where_rows(num_valid > item, new, state)
            outputs.append(state.hidden)
        y = torch.stack(outputs, dim=1)
        if self.projection is not None:
            y = self.projection(y.flatten(0, 1)).relu().view(batch_size, num_items, -1)
        return y, num_valid, state


class PreciseLayer(nn.Module):
    """`layer` of a stream, in float64 and rounded after it; the same step.

    The order of sums, and so the last bits, depends on the shape of a batch. Rounded to float32 from so many more bits,
    they hardly ever do; else some would lie beside each other on both sides of where `QuantizedLinear` rounds.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def init_state(self, batch_size: int) -> Any:
        """That of the layer."""
        return self.layer.init_state(batch_size)  # type: ignore[operator]

    def step(self, x: Tensor, num_valid: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """As the layer does, of and to float32."""
        y, num_valid, state = self.layer.step(x.double(), num_valid, state)  # type: ignore[operator]
        return y.float(), num_valid, state


@torch.no_grad()
def quantized(encoder: Encoder) -> Encoder:
    """A copy of `encoder` whose LSTM layers and look-ahead are quantised, what is below precise. For streaming only."""
    streaming = copy.deepcopy(encoder).eval()
    streaming.grid = nn.ModuleList(PreciseLayer(layer) for layer in streaming.grid)
    for ahead in streaming.look_ahead:
        assert isinstance(ahead, LookAhead) and isinstance(ahead.later, nn.Linear)
        ahead.later = QuantizedLinear(ahead.later.weight, torch.zeros(ahead.size))
    layers = (QuantizedLSTMLayer(layer) if isinstance(layer, LSTMLayer) else layer for layer in streaming.stack)
    streaming.stack = nn.ModuleList(layers)
    return streaming
