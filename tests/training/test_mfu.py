"""Model FLOP utilization and peak memory in the rows and the progress line of a run."""

from dataclasses import replace

import pytest
import torch
from helpers import tiny_run

from transformer_vq.memory_use import peak_bytes
from transformer_vq.parallel.world import World
from transformer_vq.progress import Task
from transformer_vq.training.metrics import read_metrics
from transformer_vq.training.mfu import PEAKS, Utilization, peak_rate
from transformer_vq.training.run import train
from transformer_vq.training.sizes import flops_per_token


@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA B200", 2250e12, 75e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA A10", 125e12, 31.2e12),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        ("AMD Instinct MI300X", 1307e12, 163e12),
        ("Tesla V100-SXM2-16GB", None, 15.7e12),
        ("Tesla T4", None, 8.1e12),
        ("NVIDIA A10G", None, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None, None),
        ("NVIDIA L40", None, None),
    ],
)
def test_peak_rates_are_found_by_the_complete_name(name, bf16, fp32):
    assert peak_rate(name, "bf16") == bf16
    assert peak_rate(name, "fp32") == fp32


def test_tf32_raises_the_peak_rate_of_fp32_only():
    name = "NVIDIA A100-SXM4-80GB"
    assert peak_rate(name, "fp32", tf32=True) == 156e12
    assert peak_rate(name, "bf16", tf32=True) == 312e12
    assert peak_rate("Tesla T4", "fp32", tf32=True) == 8.1e12
    for peak in PEAKS.values():
        rates = [rate for rate in peak if rate is not None]
        assert rates == sorted(rates, reverse=True)


def test_a_gpu_of_the_table_gives_an_mfu(tmp_path, monkeypatch):
    config = tiny_run(tmp_path, train={"precision": "bf16"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    world = World()
    assert Utilization(config, world).mfu(1.0) is None
    world.device = torch.device("cuda")
    flops = 3 * flops_per_token(config.model, config.train.seq_len)
    assert Utilization(config, world).mfu(1e6) == pytest.approx(1e6 * flops / 312e12)
    world.mesh = replace(world.mesh, dp=4)  # all devices count
    assert Utilization(config, world).mfu(4e6) == pytest.approx(1e6 * flops / 312e12)


def test_rows_have_peak_memory_and_mfu_where_the_peak_rate_is_known(tmp_path, monkeypatch):
    notes = []
    line = Task.line
    monkeypatch.setattr(Task, "line", lambda *args: notes.append(args[2]) or line(*args))
    monkeypatch.setattr("transformer_vq.progress.SECONDS_BETWEEN_LINES", 0.0)
    train(tiny_run(tmp_path, train={"steps": 3}), tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    for row in rows:
        assert 1e7 < row["peak_memory_bytes"] <= peak_bytes(torch.device("cpu"))
        assert row["mfu"] is None
    note = notes[-1]
    assert not note.endswith(" MFU")
    task = Task("enwik8-190m", 125_000, "steps", 0, 0.0)
    assert len(task.line(120_000, note, 9e5, 80)) <= 80
