"""PEFT: adapters reach every linear layer, and their files contain what training has changed."""

import pytest
import torch
from client_models import codebooks, decoded_logits, logits_of, make_model, tokens, train
from helpers import assert_close
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from transformer_vq import generate
from transformer_vq.hf import TransformerVQForCausalLM

HEAD_TYPES = ["shga", "gqa"]
ALL = {"target_modules": "all-linear"}
POSITIONS_AND_HEAD = {"target_modules": ["r_proj", "lm_head"]}
WITH_CODEBOOKS = {"modules_to_save": ["quantizer"]}


def lora(model, seed=0, **options):
    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **options))


def randomize(model, scale=0.3) -> None:
    """Give every adapter a non-zero effect."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=scale)


def targets(model) -> list[str]:
    return [n.removesuffix(".lora_B.default") for n, _ in model.named_modules() if "lora_B.d" in n]


@pytest.mark.parametrize("options", [ALL, POSITIONS_AND_HEAD], ids=["all-linear", "named"])
@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_every_targeted_module_changes_the_logits(head_type, options):
    model = lora(make_model(head_type=head_type), **options)
    batch = tokens(2, 12)
    plain, plain_decoded = logits_of(model, batch), decoded_logits(model, batch)
    linear = [n for n, m in model.named_modules() if isinstance(m, BaseTunerLayer)]
    assert targets(model) == linear
    assert any(name.endswith("r_proj") for name in linear)
    for name in targets(model):
        weight = model.get_submodule(name).lora_B["default"].weight
        with torch.no_grad():
            weight.normal_()
        assert not torch.equal(logits_of(model, batch), plain), name
        assert not torch.equal(decoded_logits(model, batch), plain_decoded), name
        with torch.no_grad():
            weight.zero_()
    assert torch.equal(logits_of(model, batch), plain)


@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_decoding_with_an_adapter_equals_the_forward_pass(head_type):
    model = lora(make_model(head_type=head_type), **ALL)
    randomize(model)
    batch = tokens(2, 14)
    assert_close("logits", decoded_logits(model, batch), logits_of(model, batch))
    sequences = model.generate(input_ids=batch, max_new_tokens=8, do_sample=False)
    best = logits_of(model, sequences)[:, 13:-1].argmax(-1)
    assert torch.equal(sequences[:, 14:], best)


def test_adapters_of_a_core_model_are_used_by_its_decoder():
    core = make_model().to_core()
    prompt = tokens(1, 14)[0].tolist()
    plain = generate(core, prompt, 8, temperature=0)
    adapted = get_peft_model(core, LoraConfig(r=4, target_modules=["r_proj", "v_proj", "head"]))
    assert generate(core, prompt, 8, temperature=0) == plain
    randomize(adapted, scale=2.0)
    got = generate(core, prompt, 8, temperature=0)
    assert got != plain
    with torch.no_grad():
        logits = core(torch.tensor([prompt + got])).logits
    assert got == logits[0, 13:-1].argmax(-1).tolist()


@pytest.mark.filterwarnings("default:the codebooks are not trained:UserWarning")
def test_adapter_leaves_codebooks_frozen_and_is_restored_exactly(tmp_path):
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    model = lora(base, **ALL)
    before = codebooks(model)
    with pytest.warns(UserWarning, match="modules_to_save") as record:
        losses = train(model, n_steps=12)
    assert len(record) == 1
    assert losses[-1] < losses[0]
    assert all(torch.equal(x, before[name]) for name, x in codebooks(model).items())
    check_restored(model, tmp_path)


def test_adapter_with_quantizers_trains_and_restores_codebooks(tmp_path):
    base = make_model(codebook_init="keys", revive_below=0.01)
    base.save_pretrained(tmp_path / "base")
    model = lora(base, **ALL, **WITH_CODEBOOKS)
    before = codebooks(model)
    losses = train(model, n_steps=12)
    assert losses[-1] < losses[0]
    for name, x in codebooks(model).items():
        assert torch.equal(x, before[name]) == ("original_module" in name), name
    restored = check_restored(model, tmp_path)
    for name, x in codebooks(model).items():
        assert torch.equal(restored.get_buffer(name), x), name


def check_restored(model, tmp_path) -> PeftModel:
    """Check that base model and adapter are restored bit by bit; return the restored model."""
    batch = tokens(2, 30)
    model.save_pretrained(tmp_path / "adapter")
    base = TransformerVQForCausalLM.from_pretrained(tmp_path / "base")
    restored = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(logits_of(restored, batch), logits_of(model, batch))
    return restored


def test_merged_adapter_gives_the_same_logits(tmp_path):
    model = lora(make_model(), **ALL, **WITH_CODEBOOKS)
    train(model)
    batch = tokens(2, 30)
    want = logits_of(model, batch)
    merged = model.merge_and_unload()
    assert type(merged) is TransformerVQForCausalLM
    assert_close("logits", logits_of(merged, batch), want)
    merged.save_pretrained(tmp_path)
    loaded = TransformerVQForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(loaded, batch), logits_of(merged, batch))


def test_prompt_tuning_trains_and_generates(tmp_path):
    base = make_model()
    base.save_pretrained(tmp_path / "base")
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=6)
    model = get_peft_model(base, config)
    before = codebooks(model)
    losses = train(model, n_steps=12, lr=0.3)
    assert losses[-1] < losses[0]
    assert all(torch.equal(x, before[name]) for name, x in codebooks(model).items())
    prompt = tokens(2, 10)
    sequences = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)
    assert sequences.shape == (2, 18)
    best = logits_of(model, sequences)[:, 6 + 9 : -1].argmax(-1)
    assert torch.equal(sequences[:, 10:], best)
    check_restored(model, tmp_path)
