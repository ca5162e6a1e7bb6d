"""Figures by hand, and two protocols against forwards written out."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers import tiny_config
from torch import nn

from transformer_vq import TransformerVQ
from transformer_vq.data.corpus import Split, SplitSize
from transformer_vq.evaluation import position_bin, score


class Uniform(nn.Module):
    """Every token as likely as any other."""

    def __init__(self, vocab_size):
        super().__init__()
        self.model = TransformerVQ(tiny_config(vocab_size=vocab_size))
        self.model.requires_grad_(False)
        self.model.head.weight.zero_()

    def forward(self, *args):
        return self.model(*args)


def split(tokens, starts=(0,), n_bytes=None, words=None, bos=0):
    tokens = np.array(tokens, dtype=np.uint8)
    size = SplitSize(len(tokens), len(starts), n_bytes or len(tokens), words)
    return Split(tokens, np.array(starts), bos, size)


def random_split(n, starts=(0,), **kwargs):
    return split(np.random.default_rng(0).integers(0, 8, n), starts, **kwargs)


@torch.no_grad()
def nats_of(model, tokens, bos=0):
    """Return the loss of every token of a single document."""
    text = torch.tensor(tokens.astype(np.int64))
    inputs = torch.cat([torch.tensor([bos]), text[:-1]])
    logp = model(inputs[None]).logits[0].log_softmax(-1)
    return -logp.gather(-1, text[:, None]).squeeze(-1)


def test_ten_tokens_by_hand():
    # Eight tokens equally likely: 3 bits each. Ten tokens represent 20 bytes and 4 words.
    result = score(
        Uniform(8).double(), split([1, 2, 3, 4, 5, 6, 7, 0, 1, 2], n_bytes=20, words=4), seq_len=4
    )
    assert result.tokens == 10
    assert result.nats_per_token == pytest.approx(3 * math.log(2), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(30 / 20, rel=1e-12)
    assert result.word_perplexity == pytest.approx(2 ** (30 / 4), rel=1e-12)
    # Contexts of 4, 4 and 2 tokens: positions 0 | 1, 2 | 3 to 6.
    assert [(b.first, b.last, b.tokens) for b in result.by_position] == [
        (0, 0, 3),
        (1, 2, 5),
        (3, 6, 2),
    ]


def test_bins_are_bit_lengths():
    edges = sorted({2**i + d for i in range(53) for d in (-1, 0, 1)} - {0})
    got = position_bin(torch.tensor(edges[:-1]) - 1)
    assert got.tolist() == [n.bit_length() - 1 for n in edges[:-1]]


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize(("span", "batch_size"), [(3, 2), (8, 1), (64, 8)])
def test_windowed_is_a_fresh_state_every_seq_len_tokens(attention, span, batch_size):
    model = TransformerVQ(tiny_config(attention=attention)).double().eval()
    data = random_split(50)
    # The input at a cut is the true token before it: only the state is fresh.
    want = 0.0
    for start in range(0, 50, 16):
        tokens = data.tokens[start : start + 16]
        bos = 0 if start == 0 else int(data.tokens[start - 1])
        want += float(nats_of(model, tokens, bos).sum())
    got = score(model, data, seq_len=16, span=span, batch_size=batch_size)
    assert got.tokens == 50
    assert got.nats == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("span", "batch_size"), [(3, 2), (7, 8), (64, 1)])
def test_streaming_is_one_state_through_every_document(span, batch_size):
    model = TransformerVQ(tiny_config()).double().eval()
    starts = [0, 5, 6, 40]
    data = random_split(77, starts)
    losses = [nats_of(model, data.tokens[a:b]) for a, b in pairwise([*starts, 77])]
    got = score(model, data, "streaming", seq_len=1, span=span, batch_size=batch_size)
    assert got.tokens == 77
    assert got.nats == pytest.approx(float(torch.cat(losses).sum()), rel=1e-12)
    at_start = torch.stack([document[0] for document in losses])
    assert got.by_position[0].tokens == 4
    assert got.by_position[0].nats_per_token == pytest.approx(float(at_start.mean()), rel=1e-12)


def test_windowed_never_attends_across_documents():
    model = TransformerVQ(tiny_config()).double().eval()
    starts = [0, 5, 21, 40]
    data = random_split(60, starts)
    want = sum(float(nats_of(model, data.tokens[a:b]).sum()) for a, b in pairwise([*starts, 60]))
    got = score(model, data, seq_len=60, span=9)
    assert got.nats == pytest.approx(want, rel=1e-12)


def test_the_start_of_a_split_counts_bytes_and_words_in_proportion():
    result = score(Uniform(8), random_split(40, n_bytes=80, words=20), seq_len=8, max_tokens=20)
    assert (result.tokens, result.bytes, result.words) == (20, 40, 10)
    result = score(Uniform(8), split([1, 2, 3]), seq_len=4)  # without words
    assert result.word_perplexity is result.to_dict()["word_perplexity"] is None


def test_it_leaves_the_model_as_it_was():
    model = TransformerVQ(tiny_config(p_dropres=0.5)).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    a = score(model, random_split(40), seq_len=20)
    b = score(model, random_split(40), seq_len=20)
    assert model.training
    assert a == b
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", ["seq_len", "span", "batch_size", "max_tokens"])
@pytest.mark.parametrize("size", [0, -5])
def test_sizes_below_one_are_rejected(name, size):
    sizes = {"seq_len": 8, name: size}
    with pytest.raises(ValueError, match=f"^{name}={size}: must be at least 1$"):
        score(Uniform(8), random_split(40), **sizes)


def test_it_can_be_stopped():
    assert score(Uniform(8), random_split(40), seq_len=8, stopped=lambda: True) is None
