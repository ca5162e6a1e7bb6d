"""Padding and documents in the model and the layer."""

from itertools import pairwise

import pytest
import torch
from helpers import assert_close, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import HEAD_TYPES, tokens
from torch.profiler import ProfilerActivity, profile

from transformer_vq import TransformerVQ, VQAttention


def make(**overrides) -> TransformerVQ:
    torch.manual_seed(0)
    model = tiny_model(absolute_positions=True, **overrides).double()
    torch.nn.init.ones_(model.positions.scale)
    return model


def run(model, x, cuts=(), **ragged):
    """Return the logits of all segments, and the outputs."""
    state, outputs = None, []
    for start, stop in pairwise([0, *cuts, x.shape[1]]):
        part = {name: value[:, start:stop] for name, value in ragged.items()}
        outputs.append(model(x[:, start:stop], state, **part))
        state = outputs[-1].state
    return torch.cat([output.logits for output in outputs], dim=1), outputs


def total_usage(outputs):
    usages = outputs[0].code_usage
    for output in outputs[1:]:
        usages = [a + b for a, b in zip(usages, output.code_usage, strict=True)]
    return usages


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize("head_type", HEAD_TYPES)
@given(
    lengths=st.lists(st.sampled_from([1, 2, 4, 5, 8, 11, 17]), min_size=1, max_size=5),
    padding=st.sampled_from(["none", "left", "right", "anywhere"]),
    cuts=st.sets(st.integers(1, 60), max_size=3),
    reduction=st.sampled_from(["auto", "serial", "matmul", "associative", "input_scan"]),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_documents_and_padded_rows_equal_separate_sequences(
    head_type, attention, lengths, padding, cuts, reduction, seed
):
    model = make(head_type=head_type, attention=attention, reduction=reduction, n_layer=1)
    total = sum(lengths)
    x = tokens(2, total, seed)
    row_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ids = torch.stack([row_ids, torch.zeros_like(row_ids)])
    generator = torch.Generator().manual_seed(seed)
    length = torch.randint(1, total + 1, (2, 1), generator=generator)
    valid = {
        "none": torch.ones(2, total, dtype=torch.bool),
        "left": torch.arange(total) >= total - length,
        "right": torch.arange(total) < length,
        "anywhere": torch.rand(2, total, generator=generator) < 0.5,
    }[padding]
    valid[:, 0] |= ~valid.any(1)
    ragged = {} if padding == "none" else {"valid": valid}
    if len(lengths) > 1:
        ragged["document_ids"] = ids
    edges = sorted(c for c in cuts if c < total)
    logits, outputs = run(model, x.masked_fill(~valid, -100), edges, **ragged)
    places = [
        (ids == document) & valid & (torch.arange(2) == row)[:, None]
        for row in range(2)
        for document in ids[row].unique()
    ]
    places = [place for place in places if place.any()]
    separate = [model(x[place][None]) for place in places]
    for place, want in zip(places, separate, strict=True):
        assert_close("sequence", logits[place], want.logits[0])
    for row in range(2):
        last = ids[row][valid[row]][-1:]
        assert int(outputs[-1].state.position[row]) == int((valid & (ids == last))[row].sum())
    for got, want in zip(total_usage(outputs), total_usage(separate), strict=True):
        assert torch.equal(got.count, want.count)
        assert_close("usage", got.sum, want.sum)
    if attention == "vq":
        edges = [0, *edges, total]
        n_tokens = [valid[:, a:b].sum() for a, b in pairwise(edges)]
        got_loss = sum(o.commit_loss * n for o, n in zip(outputs, n_tokens, strict=True))
        want_loss = sum(o.commit_loss * p.sum() for o, p in zip(separate, places, strict=True))
        assert_close("commit loss", got_loss, want_loss)


def test_rows_at_different_positions_continue_together():
    """A left-padded prompt, then one token at a time for all rows: batched generation."""
    model = make()
    lengths = [13, 4, 7]
    x = tokens(3, 20)
    prompt, valid = torch.zeros(3, 13, dtype=torch.int64), torch.zeros(3, 13, dtype=torch.bool)
    for row, n in enumerate(lengths):
        prompt[row, 13 - n :], valid[row, 13 - n :] = x[row, :n], True
    output = model(prompt, valid=valid)
    for step in range(7):
        nxt = torch.stack([x[row, n + step] for row, n in enumerate(lengths)])[:, None]
        output = model(nxt, output.state)
    for row, n in enumerate(lengths):
        want = model(x[row : row + 1, : n + 7]).logits[0, -1]
        assert_close("last logits", output.logits[row, 0], want)


def test_rows_may_pause():
    """A row whose tokens are all padding keeps its state."""
    model = make()
    x = tokens(2, 9)
    before = model(x).state
    valid = torch.tensor([[True], [False]])
    after = model(x[:, :1], before, valid=valid).state
    assert after.position.tolist() == [10, 9]
    for got, want in zip(after.layers, before.layers, strict=True):
        assert torch.equal(got.v[1], want.v[1])
        assert torch.equal(got.cache.count[1], want.cache.count[1])
    assert_close("next", model(x[:, :1], after).logits[1], model(x[:, :1], before).logits[1])


def test_the_content_of_padding_is_ignored_even_if_nan():
    layer = VQAttention(16, d_k=8, n_code=7, block_len=4).double()
    x = torch.randn(2, 14, 16, dtype=torch.float64)
    valid = torch.arange(14) >= torch.tensor([[5], [0]])
    want = layer(x, valid=valid)
    x[0, :5] = torch.nan
    got = layer(x, valid=valid)
    assert torch.equal(got.y, want.y)
    assert torch.equal(got.code_usage.sum, want.code_usage.sum)


def kept_bytes(*, documents: bool, checkpoint: bool) -> int:
    """Return the memory that a forward pass allocates and does not free before its backward."""
    sizes = {"n_head": 4, "d_k": 8, "d_v": 8, "n_code": 8, "block_len": 64}
    layer = VQAttention(32, head_type="mha", checkpoint_activations=checkpoint, **sizes)
    x = torch.randn(2, 512, 32, requires_grad=True)
    ids = (torch.arange(512) // 100).expand(2, -1) if documents else None
    layer(x, document_ids=ids)  # tables that are computed once
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _output = layer(x, document_ids=ids)
    return sum(event.self_cpu_memory_usage for event in profiler.events())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_documents_keep_little_memory_per_token_for_the_backward_pass(checkpoint):
    """Masks have a block of keys per token and head; only the starts of documents are kept."""
    plain, packed = (kept_bytes(documents=d, checkpoint=checkpoint) for d in (False, True))
    assert 0 < packed - plain <= 2 * 512 * 16
    assert plain < 250_000 or not checkpoint
