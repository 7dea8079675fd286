"""The decoder along a known path as one differentiable operation: the recurrence over output steps and its adjoint.

Only what depends on the step before runs step by step; the gradients of the weights are single products over all steps.
Written by hand because automatic differentiation of the same loop takes most of a training step. Knows nothing of
tokens or of where the path comes from.
"""

from typing import Any

import torch
from torch import Tensor


def _gates(z: Tensor) -> tuple[Tensor, ...]:
    i, f, g, o = z.chunk(4, dim=1)
    return i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()


class _AlongPath(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, keys: Tensor, values: Tensor, outside: Tensor, gate: Tensor, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        exact = inputs.dtype
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else exact
        with torch.autocast(kind, enabled=False):
            from_context, from_hidden, from_query, direction = weights  # [D, 4S], [S, 4S], [S, d], [d]
            joined = torch.cat([from_context, from_hidden]).to(dtype)
            query_weight = from_query.to(dtype)
            batch_size, num_steps = inputs.shape[:2]
            hidden = cell = inputs.new_zeros(batch_size, from_hidden.shape[0])
            hiddens, contexts, cells, tanhs, alphas, gates = [], [], [], [], [], []
            steps = zip(*(x.unbind(1) for x in (inputs, keys, values, outside, gate)), strict=True)
            for z, key, value, barred, selected in steps:
                tanh = (key + (hidden.to(dtype) @ query_weight).to(exact)[:, None]).tanh()  # eq. 13 for u
                weight = (tanh @ direction + barred).softmax(dim=1)  # eq. 16
                context = torch.bmm(weight[:, None], value)[:, 0] * selected
                z = z + (torch.cat([context, hidden], 1).to(dtype) @ joined).to(exact)
                i, f, g, o = _gates(z)
                cells.append(cell)
                cell = f * cell + i * g
                hidden = o * cell.tanh()
                hiddens.append(hidden)
                contexts.append(context)
                tanhs.append(tanh)
                alphas.append(weight)
                gates.append((i, f, g, o, cell))
            hidden_all, context_all = torch.stack(hiddens, 1), torch.stack(contexts, 1)
        ctx.save_for_backward(values, gate, *weights, hidden_all, context_all, torch.stack(tanhs, 1))
        ctx.steps = (cells, alphas, gates, dtype)
        assert num_steps == len(cells)
        return hidden_all, context_all

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, gate, from_context, from_hidden, from_query, direction, hidden_all, context_all, tanh_all = (
            ctx.saved_tensors
        )
        cells, alphas, gates, dtype = ctx.steps
        exact, batch_size, size = hidden_all.dtype, hidden_all.shape[0], hidden_all.shape[2]
        joined = torch.cat([from_context, from_hidden]).to(dtype).t()
        query_weight = from_query.to(dtype).t()
        value_steps, gate_steps, tanh_steps = values.unbind(1), gate.unbind(1), tanh_all.unbind(1)
        outer_hidden, outer_context = grads[0].unbind(1), grads[1].unbind(1)
        d_hidden = d_cell = hidden_all.new_zeros(batch_size, size)
        d_z_steps, d_context_steps, d_energy_steps, d_query_steps, d_key_steps = [], [], [], [], []
        for n in reversed(range(len(cells))):
            i, f, g, o, cell = gates[n]
            squashed = cell.tanh()
            d_hidden = d_hidden + outer_hidden[n]
            d_cell = d_cell + d_hidden * o * (1 - squashed * squashed)
            d_z = torch.cat(
                [
                    d_cell * g * i * (1 - i),
                    d_cell * cells[n] * f * (1 - f),
                    d_cell * i * (1 - g * g),
                    d_hidden * squashed * o * (1 - o),
                ],
                dim=1,
            )
            d_cell = d_cell * f
            d_joined = (d_z.to(dtype) @ joined).to(exact)
            d_context = (d_joined[:, : values.shape[3]] + outer_context[n]) * gate_steps[n]
            weight, tanh = alphas[n], tanh_steps[n]
            d_weight = torch.bmm(value_steps[n], d_context[:, :, None])[..., 0]
            d_energy = weight * (d_weight - (weight * d_weight).sum(1, keepdim=True))
            d_key = d_energy[..., None] * direction * (1 - tanh * tanh)
            d_query = d_key.sum(1)
            d_hidden = d_joined[:, values.shape[3] :] + (d_query.to(dtype) @ query_weight).to(exact)
            d_z_steps.append(d_z)
            d_context_steps.append(d_context)
            d_energy_steps.append(d_energy)
            d_query_steps.append(d_query)
            d_key_steps.append(d_key)
        d_z, d_context, d_energy, d_query, d_keys = (
            torch.stack(steps[::-1], 1)
            for steps in (d_z_steps, d_context_steps, d_energy_steps, d_query_steps, d_key_steps)
        )
        before = torch.nn.functional.pad(hidden_all[:, :-1], (0, 0, 1, 0)).flatten(0, 1)
        flat_z = d_z.flatten(0, 1)
        d_values = torch.stack(alphas, 1)[..., None] * d_context[:, :, None]
        d_weights = (
            context_all.flatten(0, 1).t() @ flat_z,
            before.t() @ flat_z,
            before.t() @ d_query.flatten(0, 1),
            (d_energy[..., None] * tanh_all).sum((0, 1, 2)),
        )
        return d_z, d_keys, d_values, None, None, *d_weights


def along_path(
    inputs: Tensor,
    keys: Tensor,
    values: Tensor,
    inside: Tensor,
    from_context: Tensor,
    from_hidden: Tensor,
    from_query: Tensor,
    direction: Tensor,
) -> tuple[Tensor, Tensor]:
    """Decoder states and contexts of all steps of Chiu & Raffel 2018, algorithm 1 (lines 8-12, 17-20), with t_i given.

    Args:
        inputs: [B, U, 4S] what y_{i-1} and the biases add to the LSTM's gates, in the order i, f, g, o.
        keys: [B, U, w, d] ``W_h h + b`` of the chunk energy over each step's chunk.
        values: [B, U, w, D] memory entries of the chunks.
        inside: [B, U, w] bool, false before the start of the memory; a step with none is given the zero context.
        from_context: [D, 4S] the LSTM's weights for the context.
        from_hidden: [S, 4S] its recurrent weights.
        from_query: [S, d] W_s of the chunk energy.
        direction: [d] its ``g v/|v|``.

    Returns:
        ``(hidden [B, U, S], context [B, U, D])``, s_i and c_i, in the dtype of `inputs` (under autocast the products
        take its dtype, everything else stays).

    """
    gate = inside.any(2, keepdim=True).to(inputs.dtype)
    outside = torch.zeros_like(inside, dtype=inputs.dtype).masked_fill(~inside & (gate > 0), -torch.inf)
    keys, values = keys.to(inputs.dtype), values.to(inputs.dtype)
    hidden, context = _AlongPath.apply(  # type: ignore[no-untyped-call]
        inputs, keys, values, outside, gate, from_context, from_hidden, from_query, direction
    )
    return hidden, context
