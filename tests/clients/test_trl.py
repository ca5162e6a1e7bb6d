"""TRL trainers: codebooks move once per optimizer step, without a callback."""

from pathlib import Path

import pytest
import torch
from client_models import TEXT, codebooks, logits_of, make_model, tokens
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from transformer_vq.hf import TransformerVQForCausalLM, TransformerVQTokenizer
from transformer_vq.nn.quantizer import VectorQuantizer

N_STEPS = 20
# TRL appends the end-of-document token as text, so its name must be encoded as one token.
TOKENIZER = TransformerVQTokenizer(end_of_document=True, split_special_tokens=False)


def options(folder: Path, **changes) -> dict:
    return {
        "output_dir": str(folder),
        "max_steps": N_STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    } | changes


@pytest.fixture
def updates(monkeypatch) -> list[VectorQuantizer]:
    """Return a list that grows by each quantizer whose codebook is updated."""
    found = []
    update = VectorQuantizer.update_codebook

    def recorded(self, code_usage):
        found.append(self)
        update(self, code_usage)

    monkeypatch.setattr(VectorQuantizer, "update_codebook", recorded)
    return found


def sft(model, folder, **changes) -> SFTTrainer:
    texts = Dataset.from_list([{"text": TEXT[5 * i : 5 * i + 40]} for i in range(80)])
    trainer = SFTTrainer(
        model,
        SFTConfig(**options(folder, **changes), max_length=32),
        train_dataset=texts,
        processing_class=TOKENIZER,
    )
    trainer.train()
    return trainer


def losses(trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def check_updates(updates, model) -> None:
    """Check that each codebook was updated once per step, and is in use."""
    quantizers = [m for m in model.modules() if isinstance(m, VectorQuantizer)]
    assert [updates.count(quantizer) for quantizer in quantizers] == [N_STEPS] * len(quantizers)
    assert model.code_usage is None


def check_saved(trainer, folder) -> None:
    trainer.save_model(folder)
    loaded = TransformerVQForCausalLM.from_pretrained(folder)
    batch = tokens(2, 30)
    assert torch.equal(logits_of(loaded, batch), logits_of(trainer.model.eval(), batch))
    for name, want in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], want), name


def test_sft_updates_codebooks_once_per_step(updates, tmp_path):
    model = make_model()
    before = codebooks(model)
    trainer = sft(model, tmp_path / "trainer")
    assert trainer.state.global_step == N_STEPS
    assert all(torch.tensor(losses(trainer)).isfinite())
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]
    check_updates(updates, model)
    assert not any(torch.equal(x, before[name]) for name, x in codebooks(model).items())
    check_saved(trainer, tmp_path / "saved")


def test_sft_with_packed_documents_updates_codebooks_once_per_step(updates, tmp_path):
    model = make_model()
    trainer = sft(model, tmp_path, packing=True, padding_free=True)
    assert losses(trainer)[-1] < 0.8 * losses(trainer)[0]
    check_updates(updates, model)


@pytest.mark.parametrize("with_adapter", [False, True])
def test_dpo_updates_codebooks_once_per_step(updates, tmp_path, with_adapter):
    make_model().save_pretrained(tmp_path / "base")  # the reference model is loaded from there
    model = TransformerVQForCausalLM.from_pretrained(tmp_path / "base")
    pairs = [
        {"prompt": TEXT[i : i + 12], "chosen": TEXT[i + 12 : i + 24], "rejected": "zzz xx qq"}
        for i in range(40)
    ]
    adapter = {"r": 4, "target_modules": "all-linear", "modules_to_save": ["quantizer"]}
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**options(tmp_path / "trainer"), max_length=32),
        train_dataset=Dataset.from_list(pairs),
        processing_class=TOKENIZER,
        peft_config=LoraConfig(**adapter, task_type="CAUSAL_LM") if with_adapter else None,
    )
    trainer.train()
    assert trainer.state.global_step == N_STEPS
    assert all(torch.tensor(losses(trainer)).isfinite())
    assert losses(trainer)[-1] < losses(trainer)[0]
    if with_adapter:
        assert len(updates) == N_STEPS * len(model.model.codebook_layers())
    else:
        check_updates(updates, model)
        check_saved(trainer, tmp_path / "saved")
