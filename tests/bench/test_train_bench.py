"""`tvq bench train`: its grid, record, tables and skipped cells; times are not tested."""

import json
from dataclasses import replace
from typing import get_args

import pytest
import torch

from transformer_vq.bench import defaults, rates, train
from transformer_vq.bench.cells import over_time
from transformer_vq.bench.defaults import Shape
from transformer_vq.bench.grid import grid
from transformer_vq.bench.plots import plot_path
from transformer_vq.bench.records import row_kind
from transformer_vq.bench.steps import timed_steps
from transformer_vq.cli.main import main
from transformer_vq.config import HeadType
from transformer_vq.training.step import Trainer

SHAPE = Shape(d_model=16, d_k=8, n_code=7, block_len=4, device="cpu")
SMALL = ["--d-model", "16", "--d-k", "8", "--n-code", "7", "--block-len", "4", "--device", "cpu"]
RATES = {"fp32": 2e9, "bf16": 4e9}


@pytest.mark.parametrize("name", ["full", "sdpa", "associative", "auto"])
def test_cell_times_complete_training_steps(name, monkeypatch):
    seen = []
    train_step = Trainer.step

    def recorded(self, batch, step, begins):
        before = [p.clone() for p in self.model.parameters()]
        done = train_step(self, batch, step, begins)
        moved = any((p != b).any() for p, b in zip(self.model.parameters(), before, strict=True))
        seen.append((tuple(batch.tokens.shape), step, begins, moved, len(done.code_usage)))
        return done

    monkeypatch.setattr(Trainer, "step", recorded)
    (cell,) = grid(["mha"], [name], [20], replace(SHAPE, batch_size=2))
    row = timed_steps(replace(cell, steps=2))
    assert row["seconds"] > 0
    assert row["peak_gb"] > 0
    # The learning rate of step 0 is 0: warm-up. Full attention has no codebooks.
    n_codebooks = 0 if name in ("full", "sdpa") else 1
    assert seen == [((2, 20), i, True, i > 0, n_codebooks) for i in range(3)]
    assert timed_steps(replace(cell, steps=99), time_limit=1e-9)["seconds"] > 0
    assert len(seen) == 3 + 2  # at least one step is timed


def test_grid_gives_short_sequences_more_steps():
    cells = grid(["shga", "mqa"], ["sdpa", "full", "auto"], [64, 16, 256, 16], SHAPE)
    found = {(c.head_type, c.kind, c.seq_len): c for c in cells}
    assert list(found) == [
        (head, name, n)
        for n in (16, 64, 256)
        for head, name in [
            ("shga", "full"),
            ("shga", "auto"),
            ("mqa", "full"),
            ("mqa", "auto"),
            ("mha", "sdpa"),
        ]
    ]
    assert [found["mqa", "auto", n].steps for n in (16, 64, 256)] == [16, 4, 1]
    for head in ("shga", "mqa"):
        for n in (16, 64, 256):
            full, linear = found[head, "full", n], found[head, "auto", 256]
            assert full.steps == max(1, round(linear.flops / full.flops))


def fake_in_subprocess(seconds, tried, matmul_rates=RATES):
    """Return an `in_subprocess` that measures nothing; it appends the cells to `tried`.

    seconds: by kind and length; a list has a value per round, a dict one per setting of activation
    checkpointing. None is out of memory, a string another failure.
    """

    def measure(function, *arguments, **_):
        if function is rates.matmul_rates:
            return matmul_rates
        cell = arguments[0]
        tried.append((cell.kind, cell.seq_len))
        found = seconds[tried[-1]]
        if found is KeyboardInterrupt:
            raise KeyboardInterrupt
        if isinstance(found, list):
            found = found[tried.count(tried[-1]) - 1]
        if isinstance(found, dict):
            found = found[cell.checkpoint_activations]
        if found is None:
            return {"failed": "out of memory"}
        if isinstance(found, str):
            return {"failed": found}
        return {"first": 70.0, "seconds": found, "peak_gb": 0.5}

    return measure


def test_record_is_computed_from_the_timings(monkeypatch):
    seconds = {("auto", 16): [3.0, 2.0, 4.0], ("full", 16): 3.0, ("sdpa", 16): 1.0}
    tried = []
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess(seconds, tried))
    cells = grid(["mha"], ["full", "sdpa", "auto"], [16], replace(SHAPE, batch_size=2))
    result = train.run(cells, repeats=3)
    rows = {row_kind(row): row for row in result["rows"]}
    assert tried == [("full", 16), ("auto", 16), ("sdpa", 16)] * 3
    auto = rows["auto"]
    assert auto["timings"] == [3.0, 2.0, 4.0]
    assert (auto["seconds"], auto["median_seconds"]) == (2.0, 3.0)
    assert (auto["tokens_per_second"], auto["us_per_token"]) == (16.0, 62500.0)
    assert (auto["over_full"], auto["over_sdpa"]) == (1.5, 0.5)
    assert auto["share_of_rate"]["fp32"] == 16.0 * auto["flops_per_token"] / 2e9
    assert auto["share_of_rate"]["bf16"] == 16.0 * auto["flops_per_token"] / 4e9
    assert "| mha | Transformer-VQ | 16 | 16 | 2,000 | 3,000 | 0.50 |" in train.table(result)
    assert result["machine"]["torch"] == torch.__version__
    # The time of compilation is reported too.
    tried.clear()
    compiled = train.run([replace(cell, compile=True) for cell in cells], repeats=3)
    head, _, full, *_ = train.table(compiled).splitlines()[3:]
    assert head.endswith("| speed-up over sdpa | first step, s |")
    assert full.endswith("| 1.00 | 0.33 | 70 |")


def test_failed_cell_is_reported_and_not_tried_again(monkeypatch):
    seconds = {
        ("auto", 16): 1.0,
        ("auto", 64): 4.0,
        ("auto", 256): 9.0,
        ("full", 16): 1.0,
        ("full", 64): None,
    }
    tried = []
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess(seconds, tried))
    cells = grid(["shga"], ["full", "auto"], [16, 64, 256], SHAPE)
    result = train.run(cells, repeats=2, time_limit=15.0)
    rows = {(row_kind(row), row["seq_len"]): row for row in result["rows"]}
    assert tried.count(("full", 64)) == 1
    assert ("full", 256) not in tried
    assert rows["full", 256]["failed"] == "out of memory"
    assert rows["auto", 256]["failed"] == "skipped, about 16 s per step"
    assert rows["auto", 256]["estimated_seconds"] == pytest.approx(16.0)
    assert rows["auto", 64]["over_full"] is None
    assert "| shga | full attention | 64 | out of memory |" in train.table(result)
    # A failure in a later round keeps the earlier timings.
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess({("auto", 16): [1.0, None]}, []))
    row = train.run(cells[1:2], repeats=2)["rows"][0]
    assert (row_kind(row), row["timings"]) == ("auto", [1.0])
    # With activation checkpointing a longer sequence may fit.
    tried.clear()
    monkeypatch.setattr(
        train, "in_subprocess", fake_in_subprocess(seconds | {("full", 256): 1.0}, tried)
    )
    longer = [replace(cell, checkpoint_activations=cell.seq_len == 256) for cell in cells]
    train.run(longer, repeats=1, time_limit=1e9)
    assert ("full", 256) in tried


def test_auto_checkpoints_activations_in_cells_that_are_out_of_memory(monkeypatch):
    seconds = {
        ("full", 16): 1.0,
        ("full", 64): {False: None, True: 4.0},
        ("full", 256): {True: 9.0},
        ("full", 1024): {True: None},
    }
    tried = []
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess(seconds, tried))
    cells = grid(["shga"], ["full"], [16, 64, 256, 1024], SHAPE)
    result = train.run(cells, repeats=2, checkpointing="auto")
    assert [row["checkpoint_activations"] for row in result["rows"]] == [False, True, True, True]
    assert tried == [("full", n) for n in (16, 64, 64, 256, 1024, 16, 64, 256)]
    table = train.table(result)
    assert "; *: activation checkpointing" in table
    for cells_of_row in ("| 16 | 16 ", "* | 64 | 16 ", "* | 1,024 | out of memory "):
        assert f"| full attention {cells_of_row}" in table
    # Or in all cells, or in none.
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess({("full", 16): {True: 1.0}}, []))
    assert train.run(cells[:1], checkpointing="on")["rows"][0]["checkpoint_activations"]
    monkeypatch.setattr(
        train, "in_subprocess", fake_in_subprocess({("full", 64): {False: None}}, [])
    )
    off = train.run(cells[1:2], checkpointing="off")
    assert off["rows"][0]["failed"] == "out of memory"
    assert "*" not in train.table(off)


def test_interrupted_grid_prints_the_results_so_far(tmp_path, monkeypatch, capsys):
    seconds = {("full", 16): 3.0, ("auto", 16): 2.0, ("full", 64): None}
    monkeypatch.setattr(
        train, "in_subprocess", fake_in_subprocess(seconds | {("auto", 64): KeyboardInterrupt}, [])
    )
    out = tmp_path / "train.json"
    options = ["--head-types", "shga", "--kinds", "full", "auto", "--lengths", "16", "64"]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "train", *SMALL, *options, "--out", str(out)])
    printed = capsys.readouterr()
    assert (stop.value.code, printed.err) == (130, "tvq: interrupted\n")
    rows = json.loads(out.read_text())["rows"]
    assert [(row_kind(row), row["seq_len"]) for row in rows] == [
        ("full", 16),
        ("auto", 16),
        ("full", 64),
    ]
    assert rows[1]["over_full"] == 1.5
    assert printed.out == train.table(json.loads(out.read_text())) + "\n"


def test_command_prints_a_table_and_writes_a_record(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rates, "SHAPES", ((8, 8, 8),))
    monkeypatch.setattr(rates, "PROBE", (8, 8, 8))
    monkeypatch.setattr(rates, "SECONDS", 1e-4)
    monkeypatch.setattr(
        train, "in_subprocess", lambda f, *args, memory_gb=None, seconds=None: f(*args)
    )
    out = tmp_path / "train.json"
    options = ["--kinds", "full", "sdpa", "auto", "--lengths", "10", "20", "--repeats", "1"]
    main(["bench", "train", *SMALL, *options, "--out", str(out), "--json"])
    *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(out.read_text())
    assert json.loads(last) == result
    assert "\n".join(table) == train.table(result)
    assert len(result["rows"]) == 2 * (3 * 2 + 1)
    assert all(row["seconds"] > 0 for row in result["rows"])
    assert plot_path(out) == [out.with_suffix(".png")]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    documents_options = ["--seq-len", "20", "--document-len", "7", "--time-limit", "9"]
    main(["bench", "documents", *SMALL, *documents_options])
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| none", "| one", "| of 7 tokens"]


@pytest.mark.parametrize(("available", "shown"), [({"fp32": 2e9}, "fp32 2 GFLOP/s"), ({}, "not")])
def test_missing_rate_is_an_empty_column(available, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(
        train, "in_subprocess", fake_in_subprocess({("auto", 16): 2.0}, [], available)
    )
    result = train.run(grid(["shga"], ["auto"], [16], SHAPE), repeats=1)
    (row,) = result["rows"]
    assert row["share_of_rate"].keys() == available.keys() == result["matmul_flops"].keys()
    lines = train.table(result).splitlines()
    assert f"rates: {shown}" in lines[1]
    assert len(lines[3].split("|")) == len(lines[5].split("|"))
    columns = dict(zip(lines[3].split(" | "), lines[5].split(" | "), strict=True))
    assert columns["share of bf16 rate"] == ""
    assert (columns["share of fp32 rate"] == "") == (not available)
    path = tmp_path / "train.json"
    path.write_text(json.dumps(result))
    assert plot_path(path) == [path.with_suffix(".png")]


def test_plot_supports_every_head_type(monkeypatch, tmp_path):
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess({("auto", 16): 2.0}, []))
    cells = grid(get_args(HeadType), ["auto"], [16], replace(SHAPE, n_kv_head=1))
    path = tmp_path / "train.json"
    path.write_text(json.dumps(train.run(cells, repeats=1)))
    assert plot_path(path) == [path.with_suffix(".png")]


def test_grid_is_measured_if_the_rates_exceed_their_time_limit(monkeypatch, capsys):
    failed = {"failed": over_time(120)}
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess({("auto", 16): 2.0}, [], failed))
    result = train.run(grid(["shga"], ["auto"], [16], SHAPE), repeats=1)
    assert result["matmul_flops"] == result["rows"][0]["share_of_rate"] == {}
    assert over_time(120) in capsys.readouterr().err


def test_every_subprocess_of_the_grid_has_a_time_limit(monkeypatch):
    limits = []
    measure = fake_in_subprocess({("auto", 16): 2.0}, [])

    def recorded(*arguments, seconds, **options):
        limits.append(seconds)
        return measure(*arguments, **options)

    monkeypatch.setattr(train, "in_subprocess", recorded)
    train.run(grid(["shga"], ["auto"], [16], SHAPE), repeats=2, time_limit=5.0)
    assert limits == [rates.TIME_LIMIT, train.START + 15.0, train.START + 15.0]


def test_cell_longer_than_one_above_the_time_limit_is_not_tried(monkeypatch):
    tried = []
    failed = over_time(train.START + 15.0)
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess({("full", 16): failed}, tried))
    cells = grid(["shga"], ["full"], [16, 64, 256], SHAPE)
    result = train.run(cells, repeats=2, time_limit=5.0)
    assert tried == [("full", 16)]
    assert [row["failed"] for row in result["rows"]] == [failed] * 3
    assert train.table(result).count(failed) == 3


def test_quick_measures_a_small_grid(monkeypatch, capsys):
    seconds = {(name, n): 1.0 for name in defaults.KINDS for n in defaults.LENGTHS}
    tried = []
    monkeypatch.setattr(train, "in_subprocess", fake_in_subprocess(seconds, tried))
    main(["bench", "train", *SMALL, "--quick", "--head-types", "shga"])
    assert tried == [(k, n) for n in (2048, 8192) for k in ("full", "auto", "sdpa")] * 2
    tried.clear()
    main(["bench", "train", *SMALL, "--head-types", "shga", "--repeats", "1"])
    assert len(tried) == 7 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "0"], "--lengths 0"),
        (["--kinds", "quadratic"], "quadratic"),
        (["--lengths"], "the grid is empty"),
        (["--d-model", "12"], "--d-model 12"),
        (["--n-layer", "0"], "--n-layer 0"),
        (["--repeats", "0"], "--repeats 0"),
        (["--time-limit", "0"], "--time-limit 0"),
        (["--memory-gb", "-1"], "--memory-gb -1"),
        (["--device", "tpu"], "tpu"),
        (["--out", "no/such/folder.json"], "--out no/such/folder.json"),
    ],
)
def test_user_error_is_one_line_and_measures_nothing(options, message, capsys, monkeypatch):
    monkeypatch.setattr(train, "in_subprocess", None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "train", *SMALL, *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
