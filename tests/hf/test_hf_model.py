"""The adapter gives the logits and loss of the core model, in memory and after saving."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from transformer_vq import TransformerVQ
from transformer_vq.errors import UserError
from transformer_vq.generation import prefill
from transformer_vq.hf import (
    TransformerVQCache,
    TransformerVQConfig,
    TransformerVQForCausalLM,
    modeling,
)

TOKENS = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(0))
OTHER = {
    "head_type": "mqa",
    "attention": "full",
    "compressive_cache": False,
    "grad_through_cache": False,
    "p_dropsin": 0.1,
    "p_dropres": 0.2,
    "p_droplyr": 0.3,
    "tie_embeddings": True,
    "final_norm": True,
    "logit_scale": 0.5,
    "absolute_positions": True,
    "pe_wavelength": 1e4,
    "commit_coef": 0.0,
    "ema_decay": 0.9,
    "codebook_init": "keys",
    "revive_below": 0.01,
}


@pytest.mark.parametrize("changes", [{}, OTHER])
def test_config_round_trip_is_lossless(tmp_path, changes):
    config = tiny_config(**changes)
    converted = TransformerVQConfig.from_model_config(config, bos_token_id=1)
    assert converted.to_model_config() == config
    converted.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert asdict(config).items() <= written.items()
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(loaded, TransformerVQConfig)
    assert loaded.to_model_config() == config
    assert loaded.bos_token_id == 1
    assert (loaded.hidden_size, loaded.num_hidden_layers) == (config.d_model, config.n_layer)
    assert loaded.num_attention_heads == config.layer.heads.n_head
    assert loaded.tie_word_embeddings is config.tie_embeddings


@pytest.mark.parametrize("changes", [{}, OTHER, {"head_type": "mha", "tie_embeddings": True}])
def test_saved_and_loaded_model_gives_identical_logits(tmp_path, changes):
    core = TransformerVQ(tiny_config(vocab_size=256, **changes)).eval()
    model = TransformerVQForCausalLM.from_core(core)
    assert torch.equal(model(TOKENS).logits, core(TOKENS).logits)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, TransformerVQForCausalLM)
    assert torch.equal(loaded(TOKENS).logits, core(TOKENS).logits)
    assert torch.equal(loaded(TOKENS, return_dict=False)[0], core(TOKENS).logits)


@pytest.mark.parametrize("codebook_init", ["keys", "random"])
def test_new_model_has_the_initial_distribution_of_the_core(codebook_init):
    config = tiny_config(
        vocab_size=300, d_model=64, codebook_init=codebook_init, absolute_positions=True
    )
    core = TransformerVQForCausalLM.from_core(TransformerVQ(config)).state_dict()
    model = TransformerVQForCausalLM(TransformerVQConfig.from_model_config(config))
    for name, x in model.state_dict().items():
        want = core[name].float()
        if x.numel() > 200 and want.std() > 0:
            assert float(x.float().std() / want.std()) == pytest.approx(1, rel=0.2), name
            assert not torch.equal(x, want), name
        elif name.split(".")[-1] in ("u", "v", "bias", "scale", "c_count", "started"):
            assert torch.equal(x.float(), want), name


def test_folder_with_missing_tensors_is_rejected(folder):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.branches.1.quantizer.c_sum"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no model\.branches\.1\.quantizer\.c_sum"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_loss_is_cross_entropy_plus_commitment_loss(model, core):
    labels = TOKENS.clone()
    labels[0, :5] = -100
    output = model(TOKENS, labels=labels)
    want = core(TOKENS)
    targets = labels[:, 1:].flatten()
    nats = F.cross_entropy(want.logits[:, :-1].flatten(0, 1)[targets >= 0], targets[targets >= 0])
    assert_close("loss", output.loss, nats + core.config.commit_coef * want.commit_loss)
    assert_close("commit loss", output.commit_loss, want.commit_loss)

    n_items = 100  # of which this batch has 54
    part = model(TOKENS, labels=labels, num_items_in_batch=torch.tensor(n_items))
    assert_close("accumulated", part.loss, output.loss * 54 / n_items)


@pytest.mark.parametrize("keep", [1, 7, torch.tensor([3, 28])])
def test_logits_to_keep_selects_positions(model, core, keep):
    want = core(TOKENS).logits[:, -keep:] if isinstance(keep, int) else core(TOKENS).logits[:, keep]
    assert_close("logits", model(TOKENS, logits_to_keep=keep).logits, want, tolerance=1e-6)


def test_long_prompt_is_run_in_segments(model, core, monkeypatch):
    n_last = 9
    for module in (modeling, prefill):
        monkeypatch.setattr(module, "SEGMENT_LEN", 7)
    lengths = []
    run = model.model.run
    model.model.run = lambda x, *args, **kwargs: (
        lengths.append(x.shape[1]) or run(x, *args, **kwargs)
    )
    mask = torch.ones_like(TOKENS)
    mask[1, :17] = 0
    want = core(TOKENS, valid=mask.bool())
    with torch.no_grad():
        got = model(TOKENS, attention_mask=mask, logits_to_keep=n_last)
    assert_close("logits", got.logits, want.logits[:, -n_last:])
    assert_close("means", got.past_key_values.state.layers[0].v, want.state.layers[0].v)
    assert got.past_key_values.get_seq_length() == 30
    assert lengths == [7, 7, 7, 7, 2]


def test_training_returns_a_cache_only_on_request(model):
    assert isinstance(model(TOKENS).past_key_values, TransformerVQCache)
    model.train()
    assert model(TOKENS).past_key_values is None
    cache = model(TOKENS[:, :20], use_cache=True).past_key_values
    cache.detach()
    assert not cache.state.layers[0].v.requires_grad
    model(TOKENS[:, 20:], past_key_values=cache).logits.sum().backward()


def test_cache_selects_rows_and_rejects_removing_tokens(model):
    cache = model(TOKENS).past_key_values
    assert (len(cache), cache.batch_size, cache.get_seq_length()) == (1, 2, 30)
    assert cache.get_max_length() == -1
    v = cache.state.layers[0].v
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.state.layers[0].v, v[[0, 0, 1, 1]])
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.state.layers[0].v, v[[1, 0]])
    cache.crop(0)
    with pytest.raises(ValueError, match="cannot remove 3 tokens"):
        cache.crop(-3)
    cache.reset()
    assert (cache.state, cache.get_seq_length(), cache.batch_size) == (None, 0, -1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": None}, "either input_ids or inputs_embeds"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        ({"attention_mask": torch.ones(2, 29)}, r"shape \(2, 29\), expected at least \[2, 30\]"),
    ],
)
def test_unsupported_arguments_raise_with_a_reason(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**({"input_ids": TOKENS} | arguments))


@pytest.mark.parametrize("tied", [False, True])
def test_resized_vocabulary_keeps_the_logits_of_old_tokens(tied, tmp_path):
    core = TransformerVQ(tiny_config(vocab_size=256, tie_embeddings=tied)).eval()
    model = TransformerVQForCausalLM.from_core(core)
    want = model(TOKENS).logits
    model.resize_token_embeddings(300)
    assert (model.config.vocab_size, model.lm_head.out_features) == (300, 300)
    assert (model.lm_head.weight is model.model.embed.weight) is tied
    longer = model(TOKENS).logits
    assert longer.shape[-1] == 300
    assert_close("logits", longer[..., :256], want, tolerance=1e-6)
    assert model.to(torch.bfloat16)(TOKENS).logits.dtype == torch.float32
    model.float().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.to_core().config.vocab_size == 300


def test_hidden_states_are_the_embeddings_and_the_features_of_each_layer(model, core):
    output = model(TOKENS, output_hidden_states=True)
    assert len(output.hidden_states) == core.config.n_layer + 1
    assert torch.equal(output.hidden_states[0], core.embed(TOKENS))
    assert torch.equal(core.logits(output.hidden_states[-1]), output.logits)
    two = TransformerVQ(tiny_config(vocab_size=256, n_layer=core.config.n_layer - 1)).eval()
    two.load_state_dict(core.state_dict(), strict=False)
    assert torch.equal(core.logits(output.hidden_states[-2]), two(TOKENS).logits)
    base = AutoModel.from_config(model.config).eval()
    base.model.load_state_dict(model.model.state_dict())
    features = base(inputs_embeds=core.embed(TOKENS)).last_hidden_state
    assert_close("features", features, output.hidden_states[-1], tolerance=1e-6)


def test_position_ids_that_start_again_separate_documents(model, core):
    positions = torch.cat([torch.arange(11), torch.arange(19)]).expand(2, 30)
    got = model(TOKENS, position_ids=positions).logits
    assert_close("second", got[:, 11:], core(TOKENS[:, 11:]).logits)
    assert_close("first", got[:, :11], core(TOKENS[:, :11]).logits)
