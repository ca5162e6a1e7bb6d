"""Differences from the official JAX code and from vector-quantize-pytorch (docs/official.md)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close, relative_rms, tiny_config, tiny_model

from transformer_vq import PRESETS, Sampling, VectorQuantizer, load_official
from transformer_vq.data.tokenizers import ByteTokenizer
from transformer_vq.training.optim import Adafactor

ROOT = Path(__file__).parent.parent
N_BLOCKS, GAMMA = 6, 0.99


def make_quantizer(n_code: int = 5, n_head: int = 2) -> VectorQuantizer:
    """Return a codebook that follows the paper: random, and codes are never replaced."""
    return VectorQuantizer(n_code, 4, n_head, codebook_init="random", revive_below=0.0)


def golden_params(name: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / "tests" / "data" / "golden" / f"{name}.npz") as file:
        return {key[6:]: array for key, array in file.items() if key.startswith("param/")}


# Codebooks


def test_codebook_update_is_that_of_vq_old_and_main():
    quantizer, k = make_quantizer(), torch.randn(2, 2, 48, 4)
    before = quantizer.c_sum.clone()
    blocks = [quantizer(block).usage.sum for block in k.chunk(N_BLOCKS, dim=2)]
    quantizer.update_codebook(quantizer(k).usage)

    # Each block is multiplied by the number of blocks. `vq_old` and `main` then average over them.
    averaged = sum(GAMMA * before + 0.01 * N_BLOCKS * block for block in blocks) / N_BLOCKS
    assert_close("vq_old and main", quantizer.c_sum, averaged, tolerance=1e-6)
    # `vq` adds up all blocks, and `tensor-parallel` also multiplies by the number of devices.
    for factor in (N_BLOCKS, 4 * N_BLOCKS):
        official = GAMMA * before + 0.01 * factor * sum(blocks)
        assert relative_rms(quantizer.c_sum, official) > 0.5


@pytest.mark.parametrize("factor", [1, N_BLOCKS])
def test_counts_add_up_to_the_tokens_of_a_step(factor):
    quantizer, k = make_quantizer(), torch.randn(2, 2, 48, 4)
    usage = quantizer(k).usage
    scaled = dataclasses.replace(usage, sum=factor * usage.sum, count=factor * usage.count)
    for _ in range(2000):
        quantizer.update_codebook(scaled)
    assert quantizer.c_count.sum(-1).tolist() == pytest.approx([factor * 96] * 2, rel=1e-4)


def test_random_codebooks_have_the_same_scale_for_any_number_of_heads():
    for n_head in (1, 8):
        scale = float(make_quantizer(512, n_head).c_sum.std())
        assert scale == pytest.approx(512**-0.5, rel=0.1)
    official = golden_params("vq_serial_mha")["stack/VQAttention_0/quantizer/c_sum"]
    n_head, n_code = official.shape[2:4]
    assert float(official.std()) == pytest.approx((n_head * n_code) ** -0.5, rel=0.1)


def test_codebooks_are_not_trained_by_gradients():
    model = tiny_model()
    assert not [name for name, _ in model.named_parameters() if "quantizer" in name]
    assert [name for name, _ in model.named_buffers() if name.endswith("c_sum")]


def test_commit_loss_is_computed_in_evaluation_too():
    model = tiny_model()
    tokens = torch.randint(17, (2, 9))
    training = model(tokens).commit_loss.detach()
    assert training > 0
    assert torch.equal(model.eval()(tokens).commit_loss, training)


# Model


def test_norms_have_no_gain_and_no_bias():
    vectors = {n for n, p in tiny_model().named_parameters() if p.ndim == 1}
    assert {name.split(".")[-1] for name in vectors} == {"u", "v", "bias"}
    assert {name for name in vectors if name.endswith("bias")} == {"head.bias"}


def test_tied_heads_have_no_bias():
    names = [name for name, _ in tiny_model(tie_embeddings=True).named_parameters()]
    assert not [name for name in names if "bias" in name]


def test_logit_scale_does_not_scale_the_bias_of_the_head():
    model = tiny_model(logit_scale=0.25)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(3.0)
    logits = model(torch.randint(17, (1, 5))).logits
    assert torch.equal(logits, torch.full_like(logits, 3.0))


def test_residual_dropout_applies_to_feed_forward_branches():
    model = tiny_model(head_type="mqa", n_layer=1, p_dropres=0.5)
    with torch.no_grad():
        model.branches[0].o_proj.weight.zero_()  # only the feed-forward branch is left
    tokens = torch.randint(17, (2, 9))
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("seq_len", [1, 5, 8, 11])
def test_sequences_may_have_any_number_of_blocks(seq_len):
    assert tiny_model()(torch.randint(17, (2, seq_len))).logits.shape == (2, seq_len, 17)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("stack/VQAttention_0/quantizer/c_sum", "stack/VQAttention_0/quantizer/codebook_sum"),
        ("token_embed/embedding", "token_embedder/embs"),
    ],
    ids=["tensor-parallel", "main"],
)
def test_weights_of_other_branches_are_rejected_by_name(ours, theirs):
    params = golden_params("vq_serial_mqa")
    params[theirs] = params.pop(ours)
    config = tiny_config(vocab_size=32, head_type="mqa", n_code=12, block_len=8)
    with pytest.raises(ValueError, match=rf"missing \['{ours}'\], unexpected \['{theirs}'\]"):
        load_official(params, config)


# Training


def test_adafactor_scales_the_steps_of_each_layer_separately():
    layers = [torch.ones(4, 4), torch.full((4, 4), 100.0)]

    def relative_steps(tensors):
        parameters = [torch.nn.Parameter(x.clone()) for x in tensors]
        for p in parameters:
            p.grad = torch.ones_like(p)
        Adafactor(parameters, lr=0.01).step()
        after = torch.cat([p.detach().flatten() for p in parameters])
        return 1 - after / torch.cat([x.flatten() for x in tensors])

    assert_close("ours", relative_steps(layers), torch.full((32,), 0.01), tolerance=1e-4)
    stacked = relative_steps([torch.stack(layers)])  # as in the branch `optimized`
    assert float(stacked[0]) == pytest.approx(0.01 * (5000.5**0.5), rel=1e-3)


# Data


def test_bytes_are_tokens_without_an_offset():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == PRESETS["enwik8-190m"].model.vocab_size == 256
    assert list(tokenizer.encode("a")) == [97]
    assert tokenizer.bos == 0


def test_books_of_the_pg19_preset_have_no_end_token():
    assert not PRESETS["pg19-1.3b"].data.end_of_document


def test_nucleus_keeps_the_tokens_of_the_official_rule():
    """The official rule keeps tokens whose ascending cumulative probability is above 1 - p."""
    p = torch.tensor([0.4, 0.05, 0.3, 0.25])
    ascending = p.sort().values.cumsum(0)[p.argsort().argsort()]
    official = (ascending > 1 - (0.69 - 1e-4)).nonzero().flatten().tolist()
    uniform = torch.linspace(0, 0.999, 200)
    drawn = Sampling(top_p=0.69).choose(p.log().expand(200, 4), uniform)
    assert drawn.unique().tolist() == official == [0, 2]


# vector-quantize-pytorch


def test_counts_are_clamped_where_vector_quantize_pytorch_smooths():
    quantizer = make_quantizer(n_head=1)
    with torch.no_grad():
        quantizer.c_count.copy_(torch.tensor([[1000.0, 10.0, 0.1, 0.01, 1e-4]]))
    count = quantizer.c_count
    smoothed = (count + 1e-5) / (count.sum() + 5 * 1e-5) * count.sum()
    difference = relative_rms(
        quantizer.codebook[:, :4], (quantizer.c_sum / smoothed[..., None])[:, :4]
    )
    assert 1e-5 < difference < 2e-3
    unused = quantizer.codebook[0, 4], quantizer.c_sum[0, 4] / smoothed[0, 4]
    assert_close("clamped", unused[0], quantizer.c_sum[0, 4] / 0.01)
    assert float(unused[1].norm() / unused[0].norm()) == pytest.approx(0.01 / 1.1e-4, rel=1e-3)


def test_commit_loss_is_a_sum_where_vector_quantize_pytorch_averages():
    quantizer, k = make_quantizer(n_head=2), torch.randn(3, 2, 7, 4)
    out = quantizer(k)
    mean = torch.nn.functional.mse_loss(out.k_hat, k)
    assert_close("commit loss", out.commit_loss, mean * 2 * 4)  # heads and width
