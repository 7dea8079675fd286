"""The encoder: strided convolutions, ConvLSTM, convolution, LSTM stack. Unidirectional; causal but for a look-ahead.

Raffel 2017, D.1.1 and D.1.2, and Chiu & Raffel 2018, A.1. Every layer keeps the step/state contract of `streaming`;
whole utterances, training batches and live streams go through the same `step`.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mocha_model.config import EncoderConfig
from mocha_model.streaming import SlidingWindow, WindowState, is_uniform, valid_mask, where_rows

KERNEL = 3  # of every convolution, in time and in frequency


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation of [B, T, ..., C] whose training statistics leave padding out."""

    def forward(self, x: Tensor, num_valid: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise each channel C; `num_valid` [B] says how much of each row is real."""
        if not self.training or is_uniform(num_valid, x.shape[1]):
            return super().forward(x.flatten(0, -2)).view_as(x)
        mask = valid_mask(num_valid, x.shape[1])
        real = x[mask]
        y = torch.zeros_like(x)
        y[mask] = super().forward(real.flatten(0, -2)).view_as(real).to(y.dtype)
        return y


class CausalConv(nn.Module):
    """3 x 3 convolution over (time, frequency) that sees the present and two past frames; batch norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int, in_bins: int, stride: int) -> None:
        super().__init__()
        self.in_shape = (in_bins, in_channels)
        self.out_bins = (in_bins + stride - 1) // stride
        self.framing = SlidingWindow(KERNEL, stride)
        self.conv = nn.Conv2d(in_channels, out_channels, KERNEL, stride=stride, padding=(0, 1), bias=False)
        self.norm = MaskedBatchNorm(out_channels)

    def init_state(self, batch_size: int) -> WindowState:
        """Two frames of zeros before the first."""
        return self.framing.init_state(batch_size, self.in_shape, KERNEL - 1, self.conv.weight)

    def step(self, x: Tensor, num_valid: Tensor, state: WindowState) -> tuple[Tensor, Tensor, WindowState]:
        """[B, T, F, C] -> [B, T / stride, F / stride, C']."""
        left, num_out, state = self.framing.step(x, num_valid, state)
        longest = int(num_out.max()) if len(num_out) else 0
        if longest == 0:
            return x.new_zeros(x.shape[0], 0, self.out_bins, self.conv.out_channels), num_out, state
        needed = left[:, : (longest - 1) * self.framing.hop + KERNEL]
        y = self.conv(needed.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # channels last: neither side is copied
        return self.norm(y, num_out).relu(), num_out, state

    def forward(self, x: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """A whole batch from the start."""
        y, num_out, _ = self.step(x, num_valid, self.init_state(x.shape[0]))
        return y, num_out


@dataclass(frozen=True)
class RecurrentState:
    """Output and cell of a recurrent layer, each [B, ...]."""

    hidden: Tensor
    cell: Tensor


def next_state(gates: Tensor, cell: Tensor) -> RecurrentState:
    """An LSTM's state [..., S] after one item, from the sums that its gates get [..., 4 S], in torch's order."""
    i, f, g, o = gates.chunk(4, dim=-1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return RecurrentState(o.sigmoid() * cell.tanh(), cell)


class ConvLSTM(nn.Module):
    """LSTM over time whose transitions are 1 x 3 convolutions over frequency (Shi et al. 2015); batch norm, ReLU."""

    def __init__(self, channels: int, bins: int) -> None:
        super().__init__()
        self.shape = (bins, channels)
        self.input_conv = nn.Conv2d(channels, 4 * channels, (1, KERNEL), padding=(0, 1))
        self.hidden_conv = nn.Conv1d(channels, 4 * channels, KERNEL, padding=1, bias=False)
        self.norm = MaskedBatchNorm(channels)

    def init_state(self, batch_size: int) -> RecurrentState:
        """Zeros [B, F, C]."""
        zeros = self.hidden_conv.weight.new_zeros(batch_size, *self.shape)
        return RecurrentState(zeros, zeros.clone())

    def step(self, x: Tensor, num_valid: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, RecurrentState]:
        """[B, T, F, C] -> the same shape."""
        if x.shape[1] == 0:
            return x, num_valid, state
        from_input = self.input_conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # [B, T, F, 4C]
        uniform, outputs = is_uniform(num_valid, x.shape[1]), []
        for t in range(x.shape[1]):
            from_hidden = self.hidden_conv(state.hidden.transpose(1, 2)).transpose(1, 2)
            new = next_state(from_input[:, t] + from_hidden, state.cell)
            outputs.append(new.hidden)
            state = new if uniform else where_rows(num_valid > t, new, state)
        return self.norm(torch.stack(outputs, dim=1), num_valid).relu(), num_valid, state

    def forward(self, x: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """A whole batch from the start."""
        y, num_out, _ = self.step(x, num_valid, self.init_state(x.shape[0]))
        return y, num_out


class LSTMLayer(nn.Module):
    """LSTM; dense layer, batch norm and ReLU if there is a projection; dropout."""

    def __init__(self, in_size: int, lstm_size: int, projection_size: int | None, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(in_size, lstm_size, batch_first=True)
        self.out_size = projection_size or lstm_size
        self.projection = nn.Linear(lstm_size, projection_size, bias=False) if projection_size else None
        self.norm = MaskedBatchNorm(projection_size) if projection_size else None
        self.dropout = nn.Dropout(dropout)

    def init_state(self, batch_size: int) -> RecurrentState:
        """Zeros [B, S]."""
        zeros = next(self.lstm.parameters()).new_zeros(batch_size, self.lstm.hidden_size)
        return RecurrentState(zeros, zeros.clone())

    def step(self, x: Tensor, num_valid: Tensor, state: RecurrentState) -> tuple[Tensor, Tensor, RecurrentState]:
        """[B, T, I] -> [B, T, O]."""
        if x.shape[1] == 0:
            return x.new_zeros(x.shape[0], 0, self.out_size), num_valid, state
        before = (state.hidden[None], state.cell[None])
        if is_uniform(num_valid, x.shape[1]):
            y, (hidden, cell) = self.lstm(x, before)
            return self._project(y, num_valid), num_valid, RecurrentState(hidden[0], cell[0])
        lengths = num_valid.clamp(min=1).cpu()  # a packed row has at least one item; empty rows are put back below
        packed, (hidden, cell) = self.lstm(
            pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False), before
        )
        y, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        after = where_rows(num_valid > 0, RecurrentState(hidden[0], cell[0]), state)
        return self._project(y, num_valid), num_valid, after

    def forward(self, x: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """A whole batch from the start. Padding is on the right, so only the (unneeded) state would see it."""
        if x.shape[1] == 0:
            return x.new_zeros(x.shape[0], 0, self.out_size), num_valid
        return self._project(self.lstm(x)[0], num_valid), num_valid

    def _project(self, y: Tensor, num_valid: Tensor) -> Tensor:
        if self.projection is not None and self.norm is not None:
            y = self.norm(self.projection(y), num_valid).relu()
        result: Tensor = self.dropout(y)
        return result


class LookAhead(nn.Module):
    """Adds to each item a linear map of the one `frames` later, so that what follows hears a little of what comes.

    As layers with a future context between LSTM layers (Peddinti et al. 2018); Wang et al. 2016 look ahead after the
    last one. Begins as nothing: the map is 0. An item waits for that later one, so the last `frames` never come out.
    """

    like: Tensor  # has the device and dtype of the state

    def __init__(self, size: int, frames: int) -> None:
        super().__init__()
        self.size, self.frames = size, frames
        self.framing = SlidingWindow(frames + 1, 1)
        later = nn.Linear(size, size, bias=False)
        nn.init.zeros_(later.weight)
        self.later: nn.Module = later
        self.register_buffer("like", torch.zeros(()), persistent=False)

    def init_state(self, batch_size: int) -> WindowState:
        """Nothing that waits."""
        return self.framing.init_state(batch_size, (self.size,), 0, self.like)

    def step(self, x: Tensor, num_valid: Tensor, state: WindowState) -> tuple[Tensor, Tensor, WindowState]:
        """[B, T, D] -> [B, T, D], `frames` fewer at the start of a stream."""
        left, num_out, state = self.framing.step(x, num_valid, state)
        longest = int(num_out.max()) if len(num_out) else 0
        return self._joined(left, longest), num_out, state

    def forward(self, x: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """A whole batch from the start."""
        return self._joined(x, max(0, x.shape[1] - self.frames)), (num_valid - self.frames).clamp(min=0)

    def _joined(self, x: Tensor, num_items: int) -> Tensor:
        now, later = x[:, :num_items], x[:, self.frames : self.frames + num_items]
        if num_items == 0:
            return now
        joined: Tensor = now + self.later(later.flatten(0, 1)).view_as(now)
        return joined


class TimeReduction(nn.Module):
    """Skips every other item (Raffel 2017, D.1.1; after Chan et al. 2016): item 2j becomes item j.

    The first of each pair is kept, so that nothing waits for an item it does not use.
    """

    like: Tensor  # has the device and dtype of the state

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.framing = SlidingWindow(2, 2)
        self.register_buffer("like", torch.zeros(()), persistent=False)

    def init_state(self, batch_size: int) -> WindowState:
        """One item before the first, so that windows end at the items 0, 2, 4 ..."""
        return self.framing.init_state(batch_size, (self.size,), 1, self.like)

    def step(self, x: Tensor, num_valid: Tensor, state: WindowState) -> tuple[Tensor, Tensor, WindowState]:
        """[B, T, D] -> [B, T / 2, D], rounded up at the start of a stream."""
        left, num_out, state = self.framing.step(x, num_valid, state)
        longest = int(num_out.max()) if len(num_out) else 0
        return left[:, 1 : 2 * longest : 2], num_out, state

    def forward(self, x: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """A whole batch from the start."""
        return x[:, ::2], (num_valid + 1).div(2, rounding_mode="floor")


class Encoder(nn.Module):
    """Features [B, F, num_features] to memory [B, T, D], T = F / subsampling."""

    def __init__(self, num_features: int, num_maps: int, config: EncoderConfig) -> None:
        """`num_maps` feature maps (1, or 3 with deltas) share the `num_features` values of a frame."""
        super().__init__()
        self.num_maps, self.output_size = num_maps, config.output_size
        channels = num_maps
        bins = self.num_bins = num_features // num_maps
        grid: list[nn.Module] = []
        for out_channels in config.conv_channels:
            conv = CausalConv(channels, out_channels, bins, stride=2)
            grid.append(conv)
            channels, bins = out_channels, conv.out_bins
        grid += [ConvLSTM(channels, bins) for _ in range(config.num_conv_lstm_layers)]
        if config.num_conv_lstm_layers:
            grid.append(CausalConv(channels, channels, bins, stride=1))
        self.grid = nn.ModuleList(grid)
        size, stack = channels * bins, list[nn.Module]()
        for number, lstm_size in enumerate(config.lstm_sizes, 1):
            layer = LSTMLayer(size, lstm_size, config.projection_size, config.dropout)
            size = layer.out_size
            stack.append(layer)
            if number in config.time_reduction_after:
                stack.append(TimeReduction(size))
        self.stack = nn.ModuleList(stack)
        between = config.lstm_sizes[:-1] if config.look_ahead else ()  # there is no time reduction then
        self.look_ahead = nn.ModuleList(LookAhead(config.projection_size or n, config.look_ahead) for n in between)

    @property
    def layers(self) -> list[Any]:
        """All that frames pass through, in order."""
        stack = [layer for both in zip_longest(self.stack, self.look_ahead) for layer in both if layer is not None]
        return [*self.grid, *stack]

    def init_state(self, batch_size: int) -> tuple[Any, ...]:
        """The states of all layers, in order."""
        return tuple(layer.init_state(batch_size) for layer in self.layers)

    def step(self, x: Tensor, num_valid: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """[B, F, num_features] -> [B, T, D]."""
        memory, _, num_valid, state = self.step_both(x, num_valid, state)
        return memory, num_valid, state

    def step_both(
        self, x: Tensor, num_valid: Tensor, state: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
        """As `step`, with what the last layer is given, [B, T, D'], after the memory."""
        x, new_state = x.reshape(*x.shape[:2], self.num_maps, self.num_bins).transpose(2, 3), []
        below = x
        for layer, layer_state in zip(self.layers, state, strict=True):
            if layer is self.stack[0]:
                x = x.flatten(2)
            below = x
            x, num_valid, layer_state = layer.step(x, num_valid, layer_state)
            new_state.append(layer_state)
        return x, below, num_valid, tuple(new_state)

    def forward(self, x: Tensor, num_valid: Tensor) -> tuple[Tensor, Tensor]:
        """Whole utterances; equals `step` from the initial state (and is tested to)."""
        x = x.reshape(*x.shape[:2], self.num_maps, self.num_bins).transpose(2, 3)
        for layer in self.layers:
            if layer is self.stack[0]:
                x = x.flatten(2)
            x, num_valid = layer(x, num_valid)
        return x * valid_mask(num_valid, x.shape[1])[..., None], num_valid
