"""Use VQAttention as the attention layer of your own model.

The model has its own LayerNorm, MLP and output head. `norm_input=False` disables the RMSNorm inside
the attention layer. Codebooks are buffers, not parameters: `update_codebook` moves them once per
optimizer step. For gradient accumulation, add the code usages of the micro-batches first.

Run:     python examples/custom_model.py
Prints:  the training loss every 10 steps, and how well the codebooks are used at the end
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_vq import AttentionOutput, ModelConfig, VQAttention

D_MODEL, N_LAYER, STEPS, BATCH_SIZE, SEQ_LEN = 64, 2, 30, 8, 128
# Weight of the commitment loss, which keeps keys close to their codes.
COMMIT_COEF = ModelConfig.commit_coef


class Block(nn.Module):
    """A pre-norm transformer block: grouped-query VQ attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        heads = {"head_type": "gqa", "d_k": 16, "n_kv_head": 2}  # d_model / d_k = 4 query heads
        self.attention = VQAttention(D_MODEL, **heads, n_code=64, block_len=64, norm_input=False)
        self.mlp = nn.Sequential(
            nn.Linear(D_MODEL, 4 * D_MODEL), nn.GELU(), nn.Linear(4 * D_MODEL, D_MODEL)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, AttentionOutput]:
        output = self.attention(self.attention_norm(x))
        x = x + output.y
        return x + self.mlp(self.mlp_norm(x)), output


class ByteModel(nn.Module):
    """Embeddings, blocks and a head that predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, D_MODEL)
        self.blocks = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.head = nn.Linear(D_MODEL, 256)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[AttentionOutput]]:
        x, outputs = self.embed(tokens), []
        for block in self.blocks:
            x, output = block(x)
            outputs.append(output)
        return self.head(x), outputs


torch.manual_seed(0)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
model = ByteModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(1, STEPS + 1):
    starts = torch.randint(len(text) - SEQ_LEN, (BATCH_SIZE, 1))
    chunk = text[starts + torch.arange(SEQ_LEN + 1)]
    logits, outputs = model(chunk[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
    (loss + COMMIT_COEF * sum(output.commit_loss for output in outputs)).backward()
    optimizer.step()
    optimizer.zero_grad()
    for block, output in zip(model.blocks, outputs, strict=True):
        block.attention.update_codebook(output.code_usage)
    if step == 1 or step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f} nats per byte")
for layer, output in enumerate(outputs):
    health = output.code_usage.health()
    print(
        f"layer {layer}: {health.share_in_use:.0%} of the codes in use, "
        f"relative quantization error {health.relative_error:.3f}"
    )
