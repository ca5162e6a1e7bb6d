"""The Triton kernels, in the interpreter, and the errors where they cannot run.

TRITON_INTERPRET is read when a kernel is defined, so the modules `interpreted_*.py` run in
subprocesses.
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
MODULES = sorted(path.name for path in FOLDER.glob("interpreted_*.py"))


# Whole models are put together from kernels that the other modules test.
SLOW_MODULES = {"interpreted_model.py"}


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_MODULES)) for name in MODULES],
)
def test_kernels_equal_their_references_in_the_interpreter(module):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pytest_options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *pytest_options, str(FOLDER / module)],
        cwd=FOLDER.parent.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_cpu_without_the_interpreter_is_rejected():
    inputs = attention_inputs(5, dtype=torch.float32)
    with pytest.raises(UserError, match=r"needs a GPU.*cpu"):
        vq_attention(*inputs.part(0, 5), inputs.empty_state(), reduction="triton")
    model = tiny_model(reduction="triton")
    with pytest.raises(UserError, match=r"needs a GPU.*cpu"):
        model(torch.zeros(1, 5, dtype=torch.int64))


def test_a_missing_package_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingExtraError, match=r"extra 'triton'.*pip install triton"):
        tiny_model(reduction="triton")
    inputs = attention_inputs(5, dtype=torch.float32)
    with pytest.raises(MissingExtraError, match=r"extra 'triton'"):
        vq_attention(*inputs.part(0, 5), inputs.empty_state(), reduction="triton")


def test_other_reductions_do_not_import_triton():
    program = (
        "import sys, torch; from helpers import tiny_model;"
        "tiny_model()(torch.zeros(1, 9, dtype=torch.int64)).logits.sum().backward();"
        "assert 'transformer_vq.ops.triton.launch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
