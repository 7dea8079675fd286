"""Expected alignments for training: alpha (monotonic) and beta (chunkwise), one output step at a time.

Plain functions on [B, T] tensors, so that anyone can check them against the papers' definitions.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mocha_model.attention.scan import linear_recurrence

OUTSIDE = -1e5  # a logarithm of nothing whose gradient is a number


def monotonic_alignment(
    p_choose: Tensor, previous: Tensor, mode: Literal["parallel", "recursive"] = "parallel"
) -> Tensor:
    """alpha_i from p_i and alpha_{i-1} (Raffel 2017, eq. 9; Chiu & Raffel 2018, eq. 11 with q = alpha / p).

    Args:
        p_choose: [B, T] selection probabilities of this output step; 0 at padding.
        previous: [B, T] alignment of the output step before; one-hot at 0 for the first.
        mode: "parallel" takes log2(T) passes, "recursive" follows the definition frame by frame. Same values.

    Returns:
        [B, T], each row a distribution that lacks the mass of "nothing selected".

    """
    stay = pad(1 - p_choose[..., :-1], (1, 0))  # 1 - p_{j-1}
    if mode == "parallel":
        return p_choose * linear_recurrence(stay, previous)
    if mode != "recursive":
        raise ValueError(f"mode is 'parallel' or 'recursive', not {mode!r}")
    q, columns = torch.zeros_like(previous[..., 0]), []
    for j in range(p_choose.shape[-1]):
        q = stay[..., j] * q + previous[..., j]  # q_j = (1 - p_{j-1}) q_{j-1} + alpha_{i-1,j}
        columns.append(p_choose[..., j] * q)
    return torch.stack(columns, dim=-1)


def simplified_alignment(p_choose: Tensor) -> Tensor:
    """Alpha without alpha_{i-1}: ``p_j prod_{l<j} (1 - p_l)`` (sMoChA, MTA); [B, T] -> [B, T]."""
    first = torch.zeros_like(p_choose)
    first[..., 0] = 1.0
    return monotonic_alignment(p_choose, first)


def moving_sum(x: Tensor, back: int, forward: int) -> Tensor:
    """``y_n = sum_{m = n - back + 1}^{n + forward - 1} x_m`` (Chiu & Raffel 2018, eq. 18), zeros outside; [..., T]."""
    length = x.shape[-1]
    padded = pad(x, (back - 1, forward - 1))
    return torch.stack([padded[..., k : k + length] for k in range(back + forward - 1)]).sum(0)


def chunkwise_alignment(monotonic: Tensor, chunk_energies: Tensor, chunk_width: int) -> Tensor:
    """beta_i from alpha_i and the chunk energies u_i (Chiu & Raffel 2018, eq. 19; the definition is eq. 17).

    Args:
        monotonic: [B, T] alpha of this output step.
        chunk_energies: [B, T] u, any finite values; padding may hold anything where alpha is 0 from there on.
        chunk_width: w >= 1 frames.

    Returns:
        [B, T] with the same sum as alpha.

    """
    if chunk_width < 1:
        raise ValueError("chunk_width is at least 1")
    if chunk_width == 1:
        return monotonic
    beta: Tensor = _Chunkwise.apply(monotonic, chunk_energies, chunk_width)  # type: ignore[no-untyped-call]
    return beta


class _Chunkwise(torch.autograd.Function):
    """`chunkwise_alignment` with its adjoint written out: small tensors, so the number of operations is what costs."""

    @staticmethod
    def forward(ctx: Any, monotonic: Tensor, chunk_energies: Tensor, width: int) -> Tensor:
        # Windows of u ending at k, softmax inside each: stable for any energies, where one maximum a row is not.
        inside = _windows(chunk_energies, width, -torch.inf).softmax(dim=-1)  # [B, T, w]
        ctx.save_for_backward(monotonic, inside)
        return _over_windows(inside * monotonic[..., None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        monotonic, inside = ctx.saved_tensors
        seen = _windows(grads[0], inside.shape[-1], 0.0)
        mean = (inside * seen).sum(-1)  # of the gradient inside each window
        return mean, _over_windows(inside * (seen - mean[..., None]) * monotonic[..., None]), None


def _windows(x: Tensor, width: int, outside: float) -> Tensor:
    """The `width` entries up to each, [..., T] -> [..., T, w]."""
    return pad(x, (width - 1, 0), value=outside).unfold(-1, width, 1)


def _over_windows(weighted: Tensor) -> Tensor:
    """What all windows that hold an entry give it, [..., T, w] -> [..., T]: the adjoint of `_windows`."""
    width = weighted.shape[-1]
    later = pad(weighted, (0, 0, 0, width - 1)).contiguous()
    *batch, _, _ = later.stride()
    # Entry n is the last of window n, the last but one of window n + 1, and so on.
    return later.as_strided(weighted.shape, (*batch, width, width - 1), later.storage_offset() + width - 1).sum(-1)


def monotonic_alignments(p_choose: Tensor) -> Tensor:
    """All output steps at once, [B, U, T] -> [B, U, T]; for when no p_i depends on an alignment before it."""
    previous = torch.zeros_like(p_choose[:, 0])
    previous[..., 0] = 1.0  # alpha_0
    rows = []
    for p in p_choose.unbind(1):
        previous = monotonic_alignment(p, previous)
        rows.append(previous)
    return torch.stack(rows, dim=1)


def _upper(length: int, like: Tensor) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=like.device).triu()


def log_partial_sums(x: Tensor) -> Tensor:
    """``log sum_{m=j}^{l} exp(x_m)`` at [..., j, l] for j <= l, 0 elsewhere (Chiu & Raffel 2018, eq. 40 of exp(x)).

    [..., T] to [..., T, T]. Summed forwards from each j: the difference of two sums (eq. 41) cancels where they are
    large. As a logarithm, since the gradient of what is divided by a sum has its square.
    """
    upper = _upper(x.shape[-1], x)
    rows = x[..., None, :].expand(*x.shape, x.shape[-1])
    return torch.where(upper, torch.where(upper, rows, OUTSIDE).logcumsumexp(-1), 0.0)


def all_partial_products(x: Tensor) -> Tensor:
    """``prod_{m=j}^{l} x_m`` at [..., j, l] for j <= l, 1 elsewhere (Chiu & Raffel 2018, below eq. 42); no division."""
    upper = _upper(x.shape[-1], x)
    return torch.where(upper, x[..., None, :], 1.0).cumprod(-1)


def adaptive_chunkwise_alignment(p_choose: Tensor, previous: Tensor, chunk_energies: Tensor) -> Tensor:
    """beta_i of MAtChA, whose chunks reach from t_{i-1} to t_i (Chiu & Raffel 2018, eq. 28).

    In O(T^2) memory per output step, as the paper. Computed in float64: chunks far below the row's largest energy
    would lose their sum in float32.

    Args:
        p_choose: [B, T] selection probabilities of this output step; 0 at padding.
        previous: [B, T] alpha_{i-1}.
        chunk_energies: [B, T] u, any finite values within 700 of each other.

    Returns:
        [B, T] in the dtype of `p_choose`, with the same sum as alpha_i.

    """
    p, before, u = p_choose.double(), previous.double(), chunk_energies.double()
    u = u - u.amax(dim=-1, keepdim=True).detach()
    upper = _upper(p.shape[-1], p)
    passed = all_partial_products(1 - p).roll(1, -1)  # prod_{n=k}^{l-1}: the column before
    passed = torch.where(upper.triu(1), passed, upper.to(p.dtype))  # 1 at k = l, 0 for k > l
    both = before[..., :, None] * p[..., None, :] * passed * (-log_partial_sums(u)).exp()  # start k, end l
    spans = both.cumsum(-2).flip(-1).cumsum(-1).flip(-1)  # sum over k <= j and l >= column
    return (u.exp() * spans.diagonal(dim1=-2, dim2=-1)).to(p_choose.dtype)  # eq. 43
