"""The Triton kernels, in the interpreter, and the errors where they cannot run.

TRITON_INTERPRET is read when a kernel is defined, so `interpreted_kernels.py` runs in a subprocess.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import attention_inputs, tiny_model

from transformer_vq.errors import MissingExtraError, UserError
from transformer_vq.ops.blockwise import vq_attention

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_equal_their_references_in_the_interpreter(cases):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", cases]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER / "interpreted_kernels.py")],
        cwd=FOLDER.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_inputs_and_one_number_per_query_are_kept_for_the_backward_pass(monkeypatch):
    """No weights, and no copy of the blocks before; at the sizes of the paper, without memory."""
    pytest.importorskip("triton")
    monkeypatch.setattr("transformer_vq.ops.triton.launch.run", lambda call: None)
    b, t, d_k, d_v, n_code, n = 16, 8192, 128, 1536, 512, 512
    shapes = {"q": (b, 1, 1, t, d_k), "k": (b, 1, t, d_k), "v": (b, 1, t, d_v)}
    shapes["by_distance"] = (b, 1, 1, t, n + 1)
    options = {"device": "meta", "dtype": torch.bfloat16}
    x = {k: torch.empty(shape, **options, requires_grad=True) for k, shape in shapes.items()}
    z = torch.empty(b, 1, t, device="meta", dtype=torch.int64)
    codebook = torch.empty(1, n_code, d_k, device="meta")
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        vq_attention(x["q"], x["k"], z, x["v"], codebook, x["by_distance"], backend="triton")
    n_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    expected = sum(tensor.nbytes for tensor in x.values()) + 4 * b * t
    window_and_cache = 2 * b * n * (d_k + d_v) + 4 * b * n_code * d_v
    assert expected <= n_bytes <= expected + 1.1 * window_and_cache


def test_a_cpu_without_the_interpreter_is_rejected():
    inputs = attention_inputs(5, dtype=torch.float32)
    with pytest.raises(UserError, match=r"needs a GPU.*cpu"):
        vq_attention(*inputs.part(0, 5), inputs.empty_state(), backend="triton")
    model = tiny_model(backend="triton")
    with pytest.raises(UserError, match=r"needs a GPU.*cpu"):
        model(torch.zeros(1, 5, dtype=torch.int64))


def test_a_missing_package_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingExtraError, match=r"extra 'triton'.*pip install triton"):
        tiny_model(backend="triton")
    inputs = attention_inputs(5, dtype=torch.float32)
    with pytest.raises(MissingExtraError, match=r"extra 'triton'"):
        vq_attention(*inputs.part(0, 5), inputs.empty_state(), backend="triton")
