"""Ahead-of-time compilation of the Triton kernels: registers, shared memory and spills.

Training steps and decoded tokens at the paper's sizes run on the device "meta", where launches are
recorded instead of run. Each one is compiled for GPUs that need not be present. Nothing is timed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from common import Output, Record, main
from transformer_vq.errors import UserError
from transformer_vq.ops import triton as kernels
from transformer_vq.ops.blockwise import vq_attention
from transformer_vq.ops.decode import DecodeState, Step, Token

KernelTarget = Literal["sm_80", "sm_90", "gfx942"]

KernelDtype = Literal["bf16", "fp32"]

TARGETS: tuple[KernelTarget, ...] = ("sm_80", "sm_90", "gfx942")

KERNEL_DTYPES: tuple[KernelDtype, ...] = ("bf16", "fp32")


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Layer:
    """The attention of one layer: query heads per key head, widths, codes and block length."""

    h: int
    g: int
    d_v: int
    d_k: int = 128
    n_code: int = 512
    block_len: int = 512


# The paper's 190M model has d_model = 768, so 6 heads of width 128; its 1.3B model has 2048.
LAYERS = {
    "190m shga": Layer(1, 1, 1536),
    "1.3b shga": Layer(1, 1, 4096),
    "190m mqa": Layer(1, 6, 128),
    "190m mha": Layer(6, 1, 128),
}


def run(targets: Sequence[KernelTarget], dtypes: Sequence[KernelDtype]) -> Record:
    """Compile every kernel for every target; raise MissingExtraError without Triton."""
    kernels.check_package()

    import triton

    from transformer_vq.ops.triton.launch import is_interpreted

    if is_interpreted():
        raise UserError("kernels are not compiled in the interpreter; unset TRITON_INTERPRET")
    found: dict[str, tuple[Any, list[str]]] = {}
    for dtype in dtypes:
        for name, layer in LAYERS.items():
            for call in _launches(layer, DTYPES[dtype]):
                key = repr((call.kernel.__name__, _signature(call), dict(call.constants)))
                where = found.setdefault(key, (call, []))[1]
                if f"{name} {dtype}" not in where:
                    where.append(f"{name} {dtype}")
    rows = [_row(call, layers, target) for target in targets for call, layers in found.values()]
    return {"triton": triton.__version__, "kernels": rows}


def table(record: Record) -> str:
    """Return a Markdown table with a row per kernel and target."""
    lines = [
        "| target | kernel | layers | tile | warps | registers | shared memory | spills |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in record["kernels"]:
        tile = " x ".join(str(row["constants"][x]) for x in TILE_NAMES if x in row["constants"])
        numbers = [row["warps"], row["registers"], row["shared_bytes"], row["spilled_bytes"]]
        cells = [row["target"], row["kernel"], ", ".join(row["layers"]), tile, *map(str, numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


TILE_NAMES = ("ROWS", "COLUMNS", "VALUES", "V")


def _launches(layer: Layer, dtype: torch.dtype) -> list[Any]:
    """Return the launches of a training step on two sequences of four blocks, and of one token."""
    from transformer_vq.ops.triton import launch
    from transformer_vq.ops.triton.blocks import nearest_code
    from transformer_vq.ops.triton.decode import attend_one_

    b, h, g, d_k, d_v = 2, layer.h, layer.g, layer.d_k, layer.d_v
    n_code, window_len, seq_len = layer.n_code, layer.block_len, 4 * layer.block_len

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

    def whole(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int64, device="meta")

    codebook = normal(h, n_code, d_k, dtype=torch.float32).detach()
    calls: list[Any] = []
    with patch.object(launch, "run", calls.append):
        nearest_code(normal(b, h, seq_len, d_k).detach(), codebook)
        output, state = vq_attention(
            normal(b, h, g, seq_len, d_k),
            normal(b, h, seq_len, d_k),
            whole(b, h, seq_len),
            normal(b, h, seq_len, d_v),
            codebook,
            normal(b, h, g, seq_len, window_len + 1),
            backend="triton",
        )
        assert state.cache is not None
        (output.sum() + state.cache.mean.sum()).backward()
        with torch.no_grad():
            exact = torch.float32
            token = Token(
                code_scores=normal(b, h, g, n_code, dtype=exact),
                position_scores=normal(b, h, g, window_len + 1, dtype=exact),
                z=whole(b, h),
                v=normal(b, h, d_v),
                q=normal(b, h, g, d_k, dtype=exact),
                k_hat=normal(b, h, d_k, dtype=exact),
            )
            decoding = DecodeState.of([state.detach()], [codebook])
            for variant in (decoding, replace(decoding, k=None)):
                attend_one_(token, 0, Step.start_(variant))
    return calls


def _signature(call: Any) -> dict[str, str]:
    """Return the types of the arguments, as Triton specializes them when it launches a kernel."""
    types = dict.fromkeys(call.constants, "constexpr")
    for name, x in call.arguments.items():
        if isinstance(x, Tensor):
            types[name] = POINTERS[x.dtype]
        else:
            types[name] = "constexpr" if x == 1 else "i32"
    return {name: types[name] for name in call.kernel.arg_names}


def _compile(call: Any, target: KernelTarget) -> Any:
    """Compile one launch. Pointers are aligned to 16 bytes, as those of PyTorch are."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, names = _signature(call), call.kernel.arg_names
    # Triton compiles an integer argument of one as a constant.
    ones = {name: 1 for name, x in call.arguments.items() if not isinstance(x, Tensor) and x == 1}
    constants = {**call.constants, **ones}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
        or (signature[name] == "i32" and call.arguments[name] % 16 == 0)
    }
    source = ASTSource(
        fn=call.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    if target.startswith("sm_"):
        gpu = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    else:
        gpu = GPUTarget("hip", target, 64)
    return triton.compile(source, target=gpu, options=dict(call.options))


def _row(call: Any, layers: list[str], target: KernelTarget) -> Record:
    compiled = _compile(call, target)
    if target.startswith("sm_"):
        (registers, spilled), scalars = _nvidia_resources(compiled.asm["ptx"]), 0
    else:
        registers, spilled, scalars = _amd_resources(compiled.asm["amdgcn"])
    return {
        "kernel": call.kernel.__name__,
        "target": target,
        "layers": layers,
        "constants": dict(call.constants),
        "warps": call.options["num_warps"],
        "stages": call.options["num_stages"],
        "registers": registers,
        "shared_bytes": compiled.metadata.shared,
        "spilled_bytes": spilled,
        "spilled_scalars": scalars,
    }


def _nvidia_resources(ptx: str) -> tuple[int, int]:
    """Return registers per thread and spilled bytes, as reported by the assembler."""
    import triton

    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    architecture = re.search(r"\.target (\w+)", ptx)
    assert architecture is not None
    with TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        done = subprocess.run(
            [assembler, "-v", f"--gpu-name={architecture[1]}", source, "-o", f"{source}.cubin"],
            capture_output=True,
            text=True,
            check=True,
        )
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert spills is not None
    assert registers is not None
    return int(registers[1]), int(spills[1]) + int(spills[2])


def _amd_resources(assembly: str) -> tuple[int, int, int]:
    """Return vector registers per thread, spilled bytes, and spilled scalar registers.

    Scalar registers spill to lanes of vector registers, not to memory.
    """

    def read(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        assert found is not None
        return int(found[1])

    spilled = max(4 * read("vgpr_spill_count"), read("private_segment_fixed_size"))
    return read("vgpr_count"), spilled, read("sgpr_spill_count")


@dataclass(frozen=True, kw_only=True)
class Options(Output):
    """Compile the Triton kernels at the paper's sizes: registers, shared memory and spills.

    Needs the extra `triton` but no GPU. Nothing is run or timed.
    """

    targets: tuple[KernelTarget, ...] = TARGETS
    """Architectures: sm_80 (A100), sm_90 (H100), gfx942 (MI300)."""
    dtypes: tuple[KernelDtype, ...] = KERNEL_DTYPES
    """Types of queries, keys and values."""


if __name__ == "__main__":
    main(Options, lambda options: run(options.targets, options.dtypes), table)
