"""The files of a prepared corpus, written from a data source in one pass.

A corpus is a folder with `meta.json` and two files per split: `<split>.bin` with the tokens, and
`<split>.starts.npy` with the index of the first token of each document. A vocabulary is stored as
`tokenizer.model` or `tokenizer.json`. `meta.json` records the size and SHA-256 of every other file.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from transformer_vq.data.sources.base import DataError, Source
from transformer_vq.data.verification import RecordedFile, mark_verified, record_of
from transformer_vq.files import write_verified_json
from transformer_vq.progress import progress_bar

META = "meta.json"
FORMAT = 4  # increased whenever the same data would give different files


def source_digest(source: Source, dataset: str, fingerprint: list[object]) -> str:
    """Return a digest that identifies the source data and the file format of a corpus."""
    values = json.dumps([FORMAT, dataset, source.vocab_size, fingerprint])
    return hashlib.sha256(values.encode()).hexdigest()[:16]


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest unsigned integer type for all tokens of a vocabulary."""
    if vocab_size <= 1 << 8:
        return np.uint8
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def write_corpus(source: Source, dataset: str, folder: Path, end_of_document: bool = False) -> None:
    """Write all files of a corpus; `folder` may already contain files of `source.setup`.

    end_of_document: whether a token follows each document.
    """
    splits, files, tokens_by_part = {}, {}, {}
    digest, dtype = hashlib.sha256(), token_dtype(source.vocab_size)
    with progress_bar(f"writing {dataset}", source.n_bytes, "B") as advance:
        for name in source.splits:
            starts, parts, n_tokens, n_bytes, n_words = [], [0], 0, 0, 0
            with RecordedFile(folder / f"{name}.bin") as file:
                for chunk in source.chunks(name):
                    if chunk.starts_document:
                        starts.append(n_tokens)
                    data = chunk.tokens.astype(dtype).tobytes()
                    file.write(data)
                    digest.update(data)
                    n_tokens += len(chunk.tokens)
                    parts += [0] * (chunk.part + 1 - len(parts))
                    parts[chunk.part] += len(chunk.tokens)
                    n_bytes += chunk.n_bytes
                    n_words += chunk.n_words
                    advance(chunk.n_bytes)
            files[f"{name}.bin"] = file.record
            if n_tokens == 0:
                raise DataError(
                    f"the {name} split of {dataset} would be empty: {source.n_bytes:,} bytes are "
                    f"too few for {', '.join(source.splits)}; use more data"
                )
            digest.update(np.array(parts, dtype=np.int64).tobytes())
            digest.update(np.array(starts, dtype=np.int64).tobytes())
            with RecordedFile(folder / f"{name}.starts.npy") as file:
                np.save(file, np.array(starts, dtype=np.int64))
            files[f"{name}.starts.npy"] = file.record
            splits[name] = {
                "tokens": n_tokens,
                "documents": len(starts),
                "bytes": n_bytes,
                "words": n_words if source.has_words else None,
            }
            tokens_by_part[name] = parts
    for path in sorted(folder.iterdir()):  # the files of `setup`
        if path.name not in files:
            files[path.name] = record_of(path)
    meta = {
        "format": FORMAT,
        "dataset": dataset,
        "made_from": source_digest(source, dataset, source.fingerprint()),
        "vocab_size": source.vocab_size,
        "bos": source.bos,
        "tokens_sha256": digest.hexdigest(),
        "splits": splits,
        "tokens_by_part": tokens_by_part,
        "end_of_document": end_of_document,
        "files": files,
    }
    write_verified_json(folder / META, meta)
    mark_verified(folder, files)
