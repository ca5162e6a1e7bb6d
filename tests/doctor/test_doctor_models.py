"""Whole models of the doctor: every comparison passes, and can fail."""

import pytest
import torch

from transformer_vq import TransformerVQ
from transformer_vq.doctor import models
from transformer_vq.doctor.samples import ALL_HEADS, CPU_SIZES, GPU_SIZES, Sizes
from transformer_vq.generation.decoder import Decoder
from transformer_vq.nn.quantizer import VectorQuantizer

SMALL = Sizes(18, 4, n_code=5, d_model=16, d_k=4, head_types=("shga", "gqa"))
CPU = torch.device("cpu")
COMPARISONS = (models.training_step, models.carried_state, models.padding, models.documents)


def run_checks():
    return {x.path: x for x in (f() for f in models.checks(SMALL, CPU))}


def test_all_models_pass():
    found = run_checks()
    assert {x.status for x in found.values()} == {"ok"}
    assert all(x.n_cases >= len(SMALL.head_types) for x in found.values())


def test_wrong_decoder_fails_and_the_others_pass(monkeypatch):
    right = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, tokens: 1.001 * right(self, tokens))
    found = run_checks()
    assert [name for name, x in found.items() if x.status == "FAILED"] == ["model: decoder"]


def test_ignored_documents_and_padding_fail(monkeypatch):
    right = TransformerVQ.forward

    def forward(self, tokens, state=None, valid=None, document_ids=None, **options):
        return right(self, tokens, state, **options)

    monkeypatch.setattr(TransformerVQ, "forward", forward)
    failed = {name for name, x in run_checks().items() if x.status == "FAILED"}
    assert failed == {"model: padding", "model: documents"}


def test_models_and_tokens_do_not_depend_on_the_random_state():
    config = SMALL.model("shga")
    first = models.make_model(config).embed.weight, models.random_tokens(config, SMALL)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = models.make_model(config).embed.weight, models.random_tokens(config, SMALL)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def smallest_margin(sizes, head_type):
    """Return by how much the nearest code is nearer than the second one, for the worst key."""
    config = sizes.model(head_type)
    pair = models.make_pair(config, sizes, CPU)
    found = []

    def note(quantizer, arguments, _):
        k, codebook = arguments[0].detach(), quantizer.codebook
        distances = codebook.square().sum(-1).unsqueeze(-2) - 2 * k @ codebook.mT
        first, second = distances.topk(2, largest=False).values.unbind(-1)
        found.append(float((second - first).min()))

    for module in pair.exact.modules():
        if isinstance(module, VectorQuantizer):
            module.register_forward_hook(note)
    for compare in COMPARISONS:
        compare(pair, models.random_tokens(config, sizes))
    return min(found)


@pytest.mark.parametrize("head_type", ALL_HEADS)
@pytest.mark.parametrize("sizes", [CPU_SIZES, pytest.param(GPU_SIZES, marks=pytest.mark.slow)])
def test_rounding_does_not_change_the_nearest_code(sizes, head_type):
    assert smallest_margin(sizes, head_type) > 1e-5
