"""Which layouts are possible, and what a user is told about the others; no processes needed."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from checks import run_config

from transformer_vq import PRESETS
from transformer_vq.cli.main import main
from transformer_vq.config import ParallelConfig, RunConfig
from transformer_vq.parallel.strategy import check_mesh
from transformer_vq.training.sizes import sizes


def test_data_parallel_takes_what_is_left():
    assert ParallelConfig().fill(8) == ParallelConfig(dp=8)
    assert ParallelConfig(fsdp=2, cp=2).fill(8) == ParallelConfig(dp=2, fsdp=2, cp=2)
    assert ParallelConfig().fill(1).n_processes == 1


@pytest.mark.parametrize(
    ("layout", "n"), [(ParallelConfig(tp=2), 1), (ParallelConfig(cp=3), 8), (ParallelConfig(3), 2)]
)
def test_the_product_must_be_the_number_of_processes(layout, n):
    with pytest.raises(ValueError, match=rf"but {n} are running; start with `torchrun"):
        layout.fill(n)


@pytest.mark.parametrize("axis", ["dp", "fsdp", "cp", "tp"])
def test_a_layout_has_whole_numbers(axis):
    with pytest.raises(ValueError, match=rf"parallel\.{axis}=-1: must be a whole number"):
        ParallelConfig(**{axis: -1})


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (run_config(), ParallelConfig(dp=3), "use a multiple of 3"),
        (run_config(accumulate=2), ParallelConfig(fsdp=4), "use a multiple of 8"),
        (run_config(), ParallelConfig(cp=3), "use a multiple of 12 (cp x model.block_len)"),
        (run_config({"attention": "full"}), ParallelConfig(cp=2), "attention=vq"),
        (run_config(), ParallelConfig(tp=3), "32 value columns of this model"),
        (run_config({"head_type": "mha"}), ParallelConfig(tp=4), "2 heads of this model"),
        (run_config(), ParallelConfig(fsdp=2, tp=2), "do not go together"),
        (run_config(compile=True), ParallelConfig(fsdp=2), "train.compile"),
    ],
)
def test_what_cannot_be_divided_is_told(config, layout, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_mesh(config, replace(layout, dp=max(layout.dp, 1)))


def test_without_torchrun_a_layout_of_several_is_one_line_and_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "tiny", "--parallel.fsdp", "2", "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_configs_of_before_layouts_can_still_be_read():
    values = PRESETS["tiny"].to_dict()
    del values["parallel"]
    assert RunConfig.from_dict(values) == PRESETS["tiny"]


def test_memory_per_device_of_the_large_preset():
    preset = PRESETS["pg19-1.3b"]
    parts = replace(preset, train=replace(preset.train, accumulate=8))
    separate, shared = sizes(parts), sizes(replace(parts, parallel=ParallelConfig(fsdp=8)))
    assert shared.parameters == separate.parameters
    # An eighth of everything, and what is gathered: embeddings and two branches.
    gathered = 32_000 * 2048 + 2 * (2048 * (3 * 128 + 3 * 4096) + 2 * 128)
    codebooks = separate.codebooks * 4
    assert shared.weight_bytes - codebooks == pytest.approx(
        (separate.weight_bytes - codebooks) / 8 + 4 * gathered, rel=1e-6
    )
    assert shared.activation_bytes == pytest.approx(separate.activation_bytes / 8, rel=0.01)
    narrow = sizes(replace(parts, parallel=ParallelConfig(tp=8)))
    assert separate.weight_bytes / 8 < narrow.weight_bytes < separate.weight_bytes / 5


def test_a_process_that_is_alone_never_touches_torch_distributed():
    program = (
        "import sys, torch, transformer_vq.cli.main\n"
        "from transformer_vq import TransformerVQ, PRESETS\n"
        "from transformer_vq.training.step import Trainer\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
        "assert 'torch.distributed.fsdp' not in sys.modules\n"
        "preset = PRESETS['tiny']\n"
        "Trainer(TransformerVQ(preset.model), preset, torch.device('cpu'))\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
