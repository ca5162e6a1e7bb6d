"""Load weights of the official JAX code.

The file is an .npz with the parameter tree of the official "optimized" branch, flattened with "/".
Write one in the official code, after a checkpoint was restored:

    flat = flax.traverse_util.flatten_dict(params, sep="/")
    numpy.savez("weights.npz", **jax.device_get(flat))

The config is that of a preset, with the vocabulary of the weights: official bytes are tokens 3 to
258. Without --preset it is inferred from the shapes of the arrays, which do not show `block_len`,
so it is an option. --sequence-len is the one of the official training; it is needed to continue
training. Without a file, the script uses random
weights.

Run:     python examples/official_weights.py
         python examples/official_weights.py WEIGHTS.npz --preset enwik8-190m --sequence-len 8192
Prints:  the sizes and, if the file also contains `input` and `logits` of the official model, the
         largest difference from these logits
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from transformer_vq import PRESETS, ModelConfig, TransformerVQ, load_official, official_names


def random_arrays(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return random official parameters, with an input and its logits.

    All layers of a type are stacked along the first axis, and kernels are [in, out].
    """
    source, tokens = TransformerVQ(config), torch.randint(config.vocab_size, (1, 1000))
    logits = source(tokens).logits.detach()
    arrays = {"input": tokens.numpy(), "logits": logits.numpy()}
    for ours, official in official_names(config).items():
        array = source.state_dict()[ours].numpy()
        array = array.T if official.name.endswith("/kernel") else array
        if official.layer is None:
            arrays[official.name] = array
        else:
            empty = np.zeros((config.n_layer, 1, *array.shape), array.dtype)
            arrays.setdefault(official.name, empty)[official.layer, 0] = array
    return arrays


def infer_config(params: dict[str, np.ndarray], block_len: int) -> ModelConfig:
    """Return the config of a VQ model with a separate output head from its parameters."""
    if "out_proj/kernel" not in params:
        parser.error("these weights have tied embeddings; choose their config with --preset")
    vocab_size, d_model = params["token_embed/embedding"].shape
    n_layer, _, n_head, n_code, d_k = params["stack/VQAttention_0/quantizer/c_sum"].shape
    is_gated = "stack/VQAttention_0/qkvg_producer/g_proj/kernel" in params
    head_type = "shga" if is_gated else "mqa" if n_head == 1 else "mha"
    sizes = {"d_k": d_k, "n_code": n_code, "block_len": block_len}
    return ModelConfig(vocab_size, d_model, n_layer, head_type=head_type, **sizes)


parser = argparse.ArgumentParser()
parser.add_argument("weights", type=Path, nargs="?", help=".npz file with official parameters")
parser.add_argument("--preset", choices=list(PRESETS), help="preset with the config of the model")
parser.add_argument("--block-len", type=int, default=512)
parser.add_argument("--sequence-len", type=int, help="tokens per sequence in official training")
options = parser.parse_args()

torch.manual_seed(0)
if options.weights is None:
    arrays = random_arrays(ModelConfig(256, 64, 2, d_k=32, n_code=64, block_len=options.block_len))
else:
    with np.load(options.weights) as file:
        arrays = {name.removeprefix("param/"): array for name, array in file.items()}
roots = ("token_embed/", "pos_embed/", "stack/", "out_proj/")
params = {name: array for name, array in arrays.items() if name.startswith(roots)}
if options.preset is None:
    config = infer_config(params, options.block_len)
else:
    vocab_size = len(params["token_embed/embedding"])
    config = replace(PRESETS[options.preset].model, vocab_size=vocab_size)
model = load_official(params, config, sequence_len=options.sequence_len).eval()

n_parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"{config.head_type}, {config.n_layer} layers of width {config.d_model}, ", end="")
print(f"{config.n_code} codes, {n_parameters:,} parameters")
if "logits" in arrays:
    with torch.no_grad():
        logits = model(torch.from_numpy(arrays["input"])).logits.numpy()
    difference = np.abs(logits - arrays["logits"]).max()
    print(f"largest difference from the recorded logits: {difference:.1e}")
