"""Train TransformerVQ with your own loop: truncated BPTT over long sequences.

The text is a part of Python's standard library. It is cut into parallel streams, one per row of the
batch. Each step trains on the next span of every stream. The state carries the context from one
span to the next, and `state.detach()` stops the gradient between them. Codebooks are updated once
per optimizer step. The evaluation reads a held-out module span by span, in constant memory.

Run:     python examples/training_loop.py
Prints:  the training loss, and bits per byte of the held-out module before and after training
"""

import argparse
import ast
import bisect
import configparser
import inspect
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from transformer_vq import ModelConfig, TransformerVQ

STEPS, BATCH_SIZE, SPAN = 60, 4, 128
TRAINING_MODULES, HELD_OUT = (argparse, ast, configparser, inspect), bisect


def read_bytes(*modules) -> torch.Tensor:
    """Return the source code of modules as byte tokens."""
    return torch.tensor(list(b"".join(Path(module.__file__).read_bytes() for module in modules)))


@torch.no_grad()
def bits_per_byte(model: TransformerVQ, tokens: torch.Tensor) -> float:
    """Return the mean loss of all tokens after the first one, in bits."""
    model.eval()
    state, nats = None, 0.0
    for start in range(0, len(tokens) - 1, SPAN):
        span = tokens[start : start + SPAN + 1][None]
        output = model(span[:, :-1], state)
        state = output.state
        nats += F.cross_entropy(output.logits[0], span[0, 1:], reduction="sum").item()
    model.train()
    return nats / math.log(2) / (len(tokens) - 1)


torch.manual_seed(0)
training, held_out = read_bytes(*TRAINING_MODULES), read_bytes(HELD_OUT)
config = ModelConfig(vocab_size=256, d_model=64, n_layer=1, d_k=32, n_code=64, block_len=64)
model = TransformerVQ(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98))
print(f"before training: {bits_per_byte(model, held_out):.3f} bits per byte")

stream_len = len(training) // BATCH_SIZE
streams = training[: BATCH_SIZE * stream_len].view(BATCH_SIZE, stream_len)
state, start = None, 0
for step in range(1, STEPS + 1):
    if start + SPAN + 1 > stream_len:  # the end of the streams: start again, with an empty state
        state, start = None, 0
    span = streams[:, start : start + SPAN + 1]
    output = model(span[:, :-1], state)
    loss = F.cross_entropy(output.logits.flatten(0, 1), span[:, 1:].flatten())
    (loss + config.commit_coef * output.commit_loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    model.update_codebooks(output.code_usage)
    state, start = output.state.detach(), start + SPAN
    if step % 20 == 0:
        print(f"step {step}: training loss {loss.item() / math.log(2):.3f} bits per byte")

print(f"after training: {bits_per_byte(model, held_out):.3f} bits per byte")
