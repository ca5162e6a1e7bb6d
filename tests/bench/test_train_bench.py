"""`tvq bench train`: what is measured, what follows, what is left out; no time is tested."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from helpers import assert_close, tiny_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from transformer_vq import TransformerVQ
from transformer_vq.bench import documents, rates, train
from transformer_vq.bench.cells import over_time
from transformer_vq.bench.plots import plot_path
from transformer_vq.bench.sdpa import SdpaAttention, SdpaTransformer, sdpa_flops_per_token
from transformer_vq.bench.steps import kind, timed_steps
from transformer_vq.cli.main import main
from transformer_vq.nn.layers import rms_norm
from transformer_vq.training.step import Trainer

SHAPE = {"d_model": 16, "d_k": 8, "n_code": 7, "block_len": 4, "device": "cpu"}
SMALL = ["--d-model", "16", "--d-k", "8", "--n-code", "7", "--block-len", "4", "--device", "cpu"]
RATES = {"fp32": 2e9, "bf16": 4e9}


def test_the_baseline_is_causal_softmax_attention():
    layer = SdpaAttention(16, 8).double()
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    q, k, v = layer.qkv_proj(rms_norm(x)).view(2, 11, 3, 2, 8).permute(2, 0, 3, 1, 4)
    hidden = torch.ones(11, 11, dtype=torch.bool).triu(1)
    weights = (q @ k.mT * 8**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    want = layer.o_proj((weights @ v).transpose(1, 2).reshape(2, 11, 16))
    assert_close("output", layer(x), want)


def test_the_baseline_has_the_weights_of_an_mha_model_but_for_positions():
    config = tiny_config(head_type="mha", attention="full")
    full, plain = TransformerVQ(config), SdpaTransformer(config)
    positional = sum(
        p.numel()
        for name, p in full.named_parameters()
        if name.split(".")[2:3] in (["u"], ["v"]) or "r_proj" in name
    )
    count = [sum(p.numel() for p in model.parameters()) for model in (full, plain)]
    assert count[0] - positional == count[1]


def test_flops_of_the_baseline_are_those_of_its_products():
    config = tiny_config(head_type="shga")
    model, tokens = SdpaTransformer(config), torch.zeros(3, 24, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens)
    # All 24 keys are scored, masked ones too, which is the average over a sequence of 48.
    assert counter.get_total_flops() == tokens.numel() * sdpa_flops_per_token(config, 48)


@pytest.mark.parametrize("name", ["full", "sdpa", "associative", "auto"])
def test_a_cell_is_whole_training_steps(name, monkeypatch):
    seen = []
    update = Trainer.update

    def noted(self, batch, step, begins):
        before = [p.clone() for p in self.model.parameters()]
        done = update(self, batch, step, begins)
        moved = any((p != b).any() for p, b in zip(self.model.parameters(), before, strict=True))
        seen.append((tuple(batch.tokens.shape), step, begins, moved, len(done.code_usage)))
        return done

    monkeypatch.setattr(Trainer, "update", noted)
    (cell,) = train.grid(["mha"], [name], [20], batch_size=2, **SHAPE)
    row = timed_steps(replace(cell, steps=2))
    assert row["seconds"] > 0
    assert row["peak_gb"] > 0
    # The learning rate of update 0 is 0: warm-up. Full attention has no codebooks.
    n_codebooks = 0 if name in ("full", "sdpa") else 1
    assert seen == [((2, 20), i, True, i > 0, n_codebooks) for i in range(3)]
    assert timed_steps(replace(cell, steps=99), time_limit=1e-9)["seconds"] > 0
    assert len(seen) == 3 + 2  # at least one


def test_short_sequences_are_timed_for_as_many_tokens_as_the_longest():
    cells = train.grid(["shga", "mqa"], ["sdpa", "full", "auto"], [64, 16, 256, 16], **SHAPE)
    found = {(c.head_type, kind(asdict(c)), c.seq_len): c for c in cells}
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


def pretended(seconds, tried, matmul_rates=RATES):
    """`alone` without processes: seconds by kind and length, or a list of them by round, or by
    whether it recomputes; None is out of memory, a text another failure. Notes what was tried."""

    def measure(function, *arguments, **_):
        if function is rates.matmul_rates:
            return matmul_rates
        cell = arguments[0]
        tried.append((kind(asdict(cell)), cell.seq_len))
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


def test_figures_follow_from_the_timings(monkeypatch):
    seconds = {("auto", 16): [3.0, 2.0, 4.0], ("full", 16): 3.0, ("sdpa", 16): 1.0}
    tried = []
    monkeypatch.setattr(train, "in_subprocess", pretended(seconds, tried))
    cells = train.grid(["mha"], ["full", "sdpa", "auto"], [16], batch_size=2, **SHAPE)
    result = train.run(cells, repeats=3)
    rows = {kind(row): row for row in result["rows"]}
    assert tried == [("full", 16), ("auto", 16), ("sdpa", 16)] * 3
    auto = rows["auto"]
    assert auto["timings"] == [3.0, 2.0, 4.0]
    assert (auto["seconds"], auto["median_seconds"]) == (2.0, 3.0)
    assert (auto["tokens_per_second"], auto["us_per_token"]) == (16.0, 62500.0)
    assert (auto["over_full"], auto["over_sdpa"]) == (1.5, 0.5)
    assert auto["share_of_rate"]["fp32"] == 16.0 * auto["flops_per_token"] / 2e9
    assert auto["share_of_rate"]["bf16"] == 16.0 * auto["flops_per_token"] / 4e9
    assert "| mha | auto | 16 | 16 | 2,000 | 3,000 | 0.50 |" in train.table(result)
    assert result["machine"]["torch"] == torch.__version__
    # What compiling takes is told as well.
    tried.clear()
    compiled = train.run([replace(cell, compile=True) for cell in cells], repeats=3)
    head, _, full, *_ = train.table(compiled).splitlines()[3:]
    assert head.endswith("| over sdpa | first step, s |")
    assert full.endswith("| 1.00 | 0.33 | 70 |")


def test_what_cannot_be_done_is_told_and_not_tried_again(monkeypatch):
    seconds = {
        ("auto", 16): 1.0,
        ("auto", 64): 4.0,
        ("auto", 256): 9.0,
        ("full", 16): 1.0,
        ("full", 64): None,
    }
    tried = []
    monkeypatch.setattr(train, "in_subprocess", pretended(seconds, tried))
    cells = train.grid(["shga"], ["full", "auto"], [16, 64, 256], **SHAPE)
    result = train.run(cells, repeats=2, time_limit=15.0)
    rows = {(kind(row), row["seq_len"]): row for row in result["rows"]}
    assert tried.count(("full", 64)) == 1
    assert ("full", 256) not in tried
    assert rows["full", 256]["failed"] == "out of memory"
    assert rows["auto", 256]["failed"] == "skipped, about 16 s per step"
    assert rows["auto", 256]["estimated_seconds"] == pytest.approx(16.0)
    assert rows["auto", 64]["over_full"] is None
    assert "| shga | full | 64 | out of memory |" in train.table(result)
    # A failure in a later round leaves what was measured.
    monkeypatch.setattr(train, "in_subprocess", pretended({("auto", 16): [1.0, None]}, []))
    row = train.run(cells[1:2], repeats=2)["rows"][0]
    assert (kind(row), row["timings"]) == ("auto", [1.0])
    # With recomputation a longer one may fit.
    tried.clear()
    monkeypatch.setattr(train, "in_subprocess", pretended(seconds | {("full", 256): 1.0}, tried))
    longer = [replace(cell, checkpoint_activations=cell.seq_len == 256) for cell in cells]
    train.run(longer, repeats=1, time_limit=1e9)
    assert ("full", 256) in tried


def test_activations_are_recomputed_where_memory_does_not_suffice(monkeypatch):
    seconds = {
        ("full", 16): 1.0,
        ("full", 64): {False: None, True: 4.0},
        ("full", 256): {True: 9.0},
        ("full", 1024): {True: None},
    }
    tried = []
    monkeypatch.setattr(train, "in_subprocess", pretended(seconds, tried))
    cells = train.grid(["shga"], ["full"], [16, 64, 256, 1024], **SHAPE)
    result = train.run(cells, repeats=2, checkpointing="auto")
    assert [row["checkpoint_activations"] for row in result["rows"]] == [False, True, True, True]
    assert tried == [("full", n) for n in (16, 64, 64, 256, 1024, 16, 64, 256)]
    table = train.table(result)
    assert "; *: activations computed again in backward" in table
    for line in ("| full | 16 | 16 ", "| full * | 64 | 16 ", "| full * | 1,024 | out of memory "):
        assert line in table
    # Or everywhere, or nowhere.
    monkeypatch.setattr(train, "in_subprocess", pretended({("full", 16): {True: 1.0}}, []))
    assert train.run(cells[:1], checkpointing="on")["rows"][0]["checkpoint_activations"]
    monkeypatch.setattr(train, "in_subprocess", pretended({("full", 64): {False: None}}, []))
    off = train.run(cells[1:2], checkpointing="off")
    assert off["rows"][0]["failed"] == "out of memory"
    assert "*" not in train.table(off)


def test_a_grid_that_is_interrupted_tells_what_it_has(tmp_path, monkeypatch, capsys):
    seconds = {("full", 16): 3.0, ("auto", 16): 2.0, ("full", 64): None}
    monkeypatch.setattr(
        train, "in_subprocess", pretended(seconds | {("auto", 64): KeyboardInterrupt}, [])
    )
    out = tmp_path / "train.json"
    options = ["--head-types", "shga", "--kinds", "full", "auto", "--lengths", "16", "64"]
    with pytest.raises(SystemExit) as stop:
        main(["bench", "train", *SMALL, *options, "--out", str(out)])
    told = capsys.readouterr()
    assert (stop.value.code, told.err) == (130, "tvq: interrupted\n")
    rows = json.loads(out.read_text())["rows"]
    assert [(kind(row), row["seq_len"]) for row in rows] == [
        ("full", 16),
        ("auto", 16),
        ("full", 64),
    ]
    assert rows[1]["over_full"] == 1.5
    assert told.out == train.table(json.loads(out.read_text())) + "\n"


def test_the_command_measures_tells_and_draws(tmp_path, monkeypatch, capsys):
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
def test_a_rate_that_was_not_measured_is_an_empty_column(available, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "in_subprocess", pretended({("auto", 16): 2.0}, [], available))
    result = train.run(train.grid(["shga"], ["auto"], [16], **SHAPE), repeats=1)
    (row,) = result["rows"]
    assert row["share_of_rate"].keys() == available.keys() == result["matmul_flops"].keys()
    lines = train.table(result).splitlines()
    assert f"rates here: {shown}" in lines[1]
    assert len(lines[3].split("|")) == len(lines[5].split("|"))
    columns = dict(zip(lines[3].split(" | "), lines[5].split(" | "), strict=True))
    assert columns["of bf16 rate"] == ""
    assert (columns["of fp32 rate"] == "") == (not available)
    path = tmp_path / "train.json"
    path.write_text(json.dumps(result))
    assert plot_path(path) == [path.with_suffix(".png")]


def test_a_grid_is_measured_although_the_rates_exceed_their_time_limit(monkeypatch, capsys):
    failed = {"failed": over_time(120)}
    monkeypatch.setattr(train, "in_subprocess", pretended({("auto", 16): 2.0}, [], failed))
    result = train.run(train.grid(["shga"], ["auto"], [16], **SHAPE), repeats=1)
    assert result["matmul_flops"] == result["rows"][0]["share_of_rate"] == {}
    assert over_time(120) in capsys.readouterr().err


def test_every_subprocess_of_a_grid_has_a_time_limit(monkeypatch):
    limits = []
    measure = pretended({("auto", 16): 2.0}, [])

    def noted(*arguments, seconds, **options):
        limits.append(seconds)
        return measure(*arguments, **options)

    monkeypatch.setattr(train, "in_subprocess", noted)
    train.run(train.grid(["shga"], ["auto"], [16], **SHAPE), repeats=2, time_limit=5.0)
    assert limits == [rates.TIME_LIMIT, train.START + 15.0, train.START + 15.0]


def test_a_cell_longer_than_one_that_exceeded_the_time_limit_is_not_tried(monkeypatch):
    tried = []
    failed = over_time(train.START + 15.0)
    monkeypatch.setattr(train, "in_subprocess", pretended({("full", 16): failed}, tried))
    cells = train.grid(["shga"], ["full"], [16, 64, 256], **SHAPE)
    result = train.run(cells, repeats=2, time_limit=5.0)
    assert tried == [("full", 16)]
    assert [row["failed"] for row in result["rows"]] == [failed] * 3
    assert train.table(result).count(failed) == 3


def test_the_quick_form_is_a_small_grid(monkeypatch, capsys):
    seconds = {(name, n): 1.0 for name in train.KINDS for n in train.LENGTHS}
    tried = []
    monkeypatch.setattr(train, "in_subprocess", pretended(seconds, tried))
    main(["bench", "train", *SMALL, "--quick", "--head-types", "shga"])
    assert tried == [(k, n) for n in (2048, 8192) for k in ("full", "auto", "sdpa")] * 2
    tried.clear()
    main(["bench", "train", *SMALL, "--head-types", "shga", "--repeats", "1"])
    assert len(tried) == 7 * 4


def test_a_document_step_that_fails_is_told():
    rows = [asdict(cell) for cell in documents.cells(20, 7)]
    rows[0]["failed"] = "out of memory"
    rows[1]["us_per_token"] = rows[2]["us_per_token"] = 3.0
    lines = documents.table({"rows": rows}).splitlines()
    assert lines[2:] == [
        "| none | out of memory |  |",
        "| one | 3.0 |  |",
        "| of 7 tokens | 3.0 |  |",
    ]


def test_documents_of_no_tokens_are_rejected(monkeypatch, capsys):
    monkeypatch.setattr(train, "in_subprocess", None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "documents", *SMALL, "--document-len", "0"])
    assert stopped.value.code == 2
    assert "--document-len 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "0"], "--lengths 0"),
        (["--kinds", "quadratic"], "quadratic"),
        (["--lengths"], "empty grid"),
        (["--d-model", "12"], "--d-model 12"),
        (["--n-layer", "0"], "--n-layer 0"),
        (["--repeats", "0"], "--repeats 0"),
        (["--time-limit", "0"], "--time-limit 0"),
        (["--memory-gb", "-1"], "--memory-gb -1"),
        (["--device", "tpu"], "tpu"),
        (["--out", "no/such/folder.json"], "--out no/such/folder.json"),
    ],
)
def test_a_mistake_is_one_line_and_measures_nothing(options, message, capsys, monkeypatch):
    monkeypatch.setattr(train, "in_subprocess", None)
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "train", *SMALL, *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
