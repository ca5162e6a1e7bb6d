"""`tvq bench recall`: its models, record, table and figure."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from helpers import assert_close

from transformer_vq.bench import recall
from transformer_vq.bench.plots import plot_path
from transformer_vq.bench.recall_models import (
    build,
    fast_mamba,
    n_parameters,
    quantized,
)
from transformer_vq.bench.recall_records import Candidate, RecallSettings, by_task, candidates
from transformer_vq.bench.recall_tasks import (
    VOCAB_SIZE,
    RecallData,
)
from transformer_vq.cli.main import main
from transformer_vq.nn.quantizer import VectorQuantizer

CPU = torch.device("cpu")
TASKS = ["mqar", "copy", "needle"]
TINY = RecallSettings(
    lengths=(20, 32),
    train_len=32,
    steps=2,
    step_tokens=64,
    eval_sequences=8,
    pairs=2,
    copied=4,
    value_len=2,
    d_model=8,
    n_layer=1,
    d_k=4,
    block_len=4,
)
OPTIONS = (
    "--lengths 20 32 --train-len 32 --steps 2 --step-tokens 64 --eval-sequences 8 --pairs 2 "
    "--copied 4 --value-len 2 --d-model 8 --n-layer 1 --d-k 4 --block-len 4 --codes 3"
)


def command(out, *more):
    main(["bench", "recall", *OPTIONS.split(), "--out", str(out), *more])


MODELS = candidates(["full", "window", "vq", "mamba"], [3, 5])


def test_models_have_about_the_same_number_of_parameters():
    settings = RecallSettings()
    with torch.device("meta"):
        sizes = [n_parameters(build(model, settings, VOCAB_SIZE)) for model in MODELS]
    assert [model.name for model in MODELS] == [
        "full attention",
        "window only",
        "VQ, 3 codes",
        "VQ, 5 codes",
        "Mamba",
    ]
    assert len(set(sizes[:4])) == 1
    assert abs(sizes[4] / sizes[0] - 1) < 0.1


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_untrained_model_scores_near_chance(model):
    torch.manual_seed(0)
    settings = RecallSettings(lengths=(64,), d_model=16, n_layer=1, d_k=8, block_len=8)
    data = RecallData("mqar", settings)
    with fast_mamba(CPU):
        accuracy, n_bytes = recall.evaluate(build(model, settings, data.vocab_size), data, 64)
    assert accuracy < 0.08  # 64 * 16 scored tokens, 48 values
    assert n_bytes > 0


def test_state_grows_with_the_context_only_for_full_attention():
    data = RecallData("copy", TINY)
    for model in MODELS:
        with fast_mamba(CPU):
            net = build(model, TINY, data.vocab_size)
            sizes = [recall.evaluate(net, data, length)[1] for length in (20, 40)]
        assert (sizes[0] < sizes[1]) == (model.model == "full"), model


def test_training_starts_with_full_attention_and_updates_the_codebooks(monkeypatch):
    make, lengths = RecallData.batch, []

    def recorded(self, seed, batch_size, seq_len, held_out=False):
        lengths.append(seq_len)
        assert batch_size == 64 // seq_len
        return make(self, seed, batch_size, seq_len, held_out)

    monkeypatch.setattr(RecallData, "batch", recorded)
    settings = replace(TINY, steps=24, full_share=0.5, train_len=64)
    model = recall.train(RecallData("copy", settings), Candidate("vq", 5), 0, CPU)
    assert lengths[:12] == [16] * 12
    assert set(lengths[12:]) == {32, 64}
    assert model.config == settings.model(Candidate("vq", 5), VOCAB_SIZE)
    books = [module for module in model.modules() if isinstance(module, VectorQuantizer)]
    assert len(books) == 1
    assert books[0].started
    assert not torch.equal(books[0].c_count, torch.ones_like(books[0].c_count))


def test_training_is_a_function_of_the_seed():
    data = RecallData("copy", TINY)
    first, again, other = (recall.train(data, Candidate("vq", 5), seed, CPU) for seed in (1, 1, 2))
    same = {
        name: torch.equal(x, again.state_dict()[name]) for name, x in first.state_dict().items()
    }
    assert all(same.values())
    assert not torch.equal(first.head.weight, other.head.weight)


def test_quantized_model_keeps_the_weights():
    full = build(Candidate("full"), TINY, 20)
    found = quantized(full, Candidate("window", 5), TINY)
    assert found.config == TINY.model(Candidate("window", 5), 20)
    assert not found.config.compressive_cache
    assert found.config.n_code == 5
    for name, p in full.named_parameters():
        assert torch.equal(p, found.get_parameter(name))
    assert quantized(full, Candidate("full"), TINY) is full


def test_fast_scan_equals_the_scan_of_transformers():
    from transformers.models.mamba import modeling_mamba

    original = modeling_mamba.mamba_selective_scan
    torch.manual_seed(0)
    model = build(Candidate("mamba"), TINY, 20)
    tokens = torch.randint(20, (3, 17))
    found = {}
    for name, device in (("slow", torch.device("meta")), ("fast", CPU)):
        model.zero_grad()
        with fast_mamba(device):
            is_replaced = modeling_mamba.mamba_selective_scan is not original
            logits = model(tokens).logits
        assert is_replaced == (name == "fast")
        assert modeling_mamba.mamba_selective_scan is original
        logits.square().sum().backward()
        found[name] = {"logits": logits.detach()} | {
            name: p.grad.clone() for name, p in model.named_parameters()
        }
    for name, want in found["slow"].items():
        assert_close(name, found["fast"][name], want)


def test_command_prints_tables_and_records_every_model(tmp_path, capsys):
    out = tmp_path / "new" / "recall.json"
    command(out, "--tasks", "needle", "mqar", "--seeds", "2", "--json")
    *lines, last = capsys.readouterr().out.splitlines()
    record = json.loads(out.read_text())
    assert json.loads(last) == record
    assert "\n".join(lines) == recall.table(record)
    rows = record["recall"]
    assert len(rows) == 2 * 4 * 2 * 2  # tasks, models, seeds, lengths
    assert Counter(row["model"] for row in rows) == dict.fromkeys(
        ["full", "window", "vq", "mamba"], 8
    )
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    assert str(tmp_path) not in last


def without_times(out):
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in json.loads(out.read_text())["recall"]
    ]


def test_interrupted_benchmark_resumes_with_the_same_result(tmp_path, capsys, monkeypatch):
    options = ("--models", "full", "vq", "--tasks", "copy", "--seeds", "2")
    command(tmp_path / "want.json", *options)
    out, measure, calls = tmp_path / "out.json", recall.measure, []

    def counted(data, candidate, seed, device):
        calls.append((candidate.model, seed))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(data, candidate, seed, device)

    monkeypatch.setattr(recall, "measure", counted)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        command(out, *options)
    assert stopped.value.code == 130
    assert capsys.readouterr().out == "stopped; run the same command again to continue\n"
    assert without_times(out) == without_times(tmp_path / "want.json")[:4]
    command(out, *options)
    assert calls == [("full", 0), ("vq", 0), ("full", 1), ("full", 1), ("vq", 1)]
    assert without_times(out) == without_times(tmp_path / "want.json")
    command(out, "--models", "full", "--tasks", "copy", "--seeds", "3")
    assert calls[5:] == [("full", 2)]


def test_record_with_other_settings_is_rejected(tmp_path, capsys):
    out = tmp_path / "recall.json"
    options = ("--models", "full", "--tasks", "copy", "--seeds", "1")
    command(out, *options)
    before = out.read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        command(out, *options, "--lr", "0.5")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "--lr (0.003 -> 0.5)" in error
    assert error.count("\n") == 1
    assert out.read_text() == before


def row(model, n_code, seed, context, accuracy, task="mqar"):
    return {
        "task": task,
        "model": model,
        "n_code": n_code,
        "seed": seed,
        "context": context,
        "accuracy": accuracy,
        "state_bytes": 1000 * context,
        "parameters": 1234,
        "seconds": 1.0,
    }


def a_record(*rows):
    settings = RecallSettings(lengths=(64, 128)).record()
    return {"what": "", "machine": {}, "settings": settings, "recall": list(rows)}


def test_table_has_mean_and_standard_deviation():
    record = a_record(
        *(row("vq", 32, seed, 64, x) for seed, x in enumerate([0.5, 0.7])),
        *(row("vq", 32, seed, 128, 0.25) for seed in (0, 1)),
        *(row("vq", 8, 0, n, 0.125) for n in (64, 128)),
        *(row("full", None, 0, n, 1.0, "needle") for n in (64, 128)),
    )
    assert [*by_task(record)] == ["mqar", "needle"]
    mqar, needle = recall.table(record).split("\n\n")
    assert mqar.splitlines()[2:] == [
        "| VQ, 8 codes | 1,234 | 128 | 12.5 | 12.5 |",
        "| VQ, 32 codes | 1,234 | 128 | 60.0 (14.1) | 25.0 (0.0) |",
    ]
    assert needle.splitlines()[-1] == "| full attention | 1,234 | 128 | 100.0 | 100.0 |"


@pytest.mark.parametrize("models", [MODELS, MODELS[-1:]], ids=["all", "one"])
def test_record_can_be_plotted(models, tmp_path):
    path = tmp_path / "recall.json"
    rows = [
        row(model.model, model.n_code, seed, context, 0.5 + 0.1 * seed, task)
        for model in models
        for task in TASKS[: len(models)]
        for seed in (0, 1)
        for context in (64, 128)
    ]
    path.write_text(json.dumps(a_record(*rows)))
    assert plot_path(path) == [tmp_path / "recall.png"]
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds 0"),
        (["--steps", "0"], "--steps 0"),
        (["--codes", "0"], "--codes 0"),
        (["--lengths", "20", "4"], "--lengths 4: mqar needs at least 8 tokens"),
        (["--lengths", "0"], "--lengths"),
        (["--pairs", "49"], "--pairs 49"),
        (["--train-len", "15"], "--train-len 15"),
        (["--d-k", "3"], "--model.d-k"),
        (["--full-share", "1.5"], "--full-share 1.5"),
        (["--tasks", "recite"], "--tasks recite"),
        (["--text", "missing.txt"], "--text missing.txt: does not exist"),
        (["--text", __file__, "--lengths", "9999"], "use a longer text"),
        (["--device", "tpu"], "device 'tpu'"),
    ],
)
def test_user_error_is_one_line_and_trains_nothing(tmp_path, options, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(tmp_path / "new" / "recall.json", *options)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"decode": []}',
        "[1]",
        "no JSON",
        '{"recall": [1], "settings": {}, "what": "", "machine": {}}',
        '{"recall": [], "settings": [], "what": "", "machine": {}}',
    ],
)
def test_file_that_is_not_a_recall_record_is_kept(tmp_path, content, capsys):
    out = tmp_path / "other.json"
    out.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        command(out)
    assert stopped.value.code == 2
    assert str(out) in capsys.readouterr().err
    assert out.read_text() == content
