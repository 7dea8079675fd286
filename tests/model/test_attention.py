"""Alignments against definitions written independently of the implementation."""

from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor

from mocha_model.attention import chunkwise_alignment, monotonic_alignment, moving_sum
from mocha_model.attention.scan import linear_recurrence

torch.set_default_dtype(torch.float32)


def random_p(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def first(batch: int, length: int) -> Tensor:
    alpha = torch.zeros(batch, length, dtype=torch.float64)
    alpha[:, 0] = 1
    return alpha


def test_alpha_is_the_sum_over_all_monotonic_paths():
    p = random_p(3, 5)  # three output steps over five entries
    alpha, expected = first(1, 5), torch.zeros(3, 5, dtype=torch.float64)
    for path in combinations_with_replacement(range(5), 3):
        probability, start = 1.0, 0
        for i, chosen in enumerate(path):
            for j in range(start, chosen):
                probability = probability * (1 - p[i, j])
            probability = probability * p[i, chosen]
            start = chosen
            # The marginal of step i sums over prefixes; count each prefix once.
            if all(later == path[i] for later in path[i + 1 :]):
                expected[i, chosen] += probability
    for i in range(3):
        alpha = monotonic_alignment(p[i : i + 1], alpha)
        torch.testing.assert_close(alpha[0], expected[i])


@pytest.mark.parametrize("edge", [0.0, 1e-6])
def test_parallel_equals_recursive_in_value_and_gradient(edge: float):
    p = random_p(2, 5000, seed=1)
    p[:, ::7] = 1 - edge
    p[:, 3::5] = edge
    previous = random_p(2, 5000, seed=2)
    previous = previous / previous.sum(1, keepdim=True)
    results = []
    for mode in ("parallel", "recursive"):
        a, b = p.clone().requires_grad_(), previous.clone().requires_grad_()
        alpha = monotonic_alignment(a, b, mode)
        (alpha * torch.linspace(-1, 1, 5000, dtype=torch.float64)).sum().backward()
        results.append((alpha.detach(), a.grad, b.grad))
    for parallel, recursive in zip(*results, strict=True):
        torch.testing.assert_close(parallel, recursive, rtol=1e-9, atol=1e-12)


def test_float32_error_of_alpha_stays_small_on_long_memories():
    p, previous = random_p(2, 5000, seed=3) * 0.02, first(2, 5000)
    exact = monotonic_alignment(p, previous, "recursive")
    single = monotonic_alignment(p.float(), previous.float())
    assert (single - exact).abs().max() < 1e-7


def test_scan_passes_gradcheck():
    a, b = random_p(2, 9).requires_grad_(), random_p(2, 9, seed=4).requires_grad_()
    assert torch.autograd.gradcheck(linear_recurrence, (a, b))


def test_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="recursive"):
        monotonic_alignment(random_p(1, 3), first(1, 3), "fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_beta_is_equation_17(width: int):
    alpha, u = random_p(2, 11, seed=5), 20 * random_p(2, 11, seed=6) - 10
    expected = torch.zeros_like(alpha)
    for b in range(2):
        for j in range(11):
            for k in range(j, min(j + width, 11)):
                window = u[b, max(0, k - width + 1) : k + 1].exp().sum()
                expected[b, j] += alpha[b, k] * u[b, j].exp() / window
    torch.testing.assert_close(chunkwise_alignment(alpha, u, width), expected)


def test_beta_survives_energies_far_apart():
    u = torch.tensor([[-500.0, 500.0, -500.0, -500.0, -500.0, -500.0]])
    beta = chunkwise_alignment(torch.full((1, 6), 1 / 6), u, 2)
    assert beta.isfinite().all()
    torch.testing.assert_close(beta.sum(), torch.tensor(1.0))


def test_beta_passes_gradcheck():
    alpha, u = random_p(1, 7).requires_grad_(), random_p(1, 7, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, e: chunkwise_alignment(a, e, 3), (alpha, u))


def test_moving_sum_is_equation_18():
    x = torch.arange(1.0, 6.0)[None]
    assert moving_sum(x, 2, 1).tolist() == [[1, 3, 5, 7, 9]]
    assert moving_sum(x, 1, 3).tolist() == [[6, 9, 12, 9, 5]]
