"""First-order linear recurrences, exactly and in parallel.

``q_j = a_j q_{j-1} + b_j`` is a scan over an associative operation, so it takes log2(T) passes over [B, T]
(Hillis & Steele 1986) and no division: unlike the closed form of Chiu & Raffel 2018, eq. 12, it is exact for p near
0 and 1 and for long memories. The adjoint is the same recurrence run backwards.
"""

from typing import Any

import torch
from torch import Tensor


def _scan(a: Tensor, b: Tensor) -> Tensor:
    """All q_j [B, T] with q_{-1} = 0; `a` and `b` are not changed."""
    length, shift = b.shape[-1], 1
    while shift < length:
        # Each element absorbs the one `shift` before it: (a1, b1) then (a2, b2) is (a1 a2, a2 b1 + b2).
        b = torch.cat([b[..., :shift], torch.addcmul(b[..., shift:], a[..., shift:], b[..., :-shift])], dim=-1)
        if 2 * shift < length:
            a = torch.cat([a[..., :shift], a[..., shift:] * a[..., :-shift]], dim=-1)
        shift *= 2
    return b


class _LinearRecurrence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        q = _scan(a, b)
        ctx.save_for_backward(a, q)
        return q

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, q = ctx.saved_tensors
        # lambda_j = g_j + a_{j+1} lambda_{j+1}, then dL/db_j = lambda_j and dL/da_j = lambda_j q_{j-1}
        a_next = torch.nn.functional.pad(a[..., 1:], (0, 1))
        adjoint = _scan(a_next.flip(-1), grads[0].flip(-1)).flip(-1)
        return adjoint * torch.nn.functional.pad(q[..., :-1], (1, 0)), adjoint


def linear_recurrence(a: Tensor, b: Tensor) -> Tensor:
    """Solve ``q_j = a_j q_{j-1} + b_j`` with q_{-1} = 0 along the last dimension.

    Args:
        a: [..., T] factors; ``a_0`` is not used.
        b: [..., T] of the same dtype.

    Returns:
        q: [..., T], differentiable once in both arguments.

    """
    q: Tensor = _LinearRecurrence.apply(a, b)  # type: ignore[no-untyped-call]
    return q
