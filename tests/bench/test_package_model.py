"""Runs become models of the package."""

from dataclasses import replace

import torch
from helpers import relative_rms, tiny_run

from package_model import package_run
from transformer_vq import train
from transformer_vq.training.checkpoint import load_model, read_config
from transformer_vq.training.metrics import read_metrics


def test_packaging_keeps_the_model_up_to_bf16_and_drops_paths(tmp_path):
    config = tiny_run(tmp_path, train={"steps": 5})
    run = tmp_path / "run"
    train(config, run)
    package_run(run, tmp_path / "packaged")
    (model, which), (want, _) = load_model(tmp_path / "packaged"), load_model(run)
    assert which == "best"
    tokens = torch.arange(20).unsqueeze(0)
    assert 0 < relative_rms(model.eval()(tokens).logits, want.eval()(tokens).logits) < 0.05
    stored = read_config(tmp_path / "packaged")
    assert stored.data.path == ()
    assert replace(stored, data=config.data) == config
    assert read_metrics(tmp_path / "packaged")[-1] == read_metrics(run)[-1]
    files = {path.name for path in (tmp_path / "packaged").rglob("*") if path.is_file()}
    assert files == {"config.json", "manifest.json", "metrics.jsonl", "model.safetensors"}
