"""Parity with recorded outputs of the official JAX code (tests/data/golden/README.md)."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, relative_rms

from transformer_vq import ModelConfig, load_official
from transformer_vq.interop import official_names

FILES = sorted((Path(__file__).parent / "data" / "golden").glob("*.npz"))
OFFICIAL_REDUCTION = {"serial": "serial", "matmul": "matmul", "assoc": "associative"}
N_BLOCKS = 6  # the official update multiplies batch statistics by this


def config_of(path: Path) -> ModelConfig:
    attention, *words = path.stem.split("_")
    tied = "tied" in words
    return ModelConfig(
        vocab_size=32,
        d_model=16,
        n_layer=2,
        head_type=next(word for word in words if word in ("shga", "mqa", "mha")),
        attention=attention,
        d_k=8,
        n_code=12,
        block_len=8,
        tie_embeddings=tied,
        final_norm=tied,
        logit_scale=0.05 if tied else 1.0,
        absolute_positions=tied,
        codebook_init="random",
        revive_below=0.0,
    )


def reduction_of(path: Path) -> str:
    """Return our reduction that corresponds to the one of the official run."""
    return OFFICIAL_REDUCTION.get(path.stem.split("_")[1], "auto")


def read(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the arrays by kind: param, grad, codebook_after, and all others under ""."""
    kinds: dict[str, dict[str, np.ndarray]] = {
        "param": {},
        "grad": {},
        "codebook_after": {},
        "": {},
    }
    with np.load(path) as file:
        for name, array in file.items():
            kind, _, rest = name.partition("/")
            kinds[kind if rest else ""][rest or kind] = array
    return kinds


def test_all_golden_files_exist():
    assert len(FILES) == 13


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parity_with_the_official_code(path):
    config, data = config_of(path), read(path)
    model = load_official(data["param"], config, reduction_of(path))
    output = model(torch.from_numpy(data[""]["input"]))
    assert_close("logits", output.logits, torch.from_numpy(data[""]["logits"]))

    target = torch.from_numpy(data[""]["target"]).long()
    loss = F.cross_entropy(output.logits.flatten(0, 1), target.flatten())
    assert loss.item() == pytest.approx(float(data[""]["cross_entropy"]), rel=1e-6)
    assert output.commit_loss.item() == pytest.approx(float(data[""]["commit_loss"]), rel=1e-6)

    (loss + 1e-4 * output.commit_loss).backward()
    names = official_names(config)
    for ours, parameter in model.named_parameters():
        want = torch.from_numpy(names[ours].read(data["grad"]).copy()).view_as(parameter)
        assert relative_rms(parameter.grad, want) < 1e-4, ours

    model.update_codebooks([_scaled(usage) for usage in output.code_usage])
    buffers = {name: b for name, b in model.named_buffers() if not name.endswith("started")}
    assert len(buffers) == len(data["codebook_after"]) * config.n_layer
    for ours, buffer in buffers.items():
        want = torch.from_numpy(names[ours].read(data["codebook_after"]).copy())
        assert_close(ours, buffer, want.view_as(buffer))


def _scaled(usage):
    return type(usage)(N_BLOCKS * usage.sum, N_BLOCKS * usage.count, usage.error, usage.energy)


@pytest.mark.parametrize("head_type", ["shga", "mqa", "mha"])
def test_official_reductions_give_the_same_logits(head_type):
    paths = [path for path in FILES if path.stem.endswith(head_type) and "vq" in path.stem]
    data = read(paths[0])
    tokens = torch.from_numpy(data[""]["input"])
    logits = [
        load_official(data["param"], config_of(path), reduction_of(path))(tokens).logits
        for path in paths
    ]
    assert len(logits) == 3
    for other in logits[1:]:
        assert_close("logits", other, logits[0], tolerance=1e-6)


def test_loaded_codebooks_are_not_reinitialized_from_keys():
    path = next(path for path in FILES if path.stem == "vq_serial_mqa")
    config = dataclasses.replace(config_of(path), codebook_init="keys")
    model = load_official(read(path)["param"], config)
    before = model.branches[0].quantizer.codebook.clone()
    model.update_codebooks(model(torch.zeros(1, 4, dtype=torch.int64)).code_usage)
    assert_close("codebook", model.branches[0].quantizer.codebook, before, tolerance=0.1)


def test_mismatched_parameters_are_rejected_by_name():
    path = next(path for path in FILES if path.stem == "vq_serial_mqa")
    params, config = read(path)["param"], config_of(path)
    without = {name: a for name, a in params.items() if name != "token_embed/embedding"}
    with pytest.raises(ValueError, match=r"missing \['token_embed/embedding'\]"):
        load_official(without, config)
    with pytest.raises(ValueError, match=r"unexpected \['stack/extra'\]"):
        load_official(params | {"stack/extra": np.zeros(1)}, config)
    with pytest.raises(ValueError, match="vocab_size"):
        load_official(params | {"token_embed/embedding": np.zeros((31, 16))}, config)
    name = "stack/VQAttention_0/res_proj/kernel"
    halved = params[name].reshape(2, 1, 8, 32)  # same number of elements, different shape
    with pytest.raises(ValueError, match=r"res_proj/kernel has shape \(32, 8\)"):
        load_official(params | {name: halved}, config)
    with pytest.raises(ValueError, match="n_layer"):
        load_official({name: a[:1] if "stack" in name else a for name, a in params.items()}, config)
