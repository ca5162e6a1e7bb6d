"""`tvq bench compress`: runs, n-gram models and compressors on the same files."""

import bz2
import gzip
import json
import lzma
import math
import random
import sys

import numpy as np
import pyppmd
import pytest
from helpers import tiny_run
from matplotlib.figure import Figure

from transformer_vq.bench import compress
from transformer_vq.bench.ngram import bits_by_order
from transformer_vq.bench.plots import plot_path
from transformer_vq.cli.main import main
from transformer_vq.config import DataConfig
from transformer_vq.errors import UserError
from transformer_vq.training.evaluate import evaluate
from transformer_vq.training.run import train as train_run

WORDS = ["the", "a", "cat", "mat", "sat", "on", "and", "then", "it", "ran", "off", "up"]


@pytest.fixture
def texts(tmp_path):
    """A folder with two files, and a file for training."""
    generator = random.Random(0)
    (tmp_path / "books").mkdir()
    for name, n in (("books/a.txt", 2000), ("books/b.txt", 500), ("train.txt", 5000)):
        (tmp_path / name).write_text(" ".join(generator.choices(WORDS, k=n)))
    return tmp_path


@pytest.fixture
def lines(tmp_path):
    """A folder with two files of a line, small enough to evaluate a run on."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("the cat sat on the mat and then it ran off\n")
    (tmp_path / "books" / "b.txt").write_text("a mat ran up\n")
    return tmp_path


def measure(path, train=(), **options):
    found = compress.measure(DataConfig(path=str(path)), [str(x) for x in train], **options)
    return found, {(row["name"], row["training"]): row for row in found["compression"]}


def call(*words):
    main(["bench", "compress", *map(str, words)])


def rejected(capsys, *words):
    """Return the message of a command that fails."""
    with pytest.raises(SystemExit) as stopped:
        call(*words)
    assert stopped.value.code == 2
    *notes, message = capsys.readouterr().err.splitlines()
    assert all(note.startswith("evaluating") for note in notes)
    return message


def test_sizes_of_files_alone_are_those_of_the_libraries(texts):
    record, rows = measure(texts / "books", ppmd_orders=[3, 6])
    data = [(texts / "books" / name).read_bytes() for name in ("a.txt", "b.txt")]
    assert record["files"] == [
        {"name": "a.txt", "bytes": len(data[0])},
        {"name": "b.txt", "bytes": len(data[1])},
    ]
    libraries = {
        "bzip2 -9": lambda x: bz2.compress(x, 9),
        "xz -9e": lambda x: lzma.compress(x, preset=9 | lzma.PRESET_EXTREME),
        "PPMd, order 3": lambda x: pyppmd.compress(x, max_order=3),
        "PPMd, order 6": lambda x: pyppmd.compress(x, max_order=6),
    }
    assert rows.keys() == {(name, "none") for name in libraries}
    for name, library in libraries.items():
        bits = [8 * len(library(x)) for x in data]
        assert rows[name, "none"]["bits"] == bits
        assert rows[name, "none"]["bits_per_byte"] == sum(bits) / sum(map(len, data))


def test_primed_size_is_the_growth_of_the_stream(texts):
    _, rows = measure(texts / "books", [texts / "train.txt"], orders=(), ppmd_orders=[4])
    before = (texts / "train.txt").read_bytes()
    libraries = {
        "xz -9e": lambda x: lzma.compress(x, preset=9 | lzma.PRESET_EXTREME),
        "PPMd, order 4": lambda x: pyppmd.compress(x, max_order=4),
    }
    assert {name for name, training in rows if training == "primed"} == set(libraries)
    for name, library in libraries.items():
        data = [(texts / "books" / x).read_bytes() for x in ("a.txt", "b.txt")]
        growth = [len(library(before + x)) - len(library(before)) for x in data]
        assert rows[name, "primed"]["bits"] == [8 * n for n in growth]


def test_size_does_not_depend_on_the_chunks(monkeypatch):
    data = random.Random(0).randbytes(5000) * 2
    for compressor in compress.compressors([5]):
        whole = compress.compressed_size(compressor, data)
        with monkeypatch.context() as patch:
            patch.setattr(compress, "CHUNK", 777)
            assert compress.compressed_size(compressor, data) == whole


def test_primed_compressors_know_text_that_was_trained_on(tmp_path):
    text = random.Random(0).randbytes(3000).hex()
    for name in ("train.txt", "again.txt"):
        (tmp_path / name).write_text(text)
    _, rows = measure(tmp_path / "again.txt", [tmp_path / "train.txt"], ppmd_orders=[8])
    for name in ("xz -9e", "PPMd, order 8"):
        alone, primed = rows[name, "none"], rows[name, "primed"]
        assert 0 <= primed["bits_per_byte"] < 0.3 < 4 < alone["bits_per_byte"]


def test_xz_dictionary_covers_the_training_files(tmp_path, monkeypatch):
    monkeypatch.setattr(compress, "XZ_DICTIONARY", 4096)
    text = random.Random(0).randbytes(20_000)
    repeated = compress.Compressor("xz", compress.xz)
    assert compress.compressed_size(repeated, text * 2) < 1.1 * len(text)
    monkeypatch.setattr(compress, "XZ_LARGEST_DICTIONARY", 4096)
    assert compress.compressed_size(repeated, text * 2) > 1.9 * len(text)


def test_ngrams_are_counted_on_the_training_files_with_document_ends(texts):
    (texts / "more.jsonl").write_text('{"text": "the cat"}\n{"text": "a mat"}\n')
    train = [texts / "train.txt", texts / "more.jsonl"]
    record, rows = measure(texts / "books" / "a.txt", train, orders=[3, 1], ppmd_orders=())

    def tokens(*documents):
        return np.array([x for text in documents for x in (*text, 256)])

    counted = tokens((texts / "train.txt").read_bytes(), b"the cat", b"a mat")
    test = tokens((texts / "books" / "a.txt").read_bytes())
    found = bits_by_order(counted, [test])
    want = [next(found) for _ in range(4)]
    assert [name for name, training in rows if training == "counts"] == [
        "n-grams, order 1",
        "n-grams, order 3",
    ]
    for order in (1, 3):
        row = rows[f"n-grams, order {order}", "counts"]
        assert row["bits"] == want[order]
    assert record["train_bytes"] == len(counted) - 3


def test_compressed_files_are_measured_as_text(texts):
    data = (texts / "books" / "a.txt").read_bytes()
    (texts / "c.txt.gz").write_bytes(gzip.compress(data))
    _, plain = measure(texts / "books" / "a.txt", ppmd_orders=())
    record, rows = measure(texts / "*.gz", ppmd_orders=())
    assert record["files"] == [{"name": "c.txt.gz", "bytes": len(data)}]
    assert {key: row["bits"] for key, row in rows.items()} == {
        key: row["bits"] for key, row in plain.items()
    }


def test_runs_are_evaluated_file_by_file(lines):
    changes = {"train": {"steps": 1}}
    train_run(tiny_run(lines, **changes), lines / "vq")
    train_run(tiny_run(lines, **changes, model={"attention": "full"}), lines / "full")
    data = DataConfig(path=str(lines / "books"), cache=str(lines / "cache"))
    record = compress.measure(data, runs=[lines / "vq", lines / "full"], ppmd_orders=())
    rows = {row["name"]: row for row in record["compression"] if row["training"] == "weights"}
    assert list(rows) == ["vq, windowed", "vq, streaming", "full, windowed"]
    for name, row in rows.items():
        run, protocol = name.split(", ")
        for path, bits in zip(["a.txt", "b.txt"], row["bits"], strict=True):
            one = DataConfig(path=str(lines / "books" / path), cache=data.cache)
            result = evaluate(lines / run, data=one, split="all").protocols[protocol]
            assert bits == pytest.approx(result.nats / math.log(2))
        n_bytes = sum(file["bytes"] for file in record["files"])
        assert row["bits_per_byte"] == pytest.approx(sum(row["bits"]) / n_bytes)


def test_runs_with_a_vocabulary_use_it(lines):
    config = tiny_run(lines, train={"steps": 1}, model={"vocab_size": 280})
    data = {"path": config.data.path, "cache": config.data.cache, "tokenizer": "bpe"}
    config = type(config)(config.model, DataConfig(**data), config.optim, config.train)
    train_run(config, lines / "bpe")
    other = DataConfig(path=str(lines / "books"), cache=config.data.cache)
    record = compress.measure(other, runs=[lines / "bpe"], ppmd_orders=())
    row = record["compression"][0]
    assert row["name"] == "bpe, windowed"
    assert 0 < row["bits_per_byte"] < 10


def test_command_writes_a_record_and_a_table_that_agree(texts, capsys):
    out = texts / "record.json"
    options = ["--orders", 0, 4, "--ppmd-orders", 6, "--out", out]
    call("--data.path", texts / "books", "--train-path", texts / "train.txt", *options, "--json")
    printed = capsys.readouterr().out.splitlines()
    record = json.loads(out.read_text())
    assert json.loads(printed[-1]) == record
    assert str(texts) not in out.read_text()
    assert printed[:-1] == compress.table(record).splitlines()
    lines = [line.strip("| ").split(" | ") for line in printed if line.startswith("|")]
    assert lines[0] == ["model", "training text", "a.txt", "b.txt", "total"]
    cells = {(name, training): values for name, training, *values in lines[3:]}
    assert len(cells) == len(record["compression"]) == 7
    for row in record["compression"]:
        sizes = [file["bytes"] for file in record["files"]]
        bits = [bits / n for bits, n in zip(row["bits"], sizes, strict=True)]
        want = [f"{x:.4f}" for x in (*bits, row["bits_per_byte"])]
        assert cells[row["name"], row["training"]] == want
    assert "--overwrite" in rejected(capsys, "--data.path", texts / "books", "--out", out)


def test_figure_has_a_bar_per_row_sorted_by_bits_per_byte(texts, monkeypatch):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (drawn.append(f), save(f, *a, **k)))
    record, _ = measure(texts / "books", [texts / "train.txt"])
    record["compression"][0] |= {"name": "my-run, streaming", "training": "weights"}
    path = texts / "record.json"
    path.write_text(json.dumps(record))
    assert plot_path(path) == [texts / "record.png"]
    assert (texts / "record.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    bars = sorted((bar for bars in axes.containers for bar in bars), key=lambda x: x.get_y())
    widths = [bar.get_width() for bar in bars]
    assert widths == sorted(row["bits_per_byte"] for row in record["compression"])
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[widths.index(record["compression"][0]["bits_per_byte"])] == "my-run, streaming"
    assert {"xz -9e", "xz -9e, primed"} < set(names)
    assert axes.yaxis_inverted()


def test_missing_package_leaves_out_its_rows_and_names_the_extra(texts, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyppmd", None)
    call("--data.path", texts / "books")
    out, err = capsys.readouterr()
    assert "xz -9e" in out
    assert "PPMd" not in out
    (line,) = (line for line in err.splitlines() if "PPMd" in line)
    assert "'compress'" in line
    assert "pip install" in line


def test_command_without_training_files_notes_what_is_skipped(texts, capsys):
    call("--data.path", texts / "books")
    out, err = capsys.readouterr()
    assert "--train-path" in err
    assert "primed" not in out
    assert "order 6" in out
    assert "n-grams" not in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "--data.path"),
        ("--data.path nothing.txt", "nothing.txt does not exist"),
        ("--data.path *.nothing", "no file matches"),
        ("--data.path empty.txt", "empty.txt is empty"),
        ("--data.path books --train-path nothing", "--train-path"),
        ("--data.path books --train-path empty.txt", "--train-path"),
        ("--data.path books --train-path books/a.txt", "also a training file"),
        ("--data.path books --orders -1", "--orders -1"),
        ("--data.path books --orders 1000", "--orders 1000"),
        ("--data.path books --ppmd-orders 1", "--ppmd-orders 1"),
        ("nothing --data.path books", "nothing is not a run folder"),
    ],
)
def test_command_rejects_wrong_input(texts, monkeypatch, capsys, options, named):
    monkeypatch.chdir(texts)
    (texts / "empty.txt").touch()
    assert named in rejected(capsys, *options.split())


def test_measure_rejects_data_without_files():
    with pytest.raises(UserError, match=r"--data\.path"):
        compress.measure(DataConfig())


def test_read_texts_keeps_crlf_and_the_documents_of_a_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\r\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": "yz"}\n')
    config = DataConfig()
    found = compress.read_texts([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], config, "-o")
    assert [text.documents for text in found] == [(b"one\r\ntwo\r\n",), (b"x", b"yz")]
    assert found[1].data == b"xyz"
    assert found[1].tokens.tolist() == [*b"x", 256, *b"yz", 256]
    with pytest.raises(UserError, match="-o"):
        compress.read_texts([str(tmp_path / "missing")], config, "-o")


def test_short_names_add_folders_only_if_names_repeat(tmp_path):
    paths = [tmp_path / "x" / "a.txt", tmp_path / "y" / "b.txt"]
    assert compress.short_names(paths) == ["a.txt", "b.txt"]
    assert compress.short_names([*paths, tmp_path / "y" / "a.txt"]) == [
        "x/a.txt",
        "y/b.txt",
        "y/a.txt",
    ]
    assert compress.short_names([]) == []
