"""Small models, texts and training loops that the tests with client libraries share."""

import torch
from helpers import tiny_config
from torch import Tensor, nn

from transformer_vq import TransformerVQ
from transformer_vq.hf import TransformerVQForCausalLM

TEXT = "the cat sat on the mat and then it ran off up the hill to see the sun set. " * 20


def tokens(n_rows: int, seq_len: int) -> Tensor:
    """Return windows of the text as bytes."""
    rows = [list(TEXT[7 * i : 7 * i + seq_len].encode()) for i in range(n_rows)]
    return torch.tensor(rows)


def make_model(seed: int = 0, **overrides) -> TransformerVQForCausalLM:
    """Return a model of bytes and document ends, with random weights, in evaluation mode."""
    torch.manual_seed(seed)
    core = TransformerVQ(tiny_config(vocab_size=257, **overrides))
    return TransformerVQForCausalLM.from_core(core, eos_token_id=256).eval()


def codebooks(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all codebook buffers by name."""
    return {n: x.clone() for n, x in model.named_buffers() if n.endswith(("c_sum", "c_count"))}


def train(model: nn.Module, n_steps: int = 4, lr: float = 0.05) -> list[float]:
    """Train with a plain loop that knows nothing of codebooks; return the losses."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr)
    rows, losses = tokens(4 * n_steps, 24), []
    model.train()
    for batch in rows.split(4):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def logits_of(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=batch).logits


def decoded_logits(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the logits of each token, computed one token at a time with the cache."""
    cache, parts = None, []
    with torch.no_grad():
        for column in batch.split(1, dim=1):
            output = model(input_ids=column, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
    return torch.cat(parts, dim=1)
