"""What several benchmarks share, and the equality that is demonstrated."""

import pytest

from transformer_vq.bench import run_main
from transformer_vq.bench.equality import differences
from transformer_vq.files import write_json


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
