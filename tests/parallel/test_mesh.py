"""Valid and invalid process meshes; these tests start no other processes."""

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
from transformer_vq.sizes import sizes


def test_dp_defaults_to_all_remaining_processes():
    assert ParallelConfig().fill(8) == ParallelConfig(dp=8)
    assert ParallelConfig(fsdp=2, cp=2).fill(8) == ParallelConfig(dp=2, fsdp=2, cp=2)
    assert ParallelConfig().fill(1).n_processes == 1


@pytest.mark.parametrize(
    ("mesh", "n"), [(ParallelConfig(tp=2), 1), (ParallelConfig(cp=3), 8), (ParallelConfig(3), 2)]
)
def test_mesh_rejects_a_different_number_of_processes(mesh, n):
    with pytest.raises(ValueError, match=rf"but {n} are running; start with `torchrun"):
        mesh.fill(n)


@pytest.mark.parametrize("axis", ["dp", "fsdp", "cp", "tp"])
def test_mesh_rejects_a_negative_size(axis):
    with pytest.raises(ValueError, match=rf"parallel\.{axis}=-1: must be an integer"):
        ParallelConfig(**{axis: -1})


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (run_config(), ParallelConfig(dp=3), "use a multiple of 3"),
        (run_config(accumulate=2), ParallelConfig(fsdp=4), "use a multiple of 8"),
        (run_config(), ParallelConfig(cp=3), "use a multiple of 12 (cp x model.block_len)"),
        (run_config({"attention": "full"}), ParallelConfig(cp=2), "attention=vq"),
        (run_config(), ParallelConfig(tp=3), "32 value columns of this model"),
        (run_config({"head_type": "mha"}), ParallelConfig(tp=4), "2 heads of this model"),
    ],
)
def test_check_mesh_rejects_what_cannot_be_split(config, mesh, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_mesh(config, replace(mesh, dp=max(mesh.dp, 1)))


def test_mesh_without_torchrun_exits_with_status_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "tiny", "--parallel.fsdp", "2", "--out", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_config_without_a_mesh_can_be_read():
    values = PRESETS["tiny"].to_dict()
    del values["parallel"]
    assert RunConfig.from_dict(values) == PRESETS["tiny"]


def test_sharding_divides_the_memory_of_the_large_preset():
    preset = PRESETS["pg19-1.3b"]
    config = replace(preset, train=replace(preset.train, accumulate=8))
    single, sharded = sizes(config), sizes(replace(config, parallel=ParallelConfig(fsdp=8)))
    gathered = 32_000 * 2048 + 2 * (2048 * (3 * 128 + 3 * 4096) + 2 * 128)
    assert sharded.gathered_bytes == pytest.approx(4 * gathered, rel=1e-6)
    assert sharded.gradient_bytes == single.gradient_bytes  # until the last micro-batch
    assert sharded.carried_bytes == single.carried_bytes / 8
    assert sharded.activation_bytes == pytest.approx(single.activation_bytes / 8, rel=0.01)
    narrow = sizes(replace(config, parallel=ParallelConfig(tp=8)))
    assert single.weight_bytes / 8 < narrow.weight_bytes < single.weight_bytes / 5


@pytest.mark.slow
def test_single_process_never_uses_torch_distributed():
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
