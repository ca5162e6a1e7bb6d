"""`tvq bench first-token`: what is sent to the server, predictions for GPT-2, and the record."""

import json
import os
import sys
from contextlib import contextmanager

import pytest
import torch
from helpers import tiny_config, tiny_run
from matplotlib.figure import Figure
from servers import LOCAL, TOKENIZER, a_model, a_service, running

from transformer_vq.bench import first_token, first_token_baseline, gpt2
from transformer_vq.bench.first_token import Documents, RequestError, served_rows, server_options
from transformer_vq.bench.first_token_baseline import about, baseline_rows, predict_seconds
from transformer_vq.bench.plots import plot_record
from transformer_vq.bench.serving import Server
from transformer_vq.cli.main import main
from transformer_vq.errors import UserError
from transformer_vq.generation.snapshot import Snapshots
from transformer_vq.serve.prefixes import PrefixStore
from transformer_vq.serve.service import Limits
from transformer_vq.training import loading
from transformer_vq.training.run import train

CPU = torch.device("cpu")
DOCUMENTS = Documents(list(b"the cat sat on the mat. "), TOKENIZER.bos)


def no_advance(n, note=""):
    pass


@pytest.fixture
def services(monkeypatch):
    """The services that are started, in this process instead of in new ones."""
    found = []

    @contextmanager
    def serving(run, store, options):
        n_prompt = int(options[options.index("--max-prompt-tokens") + 1])
        service = a_service(store, limits=Limits(prompt_tokens=n_prompt))
        service.engine.prefixes = PrefixStore(Snapshots(service.engine.model), 0)
        service.options = options
        found.append(service)
        with running(service, LOCAL) as client:
            yield Server(client.port, os.getpid())

    monkeypatch.setattr(first_token, "serving", serving)
    return found


@pytest.fixture
def prefills(monkeypatch):
    """Seconds of the GPT-2 baseline by length, which are used instead of measuring."""
    found = {}

    def measure(function, config, n, device, **limits):
        seconds = found[n]
        if seconds is KeyboardInterrupt:
            raise KeyboardInterrupt
        return seconds if isinstance(seconds, dict) else {"seconds": seconds, "peak_bytes": n}

    monkeypatch.setattr(first_token_baseline, "in_subprocess", measure)
    return found


def baseline(lengths, time_limit=100.0, memory_gb=1000.0):
    return list(baseline_rows(tiny_config(), lengths, time_limit, memory_gb, CPU))


@pytest.mark.parametrize("n", [1, 2, 24, 25, 26, 100])
def test_documents_have_the_exact_length_and_repeat_the_text(n):
    document = DOCUMENTS.of_length(n)
    assert len(document) == n
    assert document[0] == TOKENIZER.bos
    assert bytes(document[1:]) in bytes(DOCUMENTS.tokens) * 5


def test_server_accepts_a_document_of_a_million_tokens():
    options = server_options(10**6)
    values = dict(zip(options[::2], options[1::2], strict=True))
    assert int(values["--max-prompt-tokens"]) >= 10**6
    body = json.dumps({"prompt": [2**31] * 10**6})
    assert int(values["--max-body-mb"]) * 10**6 > len(body)


def test_rows_have_all_times_and_a_context_of_constant_size(services):
    rows = list(served_rows("run", DOCUMENTS, [8, 64], CPU, no_advance))
    assert [row["tokens"] for row in rows] == [8, 64]
    for row in rows:
        assert "failed" not in row
        times = [value for key, value in row.items() if key.endswith("seconds")]
        assert len(times) == 4
        assert min(times) > 0
        assert row["peak_bytes"] > 10**7
    assert rows[0]["context_bytes"] == rows[1]["context_bytes"] > 0
    assert len(services) == 4  # two for each length
    # A warm-up, three times the prompt and three times the question, and the upload.
    n_question = len(first_token.QUESTION)
    counts = [service.engine.counters.prompt_tokens for service in services]
    assert counts == [
        1 + 4 * 8 + 3 * n_question,
        1 + n_question,
        1 + 4 * 64 + 3 * n_question,
        1 + n_question,
    ]


def test_request_that_the_server_rejects_is_a_failed_row(services, monkeypatch):
    options = ["--max-prompt-tokens", "60"]
    monkeypatch.setattr(first_token, "server_options", lambda n: options)
    long, short = served_rows("run", DOCUMENTS, [64, 8], CPU, no_advance)
    assert long["failed"].startswith("status 413")
    assert "failed" not in short
    record = a_record([long, short], [])
    assert "status 413" in first_token.table(record)


def test_server_that_is_gone_is_a_request_error(tmp_path):
    with running(a_service(tmp_path)) as client:
        pass
    with pytest.raises(RequestError, match="does not respond"):
        first_token.first_token(client.port, {"prompt": "a"}, n_cached=0)


def test_reused_prefix_is_a_request_error(tmp_path):
    with running(a_service(tmp_path)) as client:
        body = {"prompt": DOCUMENTS.of_length(30)}
        assert first_token.first_token(client.port, body, n_cached=0) > 0
        with pytest.raises(RequestError, match="30 tokens were reused"):
            first_token.first_token(client.port, body, n_cached=0)


def test_prediction_is_exact_for_linear_and_quadratic_time():
    def seconds(n):
        return 3e-3 * n + 2e-6 * n**2

    measured = {n: seconds(n) for n in (10, 1000, 5000)}
    assert predict_seconds(tiny_config(), measured, 10**6) == pytest.approx(seconds(10**6))


@pytest.mark.parametrize("measured", [{1000: 2.0}, {100: 1.0, 1000: 2.0}, {10: 1e-9, 1000: 2.0}])
def test_prediction_without_usable_short_times_is_the_ratio_of_flops(measured):
    config = tiny_config()
    flops = first_token_baseline.prefill_flops
    want = 2.0 * flops(config, 5000) / flops(config, 1000)
    assert predict_seconds(config, measured, 5000) == pytest.approx(want)
    assert predict_seconds(config, {}, 5000) is None


def test_lengths_above_the_time_limit_are_predicted_and_not_run(prefills):
    prefills.update({10: 1.0, 100: 50.0})  # 0.055 * n + 0.0044 * n^2
    short, long, *predicted = baseline([10, 100, 1000, 10_000])
    assert (short["seconds"], long["seconds"]) == (1.0, 50.0)
    for row in predicted:
        assert row["failed"].startswith("not run: would take about")
        assert row["failed"].endswith("(prediction)")
        assert row["estimated_seconds"] > 100
        assert "seconds" not in row
    assert predicted[1]["estimated_seconds"] > 90 * predicted[0]["estimated_seconds"]


def test_lengths_above_the_memory_limit_are_not_run(prefills):
    needed = gpt2.kv_bytes(tiny_config(), 10**6)
    (row,) = baseline([10**6], memory_gb=0.9 * needed / 1e9)
    assert row["failed"].startswith("not run: needs")
    assert row["failed"].endswith("(prediction)")
    assert (row["estimated_bytes"], row["estimated_seconds"]) == (needed, None)
    prefills[10**6] = 1.0
    (row,) = baseline([10**6], memory_gb=1.1 * needed / 1e9)
    assert row["seconds"] == 1.0


def test_lengths_after_a_failure_are_not_run(prefills):
    prefills.update({10: 1e-3, 20: {"failed": "out of memory"}})
    rows = baseline([10, 20, 30])
    assert [row.get("failed") for row in rows] == [
        None,
        "out of memory",
        "not run: 20 tokens failed",
    ]


def test_baseline_without_transformers_gives_the_reason(prefills, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    rows = baseline([8, 64])
    assert [row["tokens"] for row in rows] == [8, 64]
    assert all("extra 'hf'" in row["failed"] for row in rows)


def test_gpt2_prefill_of_several_chunks_is_timed(monkeypatch):
    monkeypatch.setattr(gpt2, "CHUNK", 4)
    found = gpt2.time_prefill(tiny_config(), 10, CPU)
    assert found["seconds"] > 0
    assert found["peak_bytes"] > 10**7


@pytest.mark.parametrize(
    ("seconds", "text"), [(7.0, "7 s"), (600, "10 minutes"), (9000, "2.5 hours"), (1e7, "116 days")]
)
def test_long_times_have_a_readable_unit(seconds, text):
    assert about(seconds) == text


def a_record(served, predicted):
    return {"first_token": served, "gpt2": predicted}


def a_row(n):
    times = dict.fromkeys(("upload_seconds", "context_seconds", "restarted_seconds"), 0.25)
    return {"tokens": n, "prompt_seconds": n / 100, "context_bytes": 10**6, "peak_bytes": None} | (
        times
    )


def test_table_and_figure_show_predictions_as_such(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    not_run = {"failed": "not run: (prediction)", "estimated_seconds": 99.0, "estimated_bytes": 1}
    gpt2_rows = [{"tokens": 8, "seconds": 0.5, "peak_bytes": 1}, {"tokens": 64} | not_run]
    record = a_record([a_row(8), a_row(64)], gpt2_rows)
    last = first_token.table(record).splitlines()[-1]
    assert last.startswith("| 64 |")
    assert last.endswith("| not run: (prediction) |  |")
    plot_record(record, tmp_path / "figure.png")
    (axes,) = figures[0].axes
    (open_circles,) = (line for line in axes.lines if line.get_markerfacecolor() == "white")
    assert list(open_circles.get_xdata()) == [64]
    assert list(open_circles.get_ydata()) == [99.0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@pytest.mark.parametrize("rows", [[], [{"tokens": 8, "failed": "status 413"}]])
def test_record_without_measurements_is_not_plotted(rows, tmp_path):
    record = a_record(rows, [])
    assert first_token.table(record).startswith("| tokens |")
    with pytest.raises(UserError, match="no document"):
        plot_record(record, tmp_path / "figure.png")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def command(services, tmp_path, monkeypatch):
    """The arguments of the command for a model in this process, without --tokens."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. ")
    monkeypatch.setattr(loading, "load_model_and_tokenizer", lambda name: (a_model(), TOKENIZER))
    out = ["--out", str(tmp_path / "record.json")]
    return ["bench", "first-token", str(tmp_path / "run"), "--text", str(text), *out]


def test_command_prints_a_table_and_writes_a_record(command, services, prefills, tmp_path, capsys):
    prefills.update({8: 1.0, 20: 2.0})
    options = ["--tokens", "64", "8", "--gpt2-tokens", "20", "8", "--device", "cpu", "--json"]
    main([*command, *options])
    *table, last = capsys.readouterr().out.splitlines()
    record = json.loads((tmp_path / "record.json").read_text())
    assert json.loads(last) == record
    assert str(tmp_path) not in last
    assert "\n".join(table) == first_token.table(record)
    assert [row["tokens"] for row in record["first_token"]] == [8, 64]
    assert [row["seconds"] for row in record["gpt2"]] == [1.0, 2.0]
    assert record["question_tokens"] == len(first_token.QUESTION)
    assert "--device" in services[0].options


def test_interrupted_command_prints_the_results_so_far(command, prefills, tmp_path, capsys):
    prefills[8] = KeyboardInterrupt
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--tokens", "8"])
    assert stopped.value.code == 130
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["first_token"]) == 1
    assert record["gpt2"] == []
    assert first_token.table(record) in capsys.readouterr().out


def test_command_without_gpt2_lengths_skips_it(command, tmp_path, capsys):
    main([*command, "--tokens", "8", "--gpt2-tokens"])
    assert json.loads((tmp_path / "record.json").read_text())["gpt2"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens"], "--tokens"),
        (["--tokens", "0"], "--tokens"),
        (["--tokens", str(10**30)], "--tokens"),
        (["--gpt2-tokens", "0"], "--gpt2-tokens"),
        (["--time-limit", "0"], "--time-limit"),
        (["--memory-gb", "-1"], "--memory-gb"),
        (["--text", "missing.txt"], "--text"),
    ],
)
def test_user_error_is_one_line(options, message, command, services, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command, *options])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert services == []


def test_empty_text_is_a_user_error(command, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--tokens", "8"])
    assert stopped.value.code == 2
    assert "text" in capsys.readouterr().err


@pytest.mark.slow
def test_command_measures_servers_in_other_processes(tmp_path, capsys):
    train(tiny_run(tmp_path), tmp_path / "run")
    text = tmp_path / "text" / "0.txt"
    options = ["--text", str(text), "--tokens", "8", "64", "--gpt2-tokens", "8", "--json"]
    main(["bench", "first-token", str(tmp_path / "run"), *options])
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row.get("failed") for row in record["first_token"]] == [None, None]
    assert record["gpt2"][0]["seconds"] > 0
