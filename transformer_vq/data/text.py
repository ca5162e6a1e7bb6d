"""Text: find the files that a user names, and read their documents.

Text files and JSON Lines are read here, compressed ones through fsspec. Every other format, saved
datasets and dataset names (`hf:NAME`) are read by Hugging Face `datasets`, row by row. A format is
recognized by the suffix of a name only.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from transformer_vq.config import DataConfig
from transformer_vq.data.paths import (
    SPLITS,
    DataError,
    error_reason,
    expand_user,
    file_fingerprint,
    list_files,
    path_kind,
)
from transformer_vq.errors import UserError, missing_extra
from transformer_vq.files import atomic_write
from transformer_vq.progress import progress_bar, warn

CHUNK = 1 << 20  # bytes read at once
STDIN = "-"
HUB = "hf:"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_FORMATS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv"}
_FORMATS |= {".parquet": "parquet", ".arrow": "arrow"}
_VALIDATION = ("validation", "valid", "val", "dev", "eval")
_MARK = b"\xef\xbb\xbf"
_SURROGATES = re.compile("[\ud800-\udfff]")
_SHOWN_FIELDS = 12


class Piece(NamedTuple):
    """Consecutive bytes of a document: a whole record, or part of a text file.

    The first piece has at least CHUNK bytes, unless the document is shorter.
    """

    data: bytes
    starts_document: bool


@dataclass(frozen=True)
class Input:
    """One file, or one split of a dataset, with its format."""

    path: str
    format: str
    """text, jsonl, a builder of `datasets`, "saved" (a folder) or "hub" (a name)."""
    split: str | None = None
    """The split its documents belong to; None divides them by share."""
    part: str | None = None
    """The split inside a dataset with several splits."""
    text_field: str | None = None
    """The field or column with the text; None takes "text", or the only field with text."""
    unix_newlines: bool = False
    """Read CRLF as LF, in text files."""

    def fingerprint(self, root: Path) -> list[object]:
        """Return JSON values that change whenever the documents may change."""
        path = Path(self.path)
        if self.format == "hub":
            about: list[object] = [self.path]
        elif self.format == "saved":
            about = [file_fingerprint(file, root) for file in list_files(path)]
        else:
            about = file_fingerprint(path, root)
        return [self.format, self.split, self.part, self.text_field, self.unix_newlines, about]

    def read(self) -> Iterator[Piece]:
        """Yield the documents in order; those without text are empty pieces.

        Raises DataError, with a message that names the file, for anything that cannot be read.
        """
        try:
            if self.format == "text":
                yield from _read_text(self.path, self.unix_newlines)
            elif self.format == "jsonl":
                yield from _read_jsonl(self.path, self.text_field)
            else:
                yield from _read_dataset(self)
        except UserError:
            raise
        except Exception as error:  # libraries raise many kinds of errors for corrupt files
            raise _unreadable(self.path, error.__cause__ or error) from error


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
            raise DataError(f"{option} {text}: contains no files; give another path")
        for item in new:
            item = replace(item, split=split or item.split, text_field=text_field)
            real = item.path if item.format == "hub" else os.path.realpath(item.path)
            found.setdefault((real, item.part), item)
    return list(found.values())


def _find(text: str, format: str, option: str) -> list[Input]:
    if text.startswith(HUB):
        return _dataset_splits(text.removeprefix(HUB), "hub", _load_hub(text, None))
    path = expand_user(text, option)
    if not os.path.lexists(path) and glob.has_magic(str(path)):
        listed = [Path(x) for x in sorted(glob.glob(str(path), recursive=True))]
        if not listed:
            raise DataError(f"{option} {text}: no file matches this pattern; check the pattern")
    else:
        listed = [path]
    fix = f"give a file, a folder or a pattern as {option}"
    files: list[Input] = []
    for path in listed:
        if path_kind(path, fix) == "file":
            files.append(_file(path, format))
        elif (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            files += _dataset_splits(str(path), "saved", _load_saved(str(path), None))
        elif len(listed) == 1 or "**" not in text:  # ** lists the files of subfolders itself
            files += [_file(file, format) for file in list_files(path)]
    return files


def _file(path: Path, format: str) -> Input:
    """Return a file with its format, recognized by its suffix unless it is given."""
    if format == "auto":
        suffixes = [suffix.lower() for suffix in path.suffixes]
        if suffixes and suffixes[-1] in _COMPRESSED:
            suffixes.pop()
        format = _FORMATS.get(suffixes[-1], "text") if suffixes else "text"
    return Input(str(path), format)


def _dataset_splits(path: str, format: str, dataset: Any) -> list[Input]:
    """Return the splits of a dataset; other names of validation, such as "dev", are recognized.

    Documents of "train" are divided by share if other splits are missing.
    """
    if not isinstance(dataset, dict):
        return [Input(path, format)]
    found = []
    validation = next((name for name in _VALIDATION if name in dataset), None)
    for name in dataset:
        split = "validation" if name == validation else name
        if split in SPLITS:
            found.append(Input(path, format, None if split == "train" else split, str(name)))
        else:
            warn(f"{path}: the split {name!r} is not used")
    return found


def _unreadable(path: str, error: BaseException) -> DataError:
    reason = error_reason(error)[:200]
    return DataError(
        f"cannot read {path}: {reason}; it may be incomplete, copy or download it again"
    )


def read_chunks(path: str) -> Iterator[bytes]:
    """Yield a file in chunks of CHUNK bytes; one with the suffix of a compression is decompressed.

    Raises one of READ_ERRORS if the file is incomplete.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".zst":
        yield from _zstd_chunks(path)
        return
    if suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            if len(members) != 1:
                raise DataError(
                    f"{path} contains {len(members):,} files; extract it and give the folder"
                )
            with archive.open(members[0]) as file:
                yield from iter(lambda: file.read(CHUNK), b"")
        return
    with fsspec.open(path, "rb", compression="infer" if suffix in _COMPRESSED else None) as file:
        yield from iter(lambda: file.read(CHUNK), b"")


def _zstd_chunks(path: str) -> Iterator[bytes]:
    """Decompress frame by frame: streams of the library end silently where a file was cut short."""
    try:
        import zstandard
    except ImportError:
        raise missing_extra("a .zst file", "zstandard") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame, data, held = None, b"", b""
    try:
        with open(path, "rb") as file:
            while data := data or file.read(1 << 14):
                frame = frame or decompressor.decompressobj()
                held += frame.decompress(data)
                data = frame.unused_data
                frame = None if frame.eof else frame
                while len(held) >= CHUNK:
                    yield held[:CHUNK]
                    held = held[CHUNK:]
    except zstandard.ZstdError as error:
        raise OSError(str(error)) from error
    if frame is not None:
        raise EOFError("the file ended within a compressed frame")
    if held:
        yield held


def _text_chunks(path: str) -> Iterator[bytes]:
    """Yield a text file in chunks without its byte order mark; reject UTF-16."""
    chunks = read_chunks(path)
    first = next(chunks, b"")
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16 or not text; convert it to UTF-8")
    if first.startswith(_MARK):
        first = (first + next(chunks, b"")).removeprefix(_MARK)
    yield first
    yield from chunks


def _read_text(path: str, unix_newlines: bool) -> Iterator[Piece]:
    starts, held = True, b""
    for data in _text_chunks(path):
        if unix_newlines:  # also where CRLF is divided between two chunks
            data = held + data
            held = b"\r" if data.endswith(b"\r") else b""
            data = data[: len(data) - len(held)].replace(b"\r\n", b"\n")
        yield Piece(data, starts)
        starts = False
    if held:
        yield Piece(held, False)


def _read_jsonl(path: str, text_field: str | None) -> Iterator[Piece]:
    """Yield the text of each line, which is a JSON object or string. Skips blank lines."""
    field = TextField(path, text_field, "line")
    for number, line in enumerate(_lines(path), 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not line.strip():
                continue
            reason = getattr(error, "msg", None) or getattr(error, "reason", None)
            raise field.error(number, f"invalid JSON ({reason or 'nested too deeply'})") from None
        yield Piece(field.read(record, number), True)


def _lines(path: str) -> Iterator[bytes]:
    rest: list[bytes] = []  # joined once: a line may span many chunks
    for data in _text_chunks(path):
        first, *lines = data.split(b"\n")
        rest.append(first)
        if lines:
            yield b"".join(rest)
            yield from lines[:-1]
            rest = [lines[-1]]
    if any(rest):
        yield b"".join(rest)


def _read_dataset(item: Input) -> Iterator[Piece]:
    """Yield the rows of a file, a saved dataset or a dataset by name, read by `datasets`."""
    if item.format == "saved":
        rows = _load_saved(item.path, item.part)
    elif item.format == "hub":
        rows = _load_hub(item.path, item.part)
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
    field = TextField(item.path, item.text_field)
    for number, row in enumerate(rows, 1):
        yield Piece(field.read(row, number), True)


def _load_saved(path: str, part: str | None) -> Any:
    try:
        dataset = _datasets().load_from_disk(path)
        return dataset if part is None else dataset[part]
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds of errors for damaged folders
        raise DataError(
            f"{path} is not a complete dataset ({error_reason(error)[:200]}); save it again with "
            "save_to_disk"
        ) from error


def _load_hub(name: str, part: str | None) -> Any:
    """Return a dataset by name, as `NAME` or `NAME:CONFIG`; rows are read as they arrive."""
    name, _, config = name.removeprefix(HUB).partition(":")
    try:
        return _datasets().load_dataset(name, config or None, split=part, streaming=True)
    except UserError:
        raise
    except Exception as error:  # of the network, of the hub, of the dataset
        raise DataError(
            f"cannot load the dataset {name}: {error_reason(error)[:200]}; check the name and the "
            "network"
        ) from error


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_extra("this format", "datasets") from None
    datasets.utils.logging.set_verbosity(50)  # its errors are raised as well
    datasets.utils.logging.disable_progress_bar()
    return datasets


class TextField:
    """Takes the text from the records of one file. The first record decides on the field."""

    def __init__(self, name: str, wanted: str | None, unit: str = "row") -> None:
        self._name = name
        self._unit = unit
        self._wanted = wanted
        self._field: str | None = None

    def read(self, record: Any, number: int) -> bytes:
        """Return the text of a record as UTF-8, b"" for null. Raises DataError if there is none."""
        text = record
        if not isinstance(record, str):
            if not isinstance(record, Mapping):
                raise self.error(number, "it is not an object with a text field")
            if self._field is None:
                self._field = self._choose(record)
            text = self._value(record, number)
        if text is None:
            return b""
        if isinstance(text, bytes):
            return text
        if not isinstance(text, str):
            raise self.error(
                number, f"the field {self._field!r} is not text", " or use --data.text-field"
            )
        try:
            return text.encode()
        except UnicodeEncodeError:  # lone surrogates, which JSON can contain
            return _SURROGATES.sub("\ufffd", text).encode()

    def _value(self, record: Mapping[str, Any], number: int) -> Any:
        """Return the value of the field, which may be a dotted path."""
        assert self._field is not None
        if self._field in record:
            return record[self._field]
        value: Any = record
        for key in self._field.split("."):
            if value is None:
                return None
            if not isinstance(value, Mapping) or key not in value:
                shown = _list(record)
                raise self.error(number, f"no field {self._field!r} (its fields: {shown})")
            value = value[key]
        return value

    def _choose(self, record: Mapping[str, Any]) -> str:
        fields = _fields(record)
        if self._wanted is not None:
            if self._wanted in fields:
                return self._wanted
            close = get_close_matches(self._wanted, fields, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise DataError(
                f"{self._name} has no field {self._wanted!r} ({hint}its fields: "
                f"{_list(fields)}); set --data.text-field"
            )
        if "text" in record:
            return "text"
        with_text = [key for key, value in record.items() if isinstance(value, (str, bytes))]
        if len(with_text) == 1:
            return with_text[0]
        problem = "several fields with text" if with_text else "no field with text"
        raise DataError(
            f"{self._name} has {problem} ({_list(with_text or fields)}); choose one with "
            "--data.text-field"
        )

    def error(self, number: int, problem: str, or_else: str = "") -> DataError:
        return DataError(
            f"{self._name}, {self._unit} {number:,}: {problem}; fix or remove it{or_else}"
        )


def _fields(record: Mapping[str, Any], depth: int = 4) -> list[str]:
    """Return the fields of a record, followed by those of nested objects as dotted paths."""
    nested = [
        f"{key}.{inner}"
        for key, value in record.items()
        if isinstance(value, Mapping) and depth > 1
        for inner in _fields(value, depth - 1)
    ]
    return [*record, *nested]


def _list(fields: Iterable[str]) -> str:
    names = list(fields)
    return ", ".join(names[:_SHOWN_FIELDS]) + (", ..." if len(names) > _SHOWN_FIELDS else "")


def python_sources() -> list[Input]:
    """Return the source files of Python's standard library, without tests and empty files."""
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    found = [f for f in root.rglob("*.py") if not excluded & set(f.relative_to(root).parts)]
    return [Input(str(file), "text") for file in sorted(found) if file.stat().st_size > 0]


def store_stdin(config: DataConfig, cache: Path) -> DataConfig:
    """Return the config with "-" replaced by a file that contains standard input.

    The file is named after its content, so that the same input gives the same corpus. A run needs
    the file again when it is resumed.
    """
    names = ("path", "validation_path", "test_path")
    n_given = sum(getattr(config, name).count(STDIN) for name in names)
    if n_given == 0:
        return config
    if n_given > 1:
        raise DataError("standard input (-) can be given only once; store it in a file")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise DataError("processes of torchrun cannot share standard input; store it in a file")
    stored = str(_store(cache / "stdin"))

    def replaced(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(stored if path == STDIN else path for path in paths)

    return replace(
        config,
        path=replaced(config.path),
        validation_path=replaced(config.validation_path),
        test_path=replaced(config.test_path),
    )


def _store(folder: Path) -> Path:
    if sys.stdin.isatty():
        raise DataError("--data.path -: standard input is a terminal; pipe a file into it")
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    waiting = folder / "incoming"
    with (
        atomic_write(waiting) as partial,
        open(partial, "wb") as file,
        progress_bar("reading standard input", None, "B") as advance,
    ):
        while data := sys.stdin.buffer.read(CHUNK):
            digest.update(data)
            file.write(data)
            advance(len(data))
    found = folder / digest.hexdigest()[:16]
    if found.exists():
        waiting.unlink()
    else:
        os.replace(waiting, found)
    return found
