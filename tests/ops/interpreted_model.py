"""Nearest codes and whole models with the Triton kernels, in the interpreter.

Run by `test_triton.py` in a subprocess with TRITON_INTERPRET=1.
"""

import pytest
import torch
from helpers import assert_close, tiny_model
from interpreter import detectors

from transformer_vq.errors import UserError
from transformer_vq.nn.quantizer import nearest_code
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.triton.blocks import nearest_code as nearest_code_kernel


@pytest.fixture(autouse=True)
def _checked():
    with detectors():
        yield


@pytest.mark.parametrize(("seq_len", "n_code", "d_k"), [(1, 1, 1), (70, 70, 5), (64, 64, 16)])
def test_codes_are_exact(seq_len, n_code, d_k):
    k, codebook = torch.randn(2, 2, seq_len, d_k), torch.randn(2, n_code, d_k)
    assert torch.equal(nearest_code_kernel(k, codebook), nearest_code(k, codebook))


def test_the_first_of_equal_codes_wins():
    codebook = torch.tensor([[[1.0], [0.0], [1.0], [0.0]]]).repeat(1, 20, 1)
    k = torch.tensor([0.9, 0.1, 0.4]).view(1, 1, 3, 1)
    assert nearest_code_kernel(k, codebook).flatten().tolist() == [0, 1, 1]


@pytest.mark.parametrize("head_type", ["shga", "gqa"])  # wide values, and the single kernel
def test_a_model_equals_the_plain_one(head_type):
    """Two segments, with padding and documents; logits, gradients, state and code usage."""
    results = []
    tokens = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1))
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[1, 2] = False
    ids = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    more = {"valid": valid, "document_ids": ids}
    for method in ({"reduction": "serial"}, {"backend": "triton"}):
        torch.manual_seed(0)
        model = tiny_model(**method, head_type=head_type, n_layer=1)
        first = model(tokens[:, :5], **more)
        later = ids[:, -1:].expand(-1, 4)
        second = model(tokens[:, 5:], first.state, document_ids=later)
        loss = first.logits.square().sum() + second.logits.square().sum() + second.commit_loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        counts = [layer.cache.count for layer in second.state.layers]
        usage = [x.count for out in (first, second) for x in out.code_usage]
        results.append(((first.logits, second.logits, *gradients), (*counts, *usage)))
    (want, want_exact), (got, exact) = results
    for a, b in zip(got, want, strict=True):
        assert_close("logits or gradient", a, b)
    for a, b in zip(exact, want_exact, strict=True):
        assert torch.equal(a, b)


def test_unsupported_cases_are_rejected():
    q, k, v = torch.zeros(1, 1, 1, 3, 2), torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    z, codebook = torch.zeros(1, 1, 3, dtype=torch.int64), torch.zeros(1, 4, 2)
    with pytest.raises(UserError, match="phi"):
        vq_attention(q, k, z, v, codebook, block_len=2, backend="triton", phi=torch.relu)
    arguments = [x.double() for x in (q, k)] + [z] + [x.double() for x in (v, codebook)]
    with pytest.raises(UserError, match="float64"):
        vq_attention(*arguments, block_len=2, backend="triton")
