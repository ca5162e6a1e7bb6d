"""Images: a folder of any format and size, split by count, and ImageNet64's npz files."""

from pathlib import Path

import numpy as np
import pytest
from data_helpers import rejection
from PIL import Image

from transformer_vq.config import DataConfig
from transformer_vq.data import images
from transformer_vq.data.images import decode_image, images_to_tokens, tokens_to_images
from transformer_vq.data.paths import SPLITS
from transformer_vq.data.prepare import prepare


def prepared(folder, dataset="images"):
    """Return the images of each split as rows of tokens."""
    cache = str(folder.parent / f"cache-{folder.name}")
    corpus = prepare(DataConfig(dataset, str(folder), cache=cache))
    assert (corpus.vocab_size, corpus.bos) == (256, 0)
    rows = {name: corpus.split(name).tokens.reshape(-1, 12288) for name in corpus.sizes}
    for name, size in corpus.sizes.items():
        assert (size.documents, size.bytes, size.words) == (len(rows[name]), size.tokens, None)
    return rows


def sorted_rows(rows):
    return sorted(map(bytes, rows))


def write_images(folder, n):
    """Write images of unusual sizes, in several formats, to two folders."""
    (folder / "more").mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for i in range(n):
        pixels = generator.integers(0, 256, (30 + 17 * i % 90, 100 - 7 * i % 60, 3), dtype=np.uint8)
        name = f"{i}.{('png', 'jpg', 'JPEG', 'bmp', 'gif', 'tif')[i % 6]}"
        Image.fromarray(pixels).save((folder / "more" if i % 2 else folder) / name)


def test_images_are_resized_with_a_box_filter(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    means = pixels.reshape(64, 2, 64, 3, 3).mean(axis=(1, 3))
    assert np.abs(decode_image(tmp_path / "x.png") - means).max() <= 1  # rounded along each axis


@pytest.mark.parametrize("mode", ["1", "P", "CMYK", "I;16", "LA"])
def test_all_pixel_modes_are_converted_to_rgb(tmp_path, mode):
    path, grey = tmp_path / "x.tif", 255 if mode == "1" else 200
    if mode == "I;16":
        Image.fromarray(np.full((9, 200), 200 * 256, dtype=np.uint16)).save(path)
    else:
        image = Image.new("RGB", (9, 200), (grey, grey, grey))
        image.convert(mode, palette=Image.Palette.ADAPTIVE).save(path)
    with Image.open(path) as written:
        assert written.mode == mode
    assert np.array_equal(decode_image(path), np.full((64, 64, 3), grey, np.uint8))


def test_transparency_becomes_white_and_the_orientation_is_applied(tmp_path):
    Image.new("P", (8, 8), 0).save(tmp_path / "palette.png", transparency=0)
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(tmp_path / "half.png")
    assert (decode_image(tmp_path / "palette.png") == 255).all()
    assert (decode_image(tmp_path / "half.png") == (255, 127, 127)).all()
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:32] = 255  # white above, black below
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: upside down
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    assert (decode_image(tmp_path / "x.png") == 255 - pixels).all()


def test_a_folder_is_split_by_count_and_content(tmp_path):
    write_images(tmp_path / "a", 40)
    write_images(tmp_path / "b", 40)
    (tmp_path / "b" / "0.png").rename(tmp_path / "b" / "renamed.png")
    first, second = prepared(tmp_path / "a"), prepared(tmp_path / "b")
    assert [len(first[split]) for split in SPLITS] == [36, 2, 2]
    assert all((first[split] == second[split]).all() for split in SPLITS)
    files = [path for path in (tmp_path / "a").rglob("*.*") if path.is_file()]
    want = images_to_tokens(np.stack([decode_image(file) for file in files]))
    assert sorted_rows(np.concatenate(list(first.values()))) == sorted_rows(want)


def test_too_few_images_are_rejected(tmp_path):
    write_images(tmp_path / "a", 2)
    (tmp_path / "empty").mkdir()
    assert "0 readable images" in rejection(prepared, tmp_path / "empty")
    (tmp_path / "a" / ".hidden.png").write_bytes((tmp_path / "a" / "0.png").read_bytes())
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "a" / "bad.png").write_text("not an image")
    message = rejection(prepared, tmp_path / "a")
    assert "2 readable images, but train, validation and test" in message
    assert "is not a folder" in rejection(prepared, tmp_path / "a" / "0.png")
    assert "neither a regular file nor a folder" in rejection(decode_image, Path("/dev/full"))
    write_images(tmp_path / "b", 3)
    assert [len(prepared(tmp_path / "b")[split]) for split in SPLITS] == [1, 1, 1]


def test_unreadable_files_are_skipped_with_a_warning_of_one_line(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a"
    write_images(folder, 4)
    (folder / "web.jpg").write_text("<html>not found</html>")
    jpeg = (folder / "more/1.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    Image.new("L", (500, 500)).save(folder / "bomb.png")
    (folder / "link.png").symlink_to("nowhere.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20_000)
    assert [len(rows) for rows in prepared(folder).values()] == [2, 1, 1]
    links, unreadable = capsys.readouterr().err.splitlines()
    assert "1 entries" in links
    assert "3 of 7 images" in unreadable


def random_rows(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 12288), dtype=np.uint8)


def write_files(folder, *train, test=None, save=np.savez):
    """Write npz files 1, 2, ... of rows as published, and the official validation set."""
    for number, rows in enumerate(train, 1):
        save(folder / f"train_data_batch_{number}.npz", data=rows, mean=np.zeros(3))
    save(folder / "val_data.npz", labels=np.zeros(2), data=random_rows(2) if test is None else test)


def interleaved(rows):
    """Return red, green and blue planes as pixels, by explicit slicing."""
    return np.stack([rows[:, :4096], rows[:, 4096:8192], rows[:, 8192:]], axis=2).reshape(-1, 12288)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "npz").mkdir()
    return tmp_path / "npz"


@pytest.mark.parametrize(("save", "chunk"), [(np.savez, 3), (np.savez_compressed, 256)])
def test_splits_are_ranges_of_all_files_for_any_chunk_size(
    folder, monkeypatch, save, chunk, capsys
):
    monkeypatch.setattr(images, "CHUNK", chunk)
    rows, test = random_rows(40), random_rows(5, seed=1)
    write_files(folder, rows[:30], rows[30:37], rows[37:], test=test, save=save)
    (folder / "train_data_batch_1 (copy).npz").write_bytes(b"")
    found = prepared(folder, "imagenet64")
    assert sorted_rows(found["train"]) == sorted_rows(interleaved(rows[:37]))
    assert sorted_rows(found["validation"]) == sorted_rows(interleaved(rows[37:]))
    assert sorted_rows(found["test"]) == sorted_rows(interleaved(test))
    assert (images_to_tokens(tokens_to_images(found["test"])) == found["test"]).all()
    (line,) = capsys.readouterr().err.splitlines()
    assert "40 + 5 images" in line
    assert "cannot be compared" in line


def test_the_complete_dataset_is_split_as_in_the_paper(folder, monkeypatch, capsys):
    write_files(folder, random_rows(1))
    counts = {"train_data_batch_1.npz": 1_281_167, "val_data.npz": 50_000}
    monkeypatch.setattr(images, "_count", lambda path: counts[path.name])
    found = [(x.split, x.first, x.last) for x in images.find_imagenet64(folder)]
    assert found == [
        ("train", 0, 1_200_000),
        ("validation", 1_200_000, 1_281_167),
        ("test", 0, 50_000),
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"data": np.zeros((2, 3072), np.uint8)}, "uint8 [2, 3072]"),
        ({"data": np.zeros((2, 12288), np.int64)}, "int64 [2, 12288]"),
        ({"data": np.asfortranarray(random_rows(2))}, "in row order"),
        ({"other": np.zeros((2, 12288), np.uint8)}, "has no array `data`"),
    ],
    ids=["width", "dtype", "order", "name"],
)
def test_other_arrays_and_missing_files_are_rejected(folder, arrays, message):
    assert "train_data_batch_1.npz is not in" in rejection(prepared, folder, "imagenet64")
    write_files(folder, random_rows(1))
    np.savez(folder / "train_data_batch_1.npz", **arrays)
    assert message in rejection(prepared, folder, "imagenet64")
    path = folder / "train_data_batch_1.npz"
    path.write_bytes(path.read_bytes()[:-30])
    assert f"cannot read {path}" in rejection(prepared, folder, "imagenet64")
