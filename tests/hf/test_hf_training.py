"""Training with a transformers `Trainer` equals a hand-written loop."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_config
from transformers import Trainer, TrainingArguments

from transformer_vq import TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM

TEXT = "the cat sat on the mat and then it ran off up the hill to see the sun set. " * 20
LR = 0.05


def train_by_hand(core: TransformerVQ, rows: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(core.parameters(), LR)
    for step in rows.split(4):
        usages = []
        for part in step.split(2):
            output = core(part)
            nats = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), part[:, 1:].flatten())
            ((nats + core.config.commit_coef * output.commit_loss) / 2).backward()
            usages.append(output.code_usage)
        optimizer.step()
        optimizer.zero_grad()
        core.update_codebooks([a + b for a, b in zip(*usages, strict=True)])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_equals_a_hand_written_loop(tmp_path, checkpointing):
    config = tiny_config(vocab_size=256, commit_coef=0.5)
    torch.manual_seed(1)
    core = TransformerVQ(config)
    torch.manual_seed(1)
    model = TransformerVQForCausalLM.from_core(TransformerVQ(config))
    before = {name: x.clone() for name, x in core.state_dict().items()}

    rows = torch.tensor([list(TEXT[7 * i : 7 * i + 24].encode()) for i in range(16)])
    arguments = TrainingArguments(
        tmp_path / "trainer",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=checkpointing,
        num_train_epochs=1,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to="none",
        save_steps=4,
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train()
    train_by_hand(core, rows)

    assert trainer.state.global_step == 4
    assert model.is_gradient_checkpointing is checkpointing
    assert model.model.branches[0].checkpoint_activations is checkpointing
    assert model.code_usage is None
    trained = model.to_core().state_dict()
    for name, want in core.state_dict().items():
        assert_close(name, trained[name].float(), want.float(), tolerance=1e-5)
        assert name.endswith(("started", ".u", ".v")) or not torch.equal(want, before[name])
    saved = TransformerVQForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-4")
    assert all(torch.equal(x, trained[n]) for n, x in saved.to_core().state_dict().items())
