"""Train with Ray Train: `TorchTrainer` starts the workers, and `train` runs unchanged in each.

A worker finds the process group of Ray and uses it. If workers fail, Ray starts all of them again,
and they resume the run from its last checkpoint. CONFIG and RUN must be on a file system that all
nodes share. Signals do not reach the training function: a stopped job loses the steps since its
last checkpoint.

Run:     tvq config tiny > my.toml
         python examples/launchers/ray_train.py my.toml RUN [--workers 2] [--gpu]
Prints:  the last step and the bits per byte of the best model
"""

import argparse
import os
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_worker(settings):
    """Run in every worker: start the run, or resume it after a failure."""
    from transformer_vq import resume, train
    from transformer_vq.config_files import read_config_file

    os.chdir(settings["folder"])  # Ray starts workers in a folder of its own
    run = Path(settings["run"])
    if (run / "config.json").exists():
        result = resume(run)
    else:
        result = train(read_config_file(Path(settings["config"])).apply(), run)
    return {"step": result.step, "bits_per_byte": result.best_bits_per_byte}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one GPU per worker")
    options = parser.parse_args()
    settings = {"folder": os.getcwd(), "config": str(options.config), "run": str(options.run)}
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if options.gpu else "gloo"),
        run_config=RunConfig(
            storage_path=f"{options.run.absolute()}-ray",
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit().return_value
    print(f"step {result['step']}: {result['bits_per_byte']:.4f} bits per byte")


if __name__ == "__main__":
    main()
