"""Theorems 3.6 and 3.7: attention in blocks equals Definition 3.1, wherever the sequence is cut."""

import pytest
import torch
from helpers import (
    assert_close,
    assert_same_gradients,
    attention_inputs,
    block_starts,
    reference,
    run_split,
)
from hypothesis import given
from hypothesis import strategies as st

from transformer_vq.ops.blockwise import encoder_attention, vq_attention
from transformer_vq.ops.cache import block_stats
from transformer_vq.ops.quadratic import distance_bias, quadratic_attention

REDUCTIONS = ["auto", "serial", "matmul", "associative", "input_scan"]
HEADS = {"shga": (1, 1), "mqa": (1, 3), "mha": (3, 1)}
L = 4


def squared_relu(scores: torch.Tensor) -> torch.Tensor:
    return scores.relu().square()


@pytest.mark.parametrize("phi", [None, squared_relu], ids=["softmax", "elementwise"])
@pytest.mark.parametrize(
    ("seq_len", "heads", "cuts"),
    [
        *((1, "shga", ()), (L - 1, "mqa", ()), (L, "mha", ()), (L + 1, "shga", ())),
        *((2 * L, "mqa", ()), (23, "shga", ()), (23, "mha", ()), (9 * L, "mqa", ())),
        *((27, "mqa", (1,)), (27, "shga", (L,)), (27, "mha", (5, 6))),
        *((27, "mqa", (2 * L + 1,)), (27, "mha", (3, 7, 19))),
    ],
)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_blockwise_equals_the_definition(reduction, heads, seq_len, cuts, phi):
    """Gradients flow through the state; which keys get one depends on where blocks begin."""
    h, g = HEADS[heads]
    inputs = attention_inputs(seq_len, h=h, g=g, block_len=L, requires_grad=True)
    got, _ = run_split(inputs, cuts, reduction=reduction, phi=phi)
    want = reference(inputs, cuts=cuts, phi=phi)
    assert_close("output", got, want)
    assert_same_gradients(inputs.leaves(), got, want)


@given(
    seq_len=st.integers(1, 40),
    block_len=st.integers(1, 7),
    b=st.integers(1, 3),
    reduction=st.sampled_from(REDUCTIONS),
    heads=st.sampled_from(sorted(HEADS)),
    data=st.data(),
)
def test_results_do_not_depend_on_the_cuts(seq_len, block_len, b, reduction, heads, data):
    h, g = HEADS[heads]
    inner = st.integers(1, max(1, seq_len - 1))
    cuts = data.draw(st.sets(inner, max_size=6)) if seq_len > 1 else set()
    inputs = attention_inputs(seq_len, h=h, g=g, b=b, block_len=block_len, seed=seq_len)
    got, state = run_split(inputs, tuple(sorted(cuts)), reduction=reduction)
    assert_close("output", got, reference(inputs))
    assert state.position.tolist() == [seq_len] * b
    # What is in the window and what is in the cache: every token once, the newest in the window.
    n_old = max(seq_len - block_len, 0)
    n_code = inputs.codebook.shape[1]
    old = block_stats(inputs.z[..., :n_old], inputs.v[..., :n_old, :], n_code)
    assert torch.equal(state.cache.count, old.count)
    assert_close("cache", state.cache.mean, old.mean)
    recent = min(seq_len, block_len)
    assert torch.equal(state.v[..., -recent:, :], inputs.v[..., -recent:, :])
    assert state.window_valid.sum(-1).tolist() == [recent] * b


@pytest.mark.parametrize("cuts", [(), (1, 6), (L, 3 * L), tuple(range(1, 27))])
def test_without_the_cache_attention_is_limited_to_block_len_tokens(cuts):
    inputs = attention_inputs(27, block_len=L, requires_grad=True)
    got, state = run_split(inputs, cuts, cache=False)
    want = reference(inputs, window_only=True, cuts=cuts)
    assert state.cache is None
    assert_close("output", got, want)
    assert_same_gradients(inputs.leaves(), got, want)


@pytest.mark.parametrize("cuts", [(), (5, 6, 18)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_without_gradient_through_the_cache_old_values_get_no_gradient(reduction, cuts):
    inputs = attention_inputs(27, block_len=L, requires_grad=True)
    got, _ = run_split(inputs, cuts, reduction=reduction, grad_through_cache=False)
    assert_close("output", got, reference(inputs))
    starts = block_starts(27, L, cuts)
    visible_keys = torch.arange(27)[None, :] >= starts[:, None] - L
    bias = distance_bias(inputs.by_distance, L)
    scores = torch.einsum("bhgik,bhjk->bhgij", inputs.q, inputs.k_hat)
    stopped = torch.einsum("bhgik,bhjk->bhgij", inputs.q, inputs.k_hat.detach())
    weights = (torch.where(visible_keys, scores, stopped) + bias).softmax(-1)
    want = torch.einsum("bhgij,bhjv->bhgiv", weights * visible_keys, inputs.v)
    want = want + torch.einsum("bhgij,bhjv->bhgiv", weights * ~visible_keys, inputs.v.detach())
    assert_same_gradients(inputs.leaves(), got, want)


def test_a_detached_state_stops_the_gradient_and_keeps_the_values():
    inputs = attention_inputs(20, block_len=L, requires_grad=True)
    _, state = vq_attention(*inputs.part(0, 11), inputs.empty_state())
    detached = state.detach()
    assert state.v.requires_grad
    assert not any(x.requires_grad for x in (detached.k, detached.v, detached.cache.mean))
    with_gradient, _ = vq_attention(*inputs.part(11, 20), state)
    without, _ = vq_attention(*inputs.part(11, 20), detached)
    assert torch.equal(with_gradient, without)
    (grad,) = torch.autograd.grad(without.sum(), inputs.v)
    assert not grad[..., :11, :].any()
    assert grad[..., 11:, :].any()


def test_rows_of_a_state_can_be_selected_repeated_and_reset():
    inputs = attention_inputs(20, b=3, block_len=L)
    _, state = vq_attention(*inputs.part(0, 11), inputs.empty_state())
    rows, is_reset = torch.tensor([2, 0, 2, 1]), torch.tensor([False, True, False, False])
    state = state.select(rows).reset(is_reset)
    assert state.position.tolist() == [11, 0, 11, 11]
    chosen = [x if x is inputs.codebook else x[rows] for x in inputs.part(11, 20)]
    got, state = vq_attention(*chosen, state)
    separate, _ = vq_attention(*inputs.part(11, 20), inputs.empty_state())
    want = reference(inputs)[rows][..., 11:, :]
    assert_close("rows that continue", got[~is_reset], want[~is_reset])
    assert_close("row that begins", got[1], separate[0])
    assert state.position.tolist() == [20, 9, 20, 20]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_scores_of_ten_thousand_give_finite_outputs_and_gradients(size, dtype):
    inputs = attention_inputs(27, block_len=L, dtype=dtype, d_k=1)
    inputs.q = inputs.q.sign() * abs(size) ** 0.5
    inputs.codebook = inputs.codebook.sign() * size / abs(size) ** 0.5
    inputs.k_hat = inputs.k_hat.sign() * size / abs(size) ** 0.5
    for leaf in inputs.leaves().values():
        leaf.requires_grad_()
    got, state = run_split(inputs, (13,))
    assert torch.isfinite(got).all()
    assert torch.isfinite(state.cache.mean).all()
    for grad in torch.autograd.grad(got.sum(), list(inputs.leaves().values())):
        assert torch.isfinite(grad).all()
    if dtype == torch.float64:  # in lower precision one unit in the last place is a large factor
        assert_close("output", got, reference(inputs))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("cache", [True, False])
def test_positional_scores_are_optional(reduction, cache):
    """None gives the outputs, gradients and state of positional scores that are all zero."""
    inputs = attention_inputs(21, h=2, g=2, requires_grad=True)
    q, k_hat, z, v, codebook, by_distance = inputs.part(0, 21)
    state = inputs.empty_state(cache)
    found = []
    for bias in (None, torch.zeros_like(by_distance)):
        output, after = vq_attention(q, k_hat, z, v, codebook, bias, state, reduction=reduction)
        gradients = torch.autograd.grad(output.square().sum(), (inputs.q, inputs.v))
        found.append((output, *gradients, after.k, after.v))
    for got, want in zip(*found, strict=True):
        assert_close("without positional scores", got, want)


def test_a_new_sequence_needs_no_state():
    inputs = attention_inputs(21)
    q, k_hat, z, v, codebook, by_distance = inputs.part(0, 21)
    window_len = by_distance.shape[-1] - 1
    got, state = vq_attention(q, k_hat, z, v, codebook, by_distance)
    want, _ = vq_attention(q, k_hat, z, v, codebook, by_distance, inputs.empty_state())
    assert_close("output", got, want)
    assert state.k.shape[-2] == window_len
    _, state = vq_attention(q, k_hat, z, v, codebook, block_len=5)
    assert state.k.shape[-2] == 5


@pytest.mark.parametrize("wrong", ["k_hat", "z", "v", "by_distance"])
def test_attention_rejects_arguments_of_another_length(wrong):
    inputs = attention_inputs(9)
    value = getattr(inputs, wrong)
    setattr(inputs, wrong, value[..., :-1] if wrong == "z" else value[..., :-1, :])
    with pytest.raises(ValueError, match=f"{wrong} has shape"):
        vq_attention(*inputs.part(0, 9), inputs.empty_state())


def test_other_wrong_shapes_are_rejected():
    inputs = attention_inputs(9)
    with pytest.raises(ValueError, match="state_keys has shape"):
        vq_attention(*inputs.part(0, 9), attention_inputs(9, b=3).empty_state())
    with pytest.raises(ValueError, match="by_distance has 5 distances, want 6"):
        vq_attention(*inputs.part(0, 9), attention_inputs(9, block_len=5).empty_state())
    with pytest.raises(ValueError, match="z has shape"):
        encoder_attention(inputs.q, inputs.z[0], inputs.v, inputs.codebook)
    with pytest.raises(ValueError, match="v has shape"):
        quadratic_attention(inputs.q, inputs.k_hat, inputs.v[:, :, 1:])
