"""Parity with recorded outputs of the official JAX code (tests/data/golden/README.md)."""

import dataclasses
import re
from collections import defaultdict
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
SEQUENCE_LEN, N_BLOCKS = 48, 6  # the official update multiplies batch statistics by N_BLOCKS


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
    kinds: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    with np.load(path) as file:
        for name, array in file.items():
            kind, _, rest = name.partition("/")
            kinds[kind if rest else ""][rest or kind] = array
    return kinds


def golden(name: str) -> tuple[dict[str, dict[str, np.ndarray]], ModelConfig]:
    path = next(path for path in FILES if path.stem == name)
    return read(path), config_of(path)


def test_all_golden_files_exist():
    assert len(FILES) == 13


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_parity_with_the_official_code(path):
    config, data = config_of(path), read(path)
    model = load_official(data["param"], config, reduction_of(path), sequence_len=SEQUENCE_LEN)
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

    model.update_codebooks(output.code_usage)
    buffers = {name: b for name, b in model.named_buffers() if not name.endswith("started")}
    assert len(buffers) == len(data["codebook_after"]) * config.n_layer
    for ours, buffer in buffers.items():
        want = torch.from_numpy(names[ours].read(data["codebook_after"]).copy()) / N_BLOCKS
        assert_close(ours, buffer, want.view_as(buffer), tolerance=1e-6)


@pytest.mark.parametrize(
    "path", [path for path in FILES if "vq" in path.stem], ids=lambda p: p.stem
)
def test_training_continues_with_the_codewords_of_the_official_code(path):
    config, data = config_of(path), read(path)
    tokens = torch.from_numpy(data[""]["input"])
    names = official_names(config)

    def errors(sequence_len):
        model = load_official(data["param"], config, sequence_len=sequence_len)
        model.update_codebooks(model(tokens).code_usage)
        for ours, buffer in model.named_buffers():
            if ours.endswith("c_sum"):
                quantizer = model.get_submodule(ours.removesuffix(".c_sum"))
                count = ours.replace("c_sum", "c_count")
                want_sum, want_count = (
                    names[x].read(data["codebook_after"]) for x in (ours, count)
                )
                want = torch.from_numpy(want_sum / np.maximum(want_count, 0.01)[..., None])
                yield relative_rms(quantizer.codebook, want.view_as(buffer))

    assert max(errors(SEQUENCE_LEN)) < 1e-6
    assert min(errors(None)) > 0.1  # with the official scale, old statistics have too much weight


def test_loaded_codebooks_are_not_reinitialized_from_keys():
    data, config = golden("vq_serial_mqa")
    model = load_official(data["param"], dataclasses.replace(config, codebook_init="keys"))
    before = model.branches[0].quantizer.codebook.clone()
    model.update_codebooks(model(torch.zeros(1, 4, dtype=torch.int64)).code_usage)
    assert_close("codebook", model.branches[0].quantizer.codebook, before, tolerance=0.1)


def test_mismatched_parameters_are_rejected_by_name():
    """Missing and unexpected names: `test_weights_of_other_branches_are_rejected_by_name`."""
    data, config = golden("vq_serial_mqa")
    params, name = data["param"], "stack/VQAttention_0/res_proj/kernel"
    halved = params[name].reshape(2, 1, 8, 32)  # same number of elements, different shape
    for changes, message in (
        ({"token_embed/embedding": np.zeros((31, 16))}, "vocab_size"),
        ({name: halved}, r"res_proj/kernel has shape \(32, 8\)"),
        ({name: a[:1] for name, a in params.items() if "stack" in name}, "n_layer"),
    ):
        with pytest.raises(ValueError, match=message):
            load_official(params | changes, config)


COUNTS = "stack/VQAttention_0/quantizer/c_count"


def with_counts(params: dict[str, np.ndarray], counts: list[float]) -> dict[str, np.ndarray]:
    """Return the parameters with other counts of the first codes of all codebooks."""
    changed = {name: array.copy() for name, array in params.items()}
    for name, array in changed.items():
        if name.endswith("c_count"):
            array[..., : len(counts)] = counts
    return changed


@pytest.mark.parametrize("name", ["vq_serial_shga", "vq_serial_mha"])
def test_rescaling_keeps_codewords_and_logits_even_of_unused_codes(name):
    data, config = golden(name)
    # Below, at and above the minimum of 0.01, before and after the division by 6.
    params = with_counts(data["param"], [0.0, 1e-6, 0.005, 0.01, 0.02, 0.059, 0.06, 0.3])
    tokens = torch.from_numpy(data[""]["input"])
    kept = load_official(params, config)
    rescaled = load_official(params, config, sequence_len=SEQUENCE_LEN)
    for before, after in zip(kept.branches, rescaled.branches, strict=True):
        if hasattr(before, "quantizer"):
            want, got = before.quantizer.codebook, after.quantizer.codebook
            torch.testing.assert_close(got, want, rtol=2e-7, atol=0)
            counts = after.quantizer.c_count[0, :8]
            expected = torch.tensor([0.0, 1e-6, 0.005, 0.01, 0.01, 0.01, 0.01, 0.05])
            torch.testing.assert_close(counts, expected, rtol=1e-6, atol=0)
    assert_close("logits", rescaled(tokens).logits, kept(tokens).logits, tolerance=1e-6)


def test_statistics_keep_their_scale_if_the_sequence_length_is_unknown():
    data, config = golden("vq_serial_mqa")
    model = load_official(data["param"], config)
    assert np.array_equal(model.branches[0].quantizer.c_count, data["param"][COUNTS][0, 0])


@pytest.mark.parametrize("sequence_len", [0, -48, 16, 47])
def test_impossible_sequence_lengths_are_rejected(sequence_len):
    data, config = golden("vq_serial_mqa")
    with pytest.raises(ValueError, match=r"at least 3 blocks of block_len=8 tokens") as error:
        load_official(data["param"], config, sequence_len=sequence_len)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "kind"), [("vq_serial_shga", "VQ"), ("full_mqa", "Full")])
def test_weights_of_the_old_attention_load_without_rescaling(name, kind):
    data, config = golden(name)
    new = re.compile(rf"stack/{kind}Attention_(\d)/")
    inside = rf"stack/ScannedAttnOld_\1/Scan{kind}AttentionOld_0/"
    old = {new.sub(inside, key): array for key, array in data["param"].items()}
    assert any("ScannedAttnOld_0/Scan" in key for key in old)
    want, got = (load_official(params, config) for params in (data["param"], old))
    rescaled = load_official(old, config, sequence_len=SEQUENCE_LEN)
    for key, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[key], tensor), key
        assert torch.equal(rescaled.state_dict()[key], tensor), key
