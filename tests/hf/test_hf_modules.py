"""Every module with weights is called, so hooks, offloading and replaced modules take effect."""

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM

TOKENS = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        *({"head_type": head_type} for head_type in ("shga", "mqa", "mha", "gqa")),
        {"attention": "full"},
        {"tie_embeddings": True, "final_norm": True},
        {"absolute_positions": True},
    ],
    ids=str,
)
def test_hooks_of_all_modules_with_weights_are_called(options):
    core = TransformerVQ(tiny_config(vocab_size=256, **options)).eval()
    model = TransformerVQForCausalLM.from_core(core)
    called = set()
    names = [
        name
        for name, module in model.named_modules()
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    ]
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    cache = model(TOKENS[:, :11], use_cache=True).past_key_values
    assert called == set(names)
    called.clear()
    model(TOKENS[:, 11:], past_key_values=cache)
    assert called == set(names)


def test_device_map_with_disk_gives_the_same_logits(model, folder, tmp_path):
    places = {"model.embed": "cpu", "lm_head": "disk"}
    places |= {f"model.branches.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    loaded = TransformerVQForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=str(tmp_path / "offload")
    )
    assert loaded.lm_head.weight.is_meta
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    sequences = loaded.generate(TOKENS, max_new_tokens=6, do_sample=False)
    assert torch.equal(sequences, model.generate(TOKENS, max_new_tokens=6, do_sample=False))
