"""Determinism: equal results, differing results, crashes."""

import torch

from transformer_vq import TransformerVQ
from transformer_vq.doctor.repeats import repeat, repeats
from transformer_vq.doctor.samples import Sizes

SMALL = Sizes(18, 4, n_code=5, d_model=16, d_k=4, head_types=("shga", "gqa"))
CPU = torch.device("cpu")


def test_every_path_repeats_on_a_cpu():
    found = [task() for task in repeats(SMALL, CPU)]
    assert {x.status for x in found} == {"equal"}
    assert "training step, associative" in [x.path for x in found]
    assert found[-1].path == "decoder"


def test_results_that_differ_are_named(monkeypatch):
    right = TransformerVQ.logits

    def logits(self, x):
        noise = 1 + 1e-3 * torch.rand(())
        return right(self, x) * noise

    monkeypatch.setattr(TransformerVQ, "logits", logits)
    found = repeat("training step, auto", SMALL, CPU, "auto")
    assert found.status == "differs"
    assert "logits" in found.note


def test_crash_is_a_row(monkeypatch):
    def crash(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(TransformerVQ, "forward", crash)
    found = repeat("training step, auto", SMALL, CPU, "auto")
    assert found.status == "FAILED"
    assert "no kernel" in found.note
