"""ImageNet64: the order of a image's tokens, npz batches read in a stream."""

import os
import random
import zipfile

import numpy as np
import pytest

from transformer_vq.data.sources import imagenet64 as images
from transformer_vq.data.sources.base import DataError
from transformer_vq.data.sources.imagenet64 import ImageNet64, to_images, to_tokens


def random_rows(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 12288), dtype=np.uint8)


def write_batches(folder, *train, test=None, save=np.savez):
    """Batches 1, 2, ... of rows as they are published, and the official validation set."""
    for number, rows in enumerate(train, 1):
        save(folder / f"train_data_batch_{number}.npz", data=rows, mean=np.zeros(3))
    save(folder / "val_data.npz", labels=np.zeros(2), data=random_rows(2) if test is None else test)


def tokens_of(source, split):
    pieces = list(source.chunks(split))
    assert all(p.begins and p.n_bytes == 12288 and len(p.tokens) == 12288 for p in pieces)
    return np.stack([p.tokens for p in pieces]) if pieces else np.zeros((0, 12288))


def interleaved(rows):
    """Red, green and blue planes as pixels, spelled out."""
    return np.stack([rows[:, :4096], rows[:, 4096:8192], rows[:, 8192:]], axis=2).reshape(-1, 12288)


def test_the_planes_of_a_image_become_pixels_in_raster_order(tmp_path):
    row = np.zeros((1, 12288), dtype=np.uint8)
    row[0, [0, 4096, 8192]] = 1, 2, 3  # the pixel in the upper left corner
    row[0, [1, 4097, 8193]] = 4, 5, 6  # the one to its right
    row[0, [64, 4160, 8256]] = 7, 8, 9  # the one below it
    row[0, [4095, 8191, 12287]] = 10, 11, 12  # the lower right corner
    write_batches(tmp_path, random_rows(1), test=row)
    (tokens,) = tokens_of(ImageNet64.of(tmp_path), "test")
    assert tokens[:6].tolist() == [1, 2, 3, 4, 5, 6]
    assert tokens[192:195].tolist() == [7, 8, 9]
    assert tokens[-3:].tolist() == [10, 11, 12]
    (image,) = to_images(tokens[None])
    assert image[0, 1].tolist() == [4, 5, 6]
    assert image[1, 0].tolist() == [7, 8, 9]
    assert (to_tokens(image[None]) == tokens).all()


def test_helpers_refuse_other_shapes_and_values():
    with pytest.raises(ValueError, match=r"\[n, 64, 64, 3\], not uint8 \[1, 32, 32, 3\]"):
        to_tokens(np.zeros((1, 32, 32, 3), dtype=np.uint8))
    with pytest.raises(ValueError, match=r"not float64"):
        to_tokens(np.zeros((1, 64, 64, 3)))
    with pytest.raises(ValueError, match=r"\[n, 12288\], not \[12288\]"):
        to_images(np.zeros(12288, dtype=np.uint8))
    with pytest.raises(ValueError, match="from 0 to 255"):
        to_images(np.full((1, 12288), 256))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_batches_are_one_sequence_whatever_is_read_at_once(tmp_path, monkeypatch, save, chunk):
    monkeypatch.setattr(images, "CHUNK", chunk)
    rows, test = random_rows(40), random_rows(5, seed=1)
    write_batches(tmp_path, rows[:30], rows[30:37], rows[37:], test=test, save=save)
    source = ImageNet64.of(tmp_path)
    assert source.n_bytes == 45 * 12288
    assert source.edges == (37, 40)  # 40 * 1,200,000 / 1,281,167 = 37.5
    assert (tokens_of(source, "train") == interleaved(rows[:37])).all()
    assert (tokens_of(source, "validation") == interleaved(rows[37:])).all()
    assert (tokens_of(source, "test") == interleaved(test)).all()


def test_the_whole_set_is_divided_as_in_the_paper(tmp_path, monkeypatch, capsys):
    write_batches(tmp_path, random_rows(1))
    counts = {"train_data_batch_1.npz": 1_281_167, "val_data.npz": 50_000}
    monkeypatch.setattr(images, "_count", lambda path: counts[path.name])
    assert ImageNet64.of(tmp_path).edges == (1_200_000, 1_281_167)
    assert capsys.readouterr().err == ""


def test_part_of_the_set_is_warned_about_in_one_line(tmp_path, capsys):
    write_batches(tmp_path, random_rows(3))
    ImageNet64.of(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert "3 + 2 images" in line
    assert "cannot be compared" in line


def test_batches_are_ordered_by_number(tmp_path):
    write_batches(tmp_path, random_rows(1), random_rows(1))
    (tmp_path / "train_data_batch_10.npz").write_bytes(
        (tmp_path / "train_data_batch_1.npz").read_bytes()
    )
    (tmp_path / "train_data_batch_1 (copy).npz").write_bytes(b"")
    names = [file.stem for file in ImageNet64.of(tmp_path).files]
    assert names == [f"train_data_batch_{i}" for i in (1, 2, 10)] + ["val_data"]


def test_a_changed_batch_changes_the_fingerprint(tmp_path):
    write_batches(tmp_path, random_rows(3))
    before = ImageNet64.of(tmp_path).fingerprint()
    assert ImageNet64.of(tmp_path).fingerprint() == before
    write_batches(tmp_path, random_rows(4))
    assert ImageNet64.of(tmp_path).fingerprint() != before


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match="absent does not exist"):
        ImageNet64.of(tmp_path / "absent")
    with pytest.raises(DataError, match=r"train_data_batch_1\.npz is not in"):
        ImageNet64.of(tmp_path)
    write_batches(tmp_path, random_rows(1))
    (tmp_path / "val_data.npz").unlink()
    with pytest.raises(DataError, match=r"val_data\.npz is not in"):
        ImageNet64.of(tmp_path)


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
def test_other_arrays_are_refused(tmp_path, arrays, message):
    write_batches(tmp_path, random_rows(1))
    np.savez(tmp_path / "train_data_batch_1.npz", **arrays)
    with pytest.raises(DataError, match=message) as raised:
        ImageNet64.of(tmp_path)
    assert "train_data_batch_1.npz" in str(raised.value)


def test_a_truncated_file_is_named_in_one_line(tmp_path):
    write_batches(tmp_path, random_rows(3))
    path = tmp_path / "train_data_batch_1.npz"
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(DataError, match=r"cannot read .*batch_1\.npz.*download it again") as raised:
        ImageNet64.of(tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damage_within_a_file_is_found_while_it_is_read(tmp_path, save):
    write_batches(tmp_path, random_rows(20), save=save)
    path = tmp_path / "train_data_batch_1.npz"
    content = bytearray(path.read_bytes())
    content[50_000:50_100] = bytes(100)
    path.write_bytes(content)
    source = ImageNet64.of(tmp_path)
    with pytest.raises(DataError, match="cannot read"):
        list(source.chunks("train")), list(source.chunks("validation"))


def test_an_array_shorter_than_its_header_says_is_an_error(tmp_path):
    write_batches(tmp_path, random_rows(20))
    source = ImageNet64.of(tmp_path)
    np.savez(tmp_path / "train_data_batch_1.npz", data=random_rows(10))
    with pytest.raises(DataError, match="ends too early"):
        list(source.chunks("train"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_mutated_files_are_rejected_in_one_line_or_read_alike(tmp_path, save, capsys):
    """Whatever zipfile and numpy raise for them."""
    rows = np.zeros((2, 12288), dtype=np.uint8)
    write_batches(tmp_path, rows, save=save)
    path = tmp_path / "train_data_batch_1.npz"
    content, chance = path.read_bytes(), random.Random(0)
    directory = content.index(b"PK\x01\x02")
    places = [*range(200), *range(directory, len(content))]
    for _ in range(600):
        mutated = bytearray(content)
        for place in chance.sample(places, chance.choice([1, 1, 2, 5])):
            mutated[place] = chance.randrange(256)
        path.write_bytes(mutated)
        try:
            source = ImageNet64.of(tmp_path)
            tokens = [piece.tokens for s in ("train", "validation") for piece in source.chunks(s)]
            message = ""
        except DataError as error:
            tokens, message = list(rows), str(error)
        assert (np.stack(tokens) == rows).all()
        assert "\n" not in message


@pytest.mark.parametrize(
    "shape",
    ["(-1, 12288)", "(10**99, 12288)", "(3, 12288)", "(1, 12288)", "(", "((((", "None", "1"],
)
def test_an_array_header_that_contradicts_the_file_is_an_error(tmp_path, shape):
    write_batches(tmp_path, random_rows(2))
    path = tmp_path / "train_data_batch_1.npz"
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(118)[:117]
    data = b"\x93NUMPY\x01\x00" + b"v\x00" + header.encode() + b"\n" + bytes(2 * 12288)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", data)
    with pytest.raises(DataError, match="train_data_batch_1") as raised:
        ImageNet64.of(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_batch_that_is_not_a_regular_file_is_named(tmp_path):
    write_batches(tmp_path, random_rows(2))
    path = tmp_path / "train_data_batch_1.npz"
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"batch_1\.npz is a folder"):
        ImageNet64.of(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(DataError, match="neither a regular file nor a folder"):
        ImageNet64.of(tmp_path)
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(DataError, match="broken symbolic link"):
        ImageNet64.of(tmp_path)
