"""`tvq bench kernels`: ahead-of-time compilation of the Triton kernels."""

import json
from pathlib import Path

import pytest

from transformer_vq.bench import kernels
from transformer_vq.bench.kernel_records import KERNEL_DTYPES, TARGETS
from transformer_vq.cli.main import main

RECORD = Path(__file__).parents[2] / "benchmarks" / "triton-kernels.json"
NAMES = {
    *("nearest_code", "cache_prefix", "cache_suffix", "evicted_gradient", "block_weights"),
    *("block_lse", "softmax_backward", "flash_blocks", "decode_token"),
}


def test_a_training_step_and_a_token_launch_every_kernel():
    found = {
        call.kernel.__name__
        for layer in kernels.LAYERS.values()
        for call in kernels._launches(layer, kernels.DTYPES["bf16"])
    }
    assert found == NAMES


def test_values_wider_than_keys_do_not_take_the_single_kernel():
    wide = kernels._launches(kernels.LAYERS["190m shga"], kernels.DTYPES["bf16"])
    assert "flash_blocks" not in {call.kernel.__name__ for call in wide}


def test_the_record_has_every_kernel_without_spills():
    rows = json.loads(RECORD.read_text())["kernels"]
    assert {row["kernel"] for row in rows} == NAMES
    assert {row["target"] for row in rows} == set(TARGETS)
    assert all(row["spilled_bytes"] == 0 for row in rows)


def test_kernels_rejects_unknown_targets(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "kernels", "--targets", "sm_1"])
    assert stopped.value.code == 2
    assert "--targets" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_without_spills(target, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    record = kernels.run([target], KERNEL_DTYPES)
    assert {row["kernel"] for row in record["kernels"]} == NAMES
    spilled = [row for row in record["kernels"] if row["spilled_bytes"] > 0]
    assert not spilled, kernels.table({**record, "kernels": spilled})
