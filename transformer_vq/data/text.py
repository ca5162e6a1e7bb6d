"""Text: find the files that a user names, and read their documents.

Text files and JSON Lines are read here, compressed ones through fsspec. Every other format, saved
datasets and dataset names (`hf:NAME`) are read by Hugging Face `datasets`, row by row. A format is
recognized by the suffix of a name only.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import io
import json
import os
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec.compression

from transformer_vq.config import DataConfig
from transformer_vq.data.paths import DataError, error_reason, list_files, path_kind
from transformer_vq.data.tokenizers import utf8
from transformer_vq.errors import UserError, import_extra
from transformer_vq.progress import warn

CHUNK = 1 << 20  # bytes read at once
STDIN = "-"
HUB = "hf:"
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd", ".zip": "zip"}
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv"}
_FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
_BINARY = (".7z", ".db", ".docx", ".feather", ".pdf", ".sqlite", ".tar", ".tgz", ".xlsx")
_VALIDATION = ("validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True)
class Input:
    """One file, or one split of a dataset, with its format."""

    path: str
    format: str
    """text, jsonl, a builder of `datasets`, "saved" (a folder) or "hub" (a name)."""
    split: str | None = None
    """The split its documents belong to; None divides them by share."""
    dataset_split: str | None = None
    """The split to read of a dataset with several splits."""
    text_field: str | None = None
    """The field or column with the text; None takes "text", or the only field with text."""
    unix_newlines: bool = False
    """Read CRLF as LF, in text files."""

    def files(self) -> list[Path]:
        """Return the files whose names, sizes and times identify the documents."""
        if self.format == "hub":
            return []
        return list_files(Path(self.path)) if self.format == "saved" else [Path(self.path)]

    def read(self) -> Iterator[Iterable[bytes]]:
        """Yield the documents in order, each in chunks; those without text have no bytes."""
        if self.format == "text":
            yield _text_document(self.path, self.unix_newlines)
        else:
            records = _read_jsonl(self.path) if self.format == "jsonl" else _read_dataset(self)
            yield from _texts(records, self.text_field)


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Raise DataError, with a message that names the file, for anything that cannot be read."""
    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        fix = "convert or remove it, or use --data.tokenizer bytes"
        raise DataError(f"{path} is not UTF-8 ({error.reason}); {fix}") from error
    except Exception as error:  # libraries raise many kinds of errors for corrupt files
        reason = error_reason(error.__cause__ or error)[:200]
        raise DataError(f"cannot read {path}: {reason}; copy or download it again") from error


def find_inputs(
    paths: Iterable[str],
    format: str = "auto",
    split: str | None = None,
    option: str = "--data.path",
    text_field: str | None = None,
) -> list[Input]:
    """Return what is read from paths, each file once, in the order of the paths, sorted by name.

    A path is a file, a folder, whose hidden files are skipped, a pattern such as 'data/*.jsonl',
    a folder of `datasets.save_to_disk`, or `hf:` followed by the name of a dataset.
    split: the split that all documents belong to. option: the option that gave the paths.
    """
    found: dict[tuple[str, str | None], Input] = {}
    for text in paths:
        new = _find(text, format, option)
        if not new:
            raise DataError(f"{option} {text}: no files found; give another path")
        for item in new:
            item = replace(item, split=split or item.split, text_field=text_field)
            found.setdefault((os.path.realpath(item.path), item.dataset_split), item)
    return list(found.values())


def _find(text: str, format: str, option: str) -> list[Input]:
    if text.startswith(HUB):
        return _dataset_splits(text.removeprefix(HUB), "hub")
    name = os.path.expanduser(text)
    is_pattern = glob.has_magic(name) and not os.path.lexists(name)
    fix = f"give a file, a folder or a pattern as {option}"
    files: list[Input] = []
    for path in map(Path, sorted(glob.glob(name, recursive=True)) if is_pattern else [name]):
        if path_kind(path, fix) == "file":
            files.append(_file(path, format))
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            files += _dataset_splits(str(path), "saved")
        else:
            files += [_file(file, format) for file in list_files(path)]
    return files


def _file(path: Path, format: str) -> Input:
    """Return a file with its format, recognized by its suffix unless it is given."""
    suffix = path.suffix.lower()
    if suffix in _COMPRESSIONS:
        suffix = Path(path.stem).suffix.lower()
    if format == "auto" and suffix in _BINARY:
        raise DataError(f"{path} is not text; convert it to text or JSON Lines, or remove it")
    return Input(str(path), _FORMATS.get(suffix, "text") if format == "auto" else format)


def _dataset_splits(path: str, format: str) -> list[Input]:
    """Return the splits of a dataset; other names of validation, such as "dev", are recognized.

    Documents of "train" are divided by share if other splits are missing.
    """
    dataset = _load(path, format)
    if not isinstance(dataset, dict):
        return [Input(path, format)]
    validation = next((name for name in _VALIDATION if name in dataset), "")
    splits = {"train": None, validation: "validation", "test": "test"}
    for name in [x for x in dataset if x not in splits]:
        warn(f"{path}: the split {name!r} is not used")
    return [Input(path, format, splits[name], str(name)) for name in dataset if name in splits]


@contextmanager
def _open(path: str) -> Iterator[io.BufferedReader]:
    """Open a text file without its byte order mark; decompress it if its suffix says so.

    Reading raises an exception if the file is incomplete, and this one if it is not text.
    """
    compression = _COMPRESSIONS.get(Path(path).suffix.lower())
    if compression == "zip":
        with zipfile.ZipFile(path) as archive:
            n_files = len(archive.namelist())
        if n_files != 1:
            raise DataError(f"{path} contains {n_files:,} files; extract it and give the folder")
    with open(path, "rb") as file:
        opened: Any = file
        if compression == "zstd":  # the library that fsspec uses ends silently where a file was cut
            library = import_extra("pyarrow", "a .zst file")
            opened = library.CompressedInputStream(file, "zstd")
        elif compression is not None:
            opened = fsspec.compression.compr[compression](file, mode="rb")
        buffered = io.BufferedReader(opened, CHUNK)
        start = buffered.peek(1024)[:1024]
        if b"\0" in start or start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise DataError(f"{path} is not text; convert it to UTF-8 text, or remove it")
        if start.startswith(codecs.BOM_UTF8):
            buffered.read(len(codecs.BOM_UTF8))
        yield buffered


def _text_document(path: str, unix_newlines: bool) -> Iterator[bytes]:
    held = b""
    with _open(path) as file:
        while data := file.read(CHUNK):
            if unix_newlines:  # also where CRLF is divided between two chunks
                data = held + data
                held = b"\r" if data.endswith(b"\r") else b""
                data = data[: len(data) - len(held)].replace(b"\r\n", b"\n")
            yield data
    yield held


def _read_jsonl(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line that is not blank."""
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number:,}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = error_reason(error)[:80]
                if line.strip():
                    raise DataError(f"{where}: invalid JSON ({reason}); fix or remove it") from None


def _read_dataset(item: Input) -> Iterator[tuple[str, Any]]:
    """Yield the place and the row of each record of a file or dataset, read by `datasets`."""
    if item.format in ("saved", "hub"):
        rows = _load(item.path, item.format, item.dataset_split)
    else:
        options = {}
        if item.format in ("csv", "tsv"):  # "NA" and empty cells are text
            options = {"sep": "\t" if item.format == "tsv" else ",", "na_filter": False}
        rows = _datasets().load_dataset(
            "csv" if item.format == "tsv" else item.format,
            data_files=glob.escape(os.path.abspath(item.path)),
            split="train",
            streaming=True,
            **options,
        )
    return ((f"{item.path}, row {number:,}", row) for number, row in enumerate(rows, 1))


def _load(path: str, format: str, split: str | None = None) -> Any:
    """Return a saved dataset, or one by name, as `NAME` or `NAME:CONFIG`, read as it arrives."""
    library = _datasets()
    try:
        if format == "saved":
            dataset = library.load_from_disk(path)
            return dataset if split is None else dataset[split]
        name, _, config = path.partition(":")
        return library.load_dataset(name, config or None, split=split, streaming=True)
    except Exception as error:  # of the network, of the hub, of a damaged folder
        fix = "save it again with save_to_disk" if format == "saved" else "check name and network"
        reason = error_reason(error)[:200]
        raise DataError(f"cannot load the dataset {path}: {reason}; {fix}") from error


def _datasets() -> Any:
    library = import_extra("datasets", "this format")
    library.utils.logging.set_verbosity(50)  # its errors are raised as well
    library.utils.logging.disable_progress_bar()
    return library


def _texts(records: Iterable[tuple[str, Any]], field: str | None) -> Iterator[list[bytes]]:
    """Yield the text of each record as UTF-8, b"" for null.

    records: each with its place in the file, for messages. field: the field with the text, or a
    dotted path to one in nested records; None takes "text", or the only field with text.
    """
    for where, record in records:
        text, place = record, ""
        if isinstance(record, Mapping):
            if field is None:
                found = [name for name, x in record.items() if isinstance(x, (str, bytes))]
                found = ["text"] if "text" in record else found
                if len(found) != 1:
                    names = f"{'several fields' if found else 'no field'} with text"
                    names += f" ({', '.join(found or record):.200})"
                    raise DataError(f"{where}: {names}; choose one with --data.text-field")
                field = found[0]
            for key in [field] if field in record else field.split("."):
                if text is not None:  # null stays null, and 0 is not text
                    text = text.get(key, 0) if isinstance(text, Mapping) else 0
            place = f" in the field {field!r} of {', '.join(record):.200}"
        if text is not None and not isinstance(text, (str, bytes)):
            raise DataError(f"{where}: no text{place}; fix or remove it, or set --data.text-field")
        yield [utf8(text) if isinstance(text, str) else text or b""]


def python_sources() -> list[Input]:
    """Return the source files of Python's standard library, without tests and empty files."""
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = []
    for parent, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in excluded]
        found += [Path(parent, name) for name in names if name.endswith(".py")]
    return [Input(str(file), "text") for file in sorted(found) if file.stat().st_size > 0]


def store_stdin(config: DataConfig, cache: Path) -> DataConfig:
    """Return the config with "-" replaced by a file that contains standard input.

    It is named after its content: the same input gives the same corpus. Resuming needs it again.
    """
    given = {name: getattr(config, name) for name in ("path", "validation_path", "test_path")}
    n_given = sum(paths.count(STDIN) for paths in given.values())
    if n_given == 0:
        return config
    if n_given > 1 or int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise DataError("standard input (-) can be read only once; store it in a file")
    digest, folder = hashlib.sha256(), cache / "stdin"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        while data := sys.stdin.buffer.read(CHUNK):
            digest.update(data)
            file.write(data)
        file.flush()
        stored = folder / digest.hexdigest()[:16]
        if not stored.exists():
            os.link(file.name, stored)
    changes: dict[str, Any] = {}
    for name, paths in given.items():
        changes[name] = tuple(str(stored) if path == STDIN else path for path in paths)
    return replace(config, **changes)
