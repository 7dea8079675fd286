"""Alignments against definitions written independently of the implementation."""

from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor

from mocha_model.attention import (
    Attention,
    adaptive_chunkwise_alignment,
    all_partial_products,
    chunkwise_alignment,
    log_partial_sums,
    monotonic_alignment,
    monotonic_alignments,
    moving_sum,
    simplified_alignment,
)
from mocha_model.attention.energy import Energies
from mocha_model.attention.scan import linear_recurrence
from mocha_model.config import AttentionConfig

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


@pytest.mark.parametrize("width", [1, 4])
def test_hard_and_soft_agree_when_p_is_zero_or_one(width: int):
    p = (random_p(4, 12, seed=8) > 0.7).double()
    alpha, pointer, u = first(1, 12), 0, random_p(4, 12, seed=9)
    for i in range(4):
        alpha = monotonic_alignment(p[i : i + 1], alpha)
        beta = chunkwise_alignment(alpha, u[i : i + 1], width)[0]
        chosen = next((j for j in range(pointer, 12) if p[i, j] == 1), None)  # Raffel 2017, eqs. 6-8
        expected = torch.zeros(12, dtype=torch.float64)
        if chosen is not None:
            start = max(0, chosen - width + 1)
            expected[start : chosen + 1] = u[i, start : chosen + 1].softmax(0)
            pointer = chosen
        else:
            pointer = 12
        torch.testing.assert_close(beta, expected)


def equation_28(p: Tensor, previous: Tensor, u: Tensor) -> Tensor:
    length = len(p)
    beta = torch.zeros(length, dtype=torch.float64)
    for j in range(length):
        for k in range(j + 1):
            for last in range(j, length):
                share = u[j].exp() / u[k : last + 1].exp().sum()
                beta[j] += share * previous[k] * p[last] * (1 - p[k:last]).prod()
    return beta


@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_matcha_is_equation_28(spread: float):
    p, u = random_p(2, 9, seed=10), spread * (random_p(2, 9, seed=11) - 0.5)
    p[1, 6:] = 0  # padding
    previous = random_p(2, 9, seed=12)
    previous = previous / previous.sum(1, keepdim=True)
    beta = adaptive_chunkwise_alignment(p, previous, u)
    for b in range(2):
        torch.testing.assert_close(beta[b], equation_28(p[b], previous[b], u[b]))
    torch.testing.assert_close(beta.sum(1), monotonic_alignment(p, previous).sum(1))


def test_matcha_in_float32_and_at_the_edges_of_p():
    p = torch.where(random_p(1, 40, seed=13) > 0.5, 1 - 1e-6, 1e-6)
    previous, u = first(1, 40).roll(3, 1), 60 * random_p(1, 40, seed=14)
    single = adaptive_chunkwise_alignment(p.float(), previous.float(), u.float())
    assert single.dtype == torch.float32
    assert (single[0] - equation_28(p[0], previous[0], u[0])).abs().max() < 1e-5


def test_online_matcha_is_equation_27_within_its_bound():
    torch.manual_seed(0)
    layer = Attention(6, 5, AttentionConfig(mechanism="matcha", size=7, chunk_width=6))
    values, query = torch.randn(1, 12, 6), torch.randn(1, 5)
    for last, chosen in ((0, 4), (3, 3), (5, 10), (2, 9)):
        frames, before = torch.tensor([chosen]), torch.tensor([last])
        chunk = values[:, max(0, chosen - 5) : chosen + 1]
        chunk = torch.cat([chunk.new_zeros(1, 6 - chunk.shape[1], 6), chunk], 1)
        keys = layer.energies.memory_projection(chunk)
        u = layer.energies.pairs(1, query[:, None].expand(1, 6, 5), keys)
        context, _ = layer.attend_chunk(u, chunk, layer.chunk_mask(frames, before, torch.zeros_like(frames)))
        start = max(last, chosen - 5)  # the last of these reaches over the bound
        _, whole = layer.both_energies(query, layer.energies.memory_projection(values), layer.energies.directions())
        expected = whole[0, start : chosen + 1].softmax(0) @ values[0, start : chosen + 1]
        torch.testing.assert_close(context[0], expected)


def test_matcha_passes_gradcheck():
    parts = [random_p(1, 6, seed=s).requires_grad_() for s in (15, 16, 17)]
    assert torch.autograd.gradcheck(adaptive_chunkwise_alignment, parts)


def test_matcha_and_its_gradient_with_energies_far_apart():
    p, previous = torch.tensor([[0.0, 0.5, 0.5, 0.5]], dtype=torch.float64), first(1, 4).roll(1, 1)

    def gradient(beta_of: object, far: float) -> tuple[Tensor, Tensor]:
        u = torch.tensor([[far, 0.3, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
        assert callable(beta_of)
        beta = beta_of(p, previous, u)
        (beta * torch.tensor([[1.0, -2, 3, -4]], dtype=torch.float64)).sum().backward()
        assert u.grad is not None
        return beta.detach(), u.grad

    exact = gradient(lambda p, previous, u: equation_28(p[0], previous[0], u[0])[None], 100.0)
    for far in (100.0, 690.0):  # what is far above is in no chunk that may be
        for got, expected in zip(gradient(adaptive_chunkwise_alignment, far), exact, strict=True):
            torch.testing.assert_close(got, expected)


def test_partial_sums_and_products_are_equation_40():
    x = torch.tensor([2.0, 3.0, 4.0])
    torch.testing.assert_close(log_partial_sums(x.log()).exp(), torch.tensor([[2.0, 5, 9], [1, 3, 7], [1, 1, 4]]))
    assert all_partial_products(x).tolist() == [[2, 6, 24], [1, 3, 12], [1, 1, 4]]


def test_all_output_steps_at_once_are_the_steps():
    p = random_p(2, 3, 6, seed=18)
    alpha = first(2, 6)
    together = monotonic_alignments(p)
    for i in range(3):
        alpha = monotonic_alignment(p[:, i], alpha)
        torch.testing.assert_close(together[:, i], alpha)


def test_simplified_alpha_selects_as_if_nothing_had_been_selected_before():
    p, expected = random_p(2, 7, seed=19), torch.zeros(2, 7, dtype=torch.float64)
    for j in range(7):
        expected[:, j] = p[:, j] * (1 - p[:, :j]).prod(1)
    torch.testing.assert_close(simplified_alignment(p), expected)
    with pytest.raises(ValueError, match="simplified alpha"):
        AttentionConfig(mechanism="matcha", alpha="simplified")


@pytest.mark.parametrize("mechanism", ["softmax", "monotonic", "mocha", "matcha"])
def test_an_output_step_is_the_expectation_of_the_papers(mechanism: str):
    """A step that begins with a spread alignment, against the definitions of its parts."""
    torch.manual_seed(0)
    layer = Attention(6, 5, AttentionConfig(mechanism=mechanism, size=7, chunk_width=3, initial_bias=0.5)).double()
    values, query = torch.randn(1, 8, 6).double(), torch.randn(1, 5).double()
    ready = layer.prepare(values, torch.ones(1, 8, dtype=torch.bool))
    previous = 0.9 * random_p(1, 8, seed=20).softmax(1)
    step = layer.expect(query, ready, previous, 0.0)
    e, u = layer.both_energies(query, ready.keys, ready.directions)
    if mechanism == "softmax":
        p = alpha = beta = e.softmax(1)
    else:
        p = 1 / (1 + (-e).exp())
        alpha = monotonic_alignment(p, previous, "recursive")
        beta = {
            "monotonic": lambda: alpha,
            "mocha": lambda: chunkwise_alignment(alpha, u, 3),
            "matcha": lambda: equation_28(p[0], previous[0], u[0])[None],
        }[mechanism]()
    for got, expected in ((step.p, p), (step.alpha, alpha), (step.beta, beta), (step.context, beta @ values[0])):
        torch.testing.assert_close(got, expected)


def test_noise_before_the_sigmoid_is_normal_and_of_each_entry_by_itself():
    torch.manual_seed(0)
    layer = Attention(6, 5, AttentionConfig(size=7, initial_bias=0.0))
    values, query = torch.randn(4, 5000, 6), torch.randn(4, 5)
    ready = layer.prepare(values, torch.ones(4, 5000, dtype=torch.bool))
    e, _ = layer.both_energies(query, ready.keys, ready.directions)
    noise = layer.expect(query, ready, layer.first_alignment(ready), 2.0).p.double().logit() - e
    assert abs(noise.mean()) < 0.1 and abs(noise.std() - 2) < 0.1
    rows = noise - noise.mean(1, keepdim=True)
    for one, other in ((rows[:, 1:], rows[:, :-1]), (rows[1:], rows[:-1])):  # the next entry, the next row
        assert abs((one * other).mean()) < 0.2
    assert 0.02 < (noise.abs() > 4).double().mean() < 0.07  # beyond two deviations: 4.6 %


@pytest.mark.parametrize("mechanism", ["softmax", "monotonic", "mocha", "matcha"])
@pytest.mark.parametrize("energy", ["normalized", "additive", "dot"])
def test_padding_changes_nothing(mechanism: str, energy: str):
    torch.manual_seed(0)
    layer = Attention(6, 5, AttentionConfig(mechanism=mechanism, energy=energy, size=7, initial_bias=0.0))
    values, query = torch.randn(2, 10, 6), torch.randn(2, 5)
    mask = torch.arange(10) < torch.tensor([[10], [7]])
    ready = layer.prepare(values, mask)
    whole = layer.expect(query, ready, layer.first_alignment(ready), 0.0)
    short = layer.prepare(values[1:, :7], mask[1:, :7])
    alone = layer.expect(query[1:], short, layer.first_alignment(short), 0.0)
    torch.testing.assert_close(whole.context[1:], alone.context)
    torch.testing.assert_close(whole.beta[1:, :7], alone.beta)
    assert (whole.beta[1, 7:] == 0).all() and (whole.alpha[1, 7:] == 0).all()


def test_energies_are_equations_15_to_17():
    torch.manual_seed(0)
    query, memory = torch.randn(2, 5), torch.randn(2, 3, 6)
    for kind in ("normalized", "additive", "dot"):
        layer = Energies(6, 5, 7, kind, [-1.0, 0.5])  # type: ignore[arg-type]
        got = layer(query, layer.memory_projection(memory), layer.directions())
        size = layer.size
        for which, r in enumerate((-1.0, 0.5)):
            part = slice(which * size, (which + 1) * size)
            for b in range(2):
                for j in range(3):
                    keyed = layer.memory_projection.weight[part] @ memory[b, j]
                    if kind == "dot":
                        expected = query[b] @ keyed / size**0.5 + r  # eq. 17, g = 1 / sqrt(d)
                    else:
                        tanh = (
                            keyed + layer.memory_projection.bias[part] + layer.query_projection.weight[part] @ query[b]
                        ).tanh()
                        v = layer.direction[which]
                        expected = v @ tanh if kind == "additive" else v @ tanh / (v.norm() * size**0.5) + r
                    torch.testing.assert_close(got[b, j, which], expected)
        alone = layer.pairs(1, query[:, None].expand(2, 3, 5), layer.memory_projection(memory))
        torch.testing.assert_close(alone, got[..., 1])


def test_bfloat16_autocast_keeps_alignments_in_float32():
    torch.manual_seed(0)
    layer = Attention(16, 16, AttentionConfig(size=32, initial_bias=-1.0))
    values, query = torch.randn(4, 300, 16), torch.randn(4, 16)
    ready = layer.prepare(values, torch.ones(4, 300, dtype=torch.bool))
    exact = layer.expect(query, ready, layer.first_alignment(ready), 0.0)
    with torch.autocast("cpu", torch.bfloat16):
        ready = layer.prepare(values, torch.ones(4, 300, dtype=torch.bool))
        rough = layer.expect(query, ready, layer.first_alignment(ready), 0.0)
    assert rough.alpha.dtype == rough.beta.dtype == torch.float32
    for name in ("alpha", "beta"):  # bfloat16 energies; the recurrence itself adds nothing
        assert (getattr(exact, name) - getattr(rough, name)).abs().max() < 0.01
