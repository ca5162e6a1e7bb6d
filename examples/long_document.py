"""Read a long document once, save the context, and continue it with several prompts.

The document is processed in segments, so memory does not depend on its length. The state has a
constant size. The saved context is one file, and each prompt continues it without reading the
document again. The last line compares this with one prefill of the document and the prompt.

Run:     python examples/long_document.py [--run RUN] [--document FILE]
         --run is the folder of a `tvq train` run on text. Without it, a small model is trained on
         the start of the document for a few seconds; it writes words, not sentences.
Prints:  state size and time for several lengths, one continuation per prompt, and a comparison
"""

import argparse
import configparser
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from transformer_vq import (
    ModelConfig,
    Sampling,
    TransformerVQ,
    load_context,
    load_run,
    prefill,
    save_context,
    stream,
)

PROMPTS = ["\n    def ", "\nclass ", "\nimport "]
NEW_TOKENS = 32


def train_briefly(text: list[int], steps: int = 30, seq_len: int = 128) -> TransformerVQ:
    """Return a small model of bytes; `training_loop.py` explains the loop."""
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=256, d_model=64, n_layer=1, d_k=32, n_code=64, block_len=128)
    model, tokens = TransformerVQ(config), torch.tensor(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        chunk = tokens[torch.randint(len(text) - seq_len, (4, 1)) + torch.arange(seq_len + 1)]
        output = model(chunk[:, :-1])
        loss = F.cross_entropy(output.logits.flatten(0, 1), chunk[:, 1:].flatten())
        (loss + config.commit_coef * output.commit_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.update_codebooks(output.code_usage)
    return model.eval()


parser = argparse.ArgumentParser()
parser.add_argument("--run", type=Path, help="run folder of a model that was trained on text")
parser.add_argument("--document", type=Path, default=Path(configparser.__file__))
options = parser.parse_args()

document = [0, *options.document.read_bytes()]  # byte 0 starts a document
model = train_briefly(document[1:20_000]) if options.run is None else load_run(options.run).model
for length in [n for n in (1_000, 10_000) if n < len(document)] + [len(document)]:
    start = time.perf_counter()
    context = prefill(model, [document[:length]])
    seconds = time.perf_counter() - start
    print(f"{length:,} tokens: state of {context.state.n_bytes:,} bytes, {seconds:.2f} s")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "document.safetensors"
    save_context(path, model, context)
    print(f"saved {path.stat().st_size:,} bytes")
    saved = load_context(path, model)

for number, prompt in enumerate(PROMPTS):
    prompted = prefill(model, [list(prompt.encode())], saved)
    steps = stream(model, prompted, NEW_TOKENS, Sampling(temperature=0.7), seed=number)
    print(prompt.strip(), ascii(bytes(token for (token,) in steps).decode(errors="replace")))

direct = prefill(model, [[*document, *PROMPTS[-1].encode()]])
difference = (prompted.logits - direct.logits).abs().max().item()
print(f"largest difference from reading document and prompt together: {difference:.1e}")
