"""torch.export captures the transformers model for any batch size and length."""

import pytest
import torch
from helpers import assert_close, tiny_config
from torch.export import Dim

from transformer_vq import TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM

AXES = {0: Dim("batch", min=1), 1: Dim("length", min=1)}
SHAPES = [(1, 1), (2, 3), (4, 8), (2, 29)]  # blocks of 4 tokens


@pytest.fixture
def model() -> TransformerVQForCausalLM:
    core = TransformerVQ(tiny_config(vocab_size=256, n_layer=1, head_type="mqa")).eval()
    return TransformerVQForCausalLM.from_core(core)


def random_ids(b: int, t: int) -> torch.Tensor:
    return torch.randint(256, (b, t), generator=torch.Generator().manual_seed(t))


@torch.no_grad()
@pytest.mark.slow
def test_exported_model_accepts_padding(model):
    ids = random_ids(3, 11)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    shapes = {"input_ids": AXES, "attention_mask": AXES, "use_cache": None}
    run = torch.export.export(model, (), inputs, dynamic_shapes=shapes).module()
    for b, t in SHAPES:
        ids, mask = random_ids(b, t), torch.ones(b, t, dtype=torch.int64)
        mask[0, : t // 3] = 0
        got = run(input_ids=ids, attention_mask=mask, use_cache=False).logits
        want = model(input_ids=ids, attention_mask=mask).logits
        kept = mask.bool()
        assert_close(f"logits of {b} x {t}", got[kept], want[kept])
