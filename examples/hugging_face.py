"""Train with a transformers `Trainer`, save the model, and continue a text with a pipeline.

The text is a module of Python's standard library, as bytes. Nothing needs to be done for the
codebooks: they are updated after each optimizer step. The saved folder has the layout of a model on
the Hugging Face Hub. Needs the extra `hf`.

Run:     python examples/hugging_face.py
Prints:  the training loss, the share of the codes that changed, and a continuation from the folder
"""

import argparse
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments, pipeline
from transformers.utils import logging

from transformer_vq import ModelConfig, TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM, TransformerVQTokenizer

STEPS, BATCH_SIZE, LENGTH = 40, 8, 128

logging.disable_progress_bar()
torch.manual_seed(0)
config = ModelConfig(vocab_size=257, d_model=64, n_layer=2, d_k=32, n_code=64, block_len=32)
model = TransformerVQForCausalLM.from_core(
    TransformerVQ(config), bos_token_id=256, pad_token_id=256
)
tokenizer = TransformerVQTokenizer(end_of_document=True)

tokens = tokenizer(Path(argparse.__file__).read_text())["input_ids"]
rows = [tokens[i : i + LENGTH] for i in range(0, len(tokens) - LENGTH, LENGTH)]
before = model.model.branches[0].quantizer.codebook.clone()
trainer = Trainer(
    model,
    TrainingArguments(
        "trainer-output",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
trainer.train()
changed = (model.model.branches[0].quantizer.codebook.cpu() != before).any(-1).float().mean()
print(f"{changed:.0%} of the codes of the first layer changed")

model.save_pretrained("my-model")
tokenizer.save_pretrained("my-model")
continue_text = pipeline("text-generation", "my-model")
print(continue_text("    def ", max_new_tokens=100, temperature=0.7)[0]["generated_text"])
