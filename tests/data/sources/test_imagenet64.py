"""ImageNet64: the token order of an image, and npz files read in chunks."""

import os
import random
import zipfile

import numpy as np
import pytest

from transformer_vq.data.sources import imagenet64
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.imagenet64 import ImageNet64
from transformer_vq.data.sources.pixels import images_to_tokens, tokens_to_images


def random_rows(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 12288), dtype=np.uint8)


def write_files(folder, *train, test=None, save=np.savez):
    """Write npz files 1, 2, ... of rows as published, and the official validation set."""
    for number, rows in enumerate(train, 1):
        save(folder / f"train_data_batch_{number}.npz", data=rows, mean=np.zeros(3))
    save(folder / "val_data.npz", labels=np.zeros(2), data=random_rows(2) if test is None else test)


def tokens_of(source, split):
    chunks = list(source.chunks(split))
    assert all(p.starts_document and p.n_bytes == 12288 and len(p.tokens) == 12288 for p in chunks)
    return np.stack([p.tokens for p in chunks]) if chunks else np.zeros((0, 12288))


def interleaved(rows):
    """Return red, green and blue planes as pixels, by explicit slicing."""
    return np.stack([rows[:, :4096], rows[:, 4096:8192], rows[:, 8192:]], axis=2).reshape(-1, 12288)


def test_color_planes_become_pixels_in_raster_order(tmp_path):
    row = np.zeros((1, 12288), dtype=np.uint8)
    row[0, [0, 4096, 8192]] = 1, 2, 3  # the pixel in the upper left corner
    row[0, [1, 4097, 8193]] = 4, 5, 6  # the one to its right
    row[0, [64, 4160, 8256]] = 7, 8, 9  # the one below it
    row[0, [4095, 8191, 12287]] = 10, 11, 12  # the lower right corner
    write_files(tmp_path, random_rows(1), test=row)
    (tokens,) = tokens_of(ImageNet64.from_folder(tmp_path), "test")
    assert tokens[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens[192:195].tolist() == [7, 8, 9]
    assert tokens[-3:].tolist() == [10, 11, 12]
    (image,) = tokens_to_images(tokens[None])
    assert image[0, 1].tolist() == [4, 5, 6]
    assert image[1, 0].tolist() == [7, 8, 9]
    assert (images_to_tokens(image[None]) == tokens).all()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_splits_are_ranges_of_all_files_for_any_chunk_size(tmp_path, monkeypatch, save, chunk):
    monkeypatch.setattr(imagenet64, "CHUNK", chunk)
    rows, test = random_rows(40), random_rows(5, seed=1)
    write_files(tmp_path, rows[:30], rows[30:37], rows[37:], test=test, save=save)
    source = ImageNet64.from_folder(tmp_path)
    assert source.n_bytes == 45 * 12288
    assert source.edges == (37, 40)  # 40 * 1,200,000 / 1,281,167 = 37.5
    assert (tokens_of(source, "train") == interleaved(rows[:37])).all()
    assert (tokens_of(source, "validation") == interleaved(rows[37:])).all()
    assert (tokens_of(source, "test") == interleaved(test)).all()


def test_the_complete_dataset_is_split_as_in_the_paper(tmp_path, monkeypatch, capsys):
    write_files(tmp_path, random_rows(1))
    counts = {"train_data_batch_1.npz": 1_281_167, "val_data.npz": 50_000}
    monkeypatch.setattr(imagenet64, "_count", lambda path: counts[path.name])
    assert ImageNet64.from_folder(tmp_path).edges == (1_200_000, 1_281_167)
    assert capsys.readouterr().err == ""


def test_an_incomplete_dataset_gives_a_warning_of_one_line(tmp_path, capsys):
    write_files(tmp_path, random_rows(3))
    ImageNet64.from_folder(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 + 2 images" in line
    assert "cannot be compared" in line


def test_files_are_ordered_by_number(tmp_path):
    write_files(tmp_path, random_rows(1), random_rows(1))
    (tmp_path / "train_data_batch_10.npz").write_bytes(
        (tmp_path / "train_data_batch_1.npz").read_bytes()
    )
    (tmp_path / "train_data_batch_1 (copy).npz").write_bytes(b"")
    names = [file.stem for file in ImageNet64.from_folder(tmp_path).files]
    assert names == [f"train_data_batch_{i}" for i in (1, 2, 10)] + ["val_data"]


def test_a_changed_file_changes_the_fingerprint(tmp_path):
    write_files(tmp_path, random_rows(3))
    before = ImageNet64.from_folder(tmp_path).fingerprint()
    assert ImageNet64.from_folder(tmp_path).fingerprint() == before
    write_files(tmp_path, random_rows(4))
    assert ImageNet64.from_folder(tmp_path).fingerprint() != before


def test_missing_files_are_rejected(tmp_path):
    with pytest.raises(DataError, match="absent does not exist"):
        ImageNet64.from_folder(tmp_path / "absent")
    with pytest.raises(DataError, match=r"train_data_batch_1\.npz is not in"):
        ImageNet64.from_folder(tmp_path)
    write_files(tmp_path, random_rows(1))
    (tmp_path / "val_data.npz").unlink()
    with pytest.raises(DataError, match=r"val_data\.npz is not in"):
        ImageNet64.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"data": np.zeros((2, 3072), np.uint8)}, r"uint8 \[2, 3072\].*other sizes"),
        ({"data": np.zeros((2, 12288), np.int64)}, r"int64 \[2, 12288\]"),
        ({"data": np.zeros(12288, np.uint8)}, r"uint8 \[12288\]"),
        ({"data": np.asfortranarray(random_rows(2))}, "column order"),
        ({"other": np.zeros((2, 12288), np.uint8)}, "has no array `data`"),
    ],
    ids=["width", "dtype", "rank", "order", "name"],
)
def test_other_arrays_are_rejected(tmp_path, arrays, message):
    write_files(tmp_path, random_rows(1))
    np.savez(tmp_path / "train_data_batch_1.npz", **arrays)
    with pytest.raises(DataError, match=message) as raised:
        ImageNet64.from_folder(tmp_path)
    assert "train_data_batch_1.npz" in str(raised.value)


def test_a_truncated_file_is_rejected_in_one_line(tmp_path):
    write_files(tmp_path, random_rows(3))
    path = tmp_path / "train_data_batch_1.npz"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match=r"cannot read .*batch_1\.npz.*download it again") as raised:
        ImageNet64.from_folder(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_corrupt_data_is_detected_while_reading(tmp_path, save):
    write_files(tmp_path, random_rows(20), save=save)
    path = tmp_path / "train_data_batch_1.npz"
    content = bytearray(path.read_bytes())
    content[50_000:50_100] = bytes(100)
    path.write_bytes(content)
    source = ImageNet64.from_folder(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        list(source.chunks("train")), list(source.chunks("validation"))


def test_a_file_that_becomes_shorter_is_rejected(tmp_path):
    write_files(tmp_path, random_rows(20))
    source = ImageNet64.from_folder(tmp_path)
    np.savez(tmp_path / "train_data_batch_1.npz", data=random_rows(10))
    with pytest.raises(DataError, match="ends too early"):
        list(source.chunks("train"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_mutated_files_are_rejected_in_one_line_or_read_correctly(tmp_path, save, capsys):
    """No other error of zipfile or numpy escapes."""
    rows = np.zeros((2, 12288), dtype=np.uint8)
    write_files(tmp_path, rows, save=save)
    path = tmp_path / "train_data_batch_1.npz"
    content, rng = path.read_bytes(), random.Random(0)
    directory = content.index(b"PK\x01\x02")
    offsets = [*range(200), *range(directory, len(content))]
    for _ in range(600):
        mutated = bytearray(content)
        for offset in rng.sample(offsets, rng.choice([1, 1, 2, 5])):
            mutated[offset] = rng.randrange(256)
        path.write_bytes(mutated)
        try:
            source = ImageNet64.from_folder(tmp_path)
            tokens = [chunk.tokens for s in ("train", "validation") for chunk in source.chunks(s)]
            message = ""
        except DataError as error:
            tokens, message = list(rows), str(error)
        assert (np.stack(tokens) == rows).all()
        assert "\n" not in message


@pytest.mark.parametrize(
    "shape",
    ["(-1, 12288)", "(10**99, 12288)", "(3, 12288)", "(1, 12288)", "(", "((((", "None", "1"],
)
def test_an_array_header_that_does_not_match_the_file_is_rejected(tmp_path, shape):
    write_files(tmp_path, random_rows(2))
    path = tmp_path / "train_data_batch_1.npz"
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(118)[:117]
    data = b"\x93NUMPY\x01\x00" + b"v\x00" + header.encode() + b"\n" + bytes(2 * 12288)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", data)
    with pytest.raises(DataError, match="train_data_batch_1") as raised:
        ImageNet64.from_folder(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_path_that_is_not_a_regular_file_is_rejected(tmp_path):
    write_files(tmp_path, random_rows(2))
    path = tmp_path / "train_data_batch_1.npz"
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"batch_1\.npz is a folder"):
        ImageNet64.from_folder(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DataError, match="neither a regular file nor a folder"):
        ImageNet64.from_folder(tmp_path)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(DataError, match="broken symbolic link"):
        ImageNet64.from_folder(tmp_path)
