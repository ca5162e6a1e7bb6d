"""Training with a transformers `Trainer` equals a hand-written loop."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, tiny_config
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from transformer_vq import TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM, TransformerVQTokenizer

TEXT = "the cat sat on the mat and then it ran off up the hill to see the sun set. " * 20
LR = 0.05


def windows(n: int, length: int = 24) -> list[dict[str, list[int]]]:
    rows = [list(TEXT[i * 7 : i * 7 + length].encode()) for i in range(n)]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model, tmp_path, data, optimizer, **options):
    arguments = TrainingArguments(
        tmp_path / "trainer",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule))
    trainer.train()
    return trainer


def train_by_hand(core: TransformerVQ, data) -> None:
    optimizer = torch.optim.SGD(core.parameters(), LR)
    rows = torch.tensor([row["input_ids"] for row in data])
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

    data = windows(16)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    trainer = train(model, tmp_path, data, optimizer, gradient_checkpointing=checkpointing)
    train_by_hand(core, data)

    assert trainer.state.global_step == 4
    assert model.is_gradient_checkpointing is checkpointing
    assert model.model.branches[0].checkpoint_activations is checkpointing
    assert model.code_usage is None
    trained = model.to_core().state_dict()
    for name, want in core.state_dict().items():
        assert_close(name, trained[name].float(), want.float(), tolerance=1e-5)
        assert name.endswith(("started", ".u", ".v")) or not torch.equal(want, before[name])


def test_trainer_lowers_the_loss_and_saves_the_model(tmp_path):
    tokenizer = TransformerVQTokenizer()
    core = TransformerVQ(tiny_config(vocab_size=256, codebook_init="keys", revive_below=0.01))
    model = TransformerVQForCausalLM.from_core(core)
    data = [tokenizer(TEXT[i : i + 20 + i % 9]) for i in range(0, 320, 10)]
    arguments = TrainingArguments(
        tmp_path / "trainer",
        per_device_train_batch_size=8,
        max_steps=16,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to="none",
        save_steps=16,
        eval_strategy="steps",
        eval_steps=8,
        logging_steps=4,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:4],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert sum("eval_loss" in line for line in trainer.state.log_history) == 2
    saved = TransformerVQForCausalLM.from_pretrained(tmp_path / "trainer" / "checkpoint-16")
    for name, want in model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], want), name
    assert saved.generation_config.pad_token_id == 0  # set by the Trainer from the tokenizer
    inputs = tokenizer("the cat", return_tensors="pt")
    without_mask = saved.generate(inputs.input_ids, max_new_tokens=10)
    assert torch.equal(without_mask, saved.generate(**inputs, max_new_tokens=10))


def test_code_usage_is_collected_in_training_only(model):
    tokens = torch.tensor([[1, 2, 3]])
    model(tokens)
    assert model.code_usage is None
    model.train()
    with torch.no_grad():
        model(tokens)
    assert model.code_usage is None
    model(tokens)
    model(tokens)
    assert float(model.code_usage[0].count.sum()) == 6
    model.update_codebooks()
    assert model.code_usage is None


TWO_PROCESSES = """
import sys
import torch
import torch.distributed as dist
from helpers import tiny_config
from transformer_vq import TransformerVQ
from transformer_vq.hf import CodebookCallback, TransformerVQForCausalLM

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
config = tiny_config(codebook_init="keys", revive_below=0.1)
core = TransformerVQ(config)
model = TransformerVQForCausalLM.from_core(core).train()
torch.manual_seed(rank)  # the result must not depend on it
tokens = torch.randint(17, (8, 10), generator=torch.Generator().manual_seed(0))
for part in range(2):  # rows are distributed by micro-batch, then by rank
    first = 4 * part + 2 * rank
    model(tokens[first : first + 2])
CodebookCallback().on_optimizer_step(None, None, None, model=model)
codebooks = {name: x for name, x in core.named_buffers()}
found = [None, None]
dist.all_gather_object(found, codebooks)
assert all(torch.equal(found[0][name], found[1][name]) for name in codebooks)

torch.manual_seed(0)
single_core = TransformerVQ(config)
single = TransformerVQForCausalLM.from_core(single_core).train()
dist.destroy_process_group()
single(tokens)
single.update_codebooks()
for name, want in single_core.named_buffers():
    torch.testing.assert_close(codebooks[name], want)
"""


@pytest.mark.slow
def test_codebooks_learn_from_all_ranks(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", TWO_PROCESSES]
    children = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment)
        for rank in range(2)
    ]
    assert [child.wait(300) for child in children] == [0, 0]
