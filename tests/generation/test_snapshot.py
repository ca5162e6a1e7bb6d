"""Snapshots continue bitwise, and only with the model that wrote them."""

import math

import pytest
import torch
from helpers import tiny_config

from transformer_vq import TransformerVQ
from transformer_vq.files import read_tensors, write_tensors
from transformer_vq.generation.decode import stream
from transformer_vq.generation.prefill import prefill
from transformer_vq.generation.snapshot import SnapshotError, load_context, save_context

PROMPT = list(range(17)) * 3


def make(**overrides):
    torch.manual_seed(4)
    return TransformerVQ(tiny_config(n_layer=1, **overrides)).eval()


def saved(tmp_path, model):
    """Save a context; return its path, tensors and metadata."""
    path = tmp_path / "state"
    save_context(path, model, prefill(model, [PROMPT]))
    return path, *read_tensors(path)


@pytest.mark.parametrize("attention", ["vq", "full"])
@pytest.mark.parametrize("compressive_cache", [True, False])
def test_a_snapshot_continues_bitwise(tmp_path, attention, compressive_cache):
    kind = {"attention": attention, "compressive_cache": compressive_cache}
    model = make(**kind)
    context = prefill(model, [PROMPT, PROMPT[:9]])
    want = list(stream(model, context, 20, seed=1))
    save_context(tmp_path / "state", model, context)
    again = load_context(tmp_path / "state", make(**kind))
    assert torch.equal(again.logits, context.logits)
    assert list(stream(model, again, 20, seed=1)) == want
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_snapshot_of_another_model_is_rejected_with_the_reason(tmp_path):
    model = make()
    save_context(tmp_path / "state", model, prefill(model, [PROMPT]))
    with pytest.raises(SnapshotError, match="config differ"):
        load_context(tmp_path / "state", make(n_code=8))
    other = make()
    with torch.no_grad():
        other.embed.weight[0, 0] += 1
    with pytest.raises(SnapshotError, match="weights differ"):
        load_context(tmp_path / "state", other)
    other = make()
    other.branches[1].quantizer.c_sum[0, 0, 0] += 1
    with pytest.raises(SnapshotError, match="codebooks differ"):
        load_context(tmp_path / "state", other)


def test_files_that_are_not_snapshots_are_rejected(tmp_path):
    model = make()
    path = tmp_path / "state"
    with pytest.raises(SnapshotError, match="does not exist"):
        load_context(path, model)
    save_context(path, model, prefill(model, [PROMPT]))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(SnapshotError, match="not a readable"):
        load_context(path, model)
    model.save(path)
    with pytest.raises(SnapshotError, match="is not a snapshot"):
        load_context(path, model)


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_tensors_that_do_not_belong_to_a_state_are_rejected(tmp_path, attention):
    """Files with a valid checksum, as another program could write them."""
    model = make(attention=attention)
    path, tensors, metadata = saved(tmp_path, model)
    for name, x in tensors.items():
        missing = {other: y for other, y in tensors.items() if other != name}
        changes = [missing, tensors | {name: x[..., None]}, tensors | {f"{name}/more": x}]
        changes.append(tensors | {f"{name}/document": torch.zeros(1, dtype=torch.int64)})
        changes.append(missing | {name: x[:0]})
        if x.is_floating_point():
            changes += [tensors | {name: x.to(dtype)} for dtype in (torch.float64, torch.float16)]
            changes += [tensors | {name: torch.full_like(x, bad)} for bad in (math.nan, math.inf)]
            changes.append(tensors | {name: x.long()})
        else:
            changes.append(tensors | {name: x - 2**40})
            changes.append(tensors | {name: x + 2**40} if name.endswith("/z") else missing)
        for changed in changes:
            write_tensors(path, changed, metadata)
            with pytest.raises(SnapshotError, match=str(path)) as found:
                load_context(path, model)
            assert "\n" not in str(found.value)


def test_rows_of_a_header_are_not_allocated(tmp_path):
    """A small file that claims a billion rows."""
    model = make()
    path, tensors, metadata = saved(tmp_path, model)
    for n in (700, 10**9, 2**62):
        empty = {name: x.new_empty(n, 0) for name, x in tensors.items()}
        for changed in ({"logits": empty["logits"]}, empty, tensors | {"logits": empty["logits"]}):
            write_tensors(path, changed, metadata)
            with pytest.raises(SnapshotError, match="is not a snapshot"):
                load_context(path, model)


def test_keys_that_are_not_codewords_are_rejected(tmp_path):
    model = make()
    path, tensors, metadata = saved(tmp_path, model)
    name = "state/layers/0/k"
    write_tensors(path, tensors | {name: tensors[name] + 1}, metadata)
    with pytest.raises(SnapshotError, match="codewords"):
        load_context(path, model)


def test_snapshot_in_bf16_is_loaded_again(tmp_path):
    model = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = prefill(model, [PROMPT])
    assert context.state.layers[0].v.dtype == torch.bfloat16
    save_context(tmp_path / "state", model, context)
    again = load_context(tmp_path / "state", model)
    for name, x in context.state.to_tensors().items():
        assert torch.equal(again.state.to_tensors()[name], x), name
