"""The benchmarks run, say what failed, and draw; no time is tested."""

import pytest

from transformer_vq.bench import documents, run_main, scaling
from transformer_vq.bench.equality import differences
from transformer_vq.bench.plots import plot_scaling
from transformer_vq.bench.scaling import Cell, measure
from transformer_vq.files import write_json

SMALL = {"d_model": 32, "n_layer": 1, "repeats": 1}


@pytest.mark.parametrize("attention", ["vq", "full"])
def test_a_cell_is_measured(attention):
    row = measure(Cell(attention, 40, steps=2, **SMALL))
    assert (row["attention"], row["seq_len"]) == (attention, 40)
    assert row["us_per_token"] > 0
    assert row["peak_gb"] > 0


def test_cells_run_in_processes_of_their_own_and_a_failure_is_a_row(capsys):
    cells = [Cell("vq", 40, document_len=7, **SMALL), Cell("nothing", 40, **SMALL)]
    result = scaling.run(cells, rounds=1)
    assert [row.get("failed") for row in result["rows"]] == [None, "exit status 2"]
    assert "[1/2] vq 40 tokens in documents of 7" in capsys.readouterr().err
    assert scaling.table(result).count("| vq | 40 |") == 1
    row = result["rows"][0]
    assert "| of 7 tokens |" in documents.table({"rows": [row | {"document_len": None}, row]})


def test_a_figure_is_drawn(tmp_path):
    rows = [
        {"attention": kind, "seq_len": n, "us_per_token": 1.0, "peak_gb": 0.5}
        for kind in ("vq", "full")
        for n in (1024, 2048)
    ]
    path = tmp_path / "folder" / "figure.png"
    plot_scaling({"rows": [*rows, {"attention": "vq", "seq_len": 4096, "failed": "memory"}]}, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_demonstrated_equality_holds():
    found = list(differences(seq_len=50, block_len=8))
    assert len(found) == 12
    assert all(output < 1e-12 and gradients < 1e-12 for _, _, output, gradients in found)


def test_a_folder_that_is_not_there_ends_with_one_line(tmp_path, capsys):
    path = tmp_path / "nowhere" / "result.json"
    with pytest.raises(SystemExit) as stopped:
        run_main(lambda: write_json(path, {}))
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path.parent) in line


def test_an_interrupt_ends_with_one_line(capsys):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as stopped:
        run_main(interrupted)
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
