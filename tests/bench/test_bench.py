"""What several benchmarks share, and the equality that is demonstrated."""

import pytest

from transformer_vq.bench import compare, context, run_main
from transformer_vq.bench.equality import differences
from transformer_vq.errors import UserError
from transformer_vq.files import check_can_write, write_json


def test_the_demonstrated_equality_holds():
    found = list(differences(seq_len=50, block_len=8))
    names = ["auto", "serial", "matmul", "associative", "input_scan"]
    assert [row[:2] for row in found] == [
        (h, name) for h in ("shga", "mqa", "mha") for name in names
    ]
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
    assert capsys.readouterr().err == "tvq: interrupted\n"


def test_run_main_prints_a_user_error_as_one_line(capsys):
    def mistaken() -> None:
        raise UserError("wrong; do this")

    with pytest.raises(SystemExit) as stopped:
        run_main(mistaken)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "tvq: wrong; do this\n"


@pytest.mark.parametrize("bug", [ValueError("a bug"), RuntimeError("a bug"), KeyError("a bug")])
def test_run_main_raises_a_bug(bug):
    def broken() -> None:
        raise bug

    with pytest.raises(type(bug)) as raised:
        run_main(broken)
    assert raised.value is bug


def test_check_can_write_rejects_an_existing_file_unless_told_to_overwrite(tmp_path):
    path = tmp_path / "result.json"
    check_can_write("--out", None, False)
    check_can_write("--out", path, False)
    path.touch()
    with pytest.raises(UserError, match="--overwrite"):
        check_can_write("--out", path, False)
    check_can_write("--out", path, True)
    for bad in (tmp_path, tmp_path / "nowhere" / "result.json"):
        with pytest.raises(UserError, match="--out"):
            check_can_write("--out", bad, True)


@pytest.mark.parametrize(("module", "first"), [(compare, ["run"]), (context, [])])
def test_a_module_that_measures_keeps_an_existing_file(module, first, tmp_path):
    path = tmp_path / "result.json"
    path.write_text("kept")
    with pytest.raises(UserError, match="--overwrite"):
        module.main([*first, "--out", str(path)])
    assert path.read_text() == "kept"
