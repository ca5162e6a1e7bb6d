"""Train a small model with a `Trainer` or with FSDP2; run by test_accelerate.py.

Arguments: "trainer" or "fsdp", rows per process and micro-batch, and the output folder.
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from client_models import make_model, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

LR, N_STEPS, N_MICRO_BATCHES = 0.05, 4, 2


def with_trainer(model, rows, batch_size: int, folder: Path) -> None:
    arguments = TrainingArguments(
        str(folder / "trainer"),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=N_MICRO_BATCHES,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=LR,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == N_STEPS


def with_fsdp(model, rows, batch_size: int) -> None:
    """Shard the parameters with FSDP2, and train without accelerate."""
    state = PartialState(cpu=True)
    if state.num_processes > 1:
        mesh = init_device_mesh("cpu", (state.num_processes,))
        for module in (*model.model.branches, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    batches = list(DataLoader(rows, batch_size))[state.process_index :: state.num_processes]
    for i, batch in enumerate(batches):
        (model(**batch).loss / N_MICRO_BATCHES).backward()
        if (i + 1) % N_MICRO_BATCHES == 0:
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    kind, batch_size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    logging.disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    model = make_model(commit_coef=0.1, codebook_init="keys", revive_below=0.2).train()
    torch.manual_seed(PartialState(cpu=True).process_index)  # the result must not depend on it
    windows = tokens(4 * N_MICRO_BATCHES * N_STEPS, 24)
    rows = [{"input_ids": row, "labels": row} for row in windows]
    if kind == "trainer":
        with_trainer(model, rows, batch_size, folder)
    else:
        with_fsdp(model, rows, batch_size)
    assert model.code_usage is None
    state, tensors = PartialState(), model.state_dict()
    tensors = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in tensors.items()}
    torch.save(tensors, folder / f"{kind}-{state.process_index}-of-{state.num_processes}.pt")


if __name__ == "__main__":
    main()
