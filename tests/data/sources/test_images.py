"""A folder of images: any format and size, decoded by threads, split by count."""

import os
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from transformer_vq.data.sources import images
from transformer_vq.data.sources.base import SPLITS, DataError
from transformer_vq.data.sources.images import ImageFolder, decode_image
from transformer_vq.data.sources.pixels import images_to_tokens
from transformer_vq.errors import MissingExtraError


def tokens_of(source, split):
    chunks = list(source.chunks(split))
    assert all(p.starts_document and p.n_bytes == 12288 and len(p.tokens) == 12288 for p in chunks)
    return np.stack([p.tokens for p in chunks])


def write_images(folder, n):
    """Write images of unusual sizes, in several formats, to two folders."""
    (folder / "more").mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for i in range(n):
        pixels = generator.integers(0, 256, (30 + 17 * i % 90, 100 - 7 * i % 60, 3), dtype=np.uint8)
        name = f"{i}.{('png', 'jpg', 'JPEG', 'bmp', 'gif', 'tif')[i % 6]}"
        Image.fromarray(pixels).save((folder / "more" if i % 2 else folder) / name)


def prepared(folder):
    source = ImageFolder.from_folder(folder)
    source.setup(folder, folder)
    return source


def all_tokens(source):
    return np.concatenate([tokens_of(source, split) for split in SPLITS])


def test_images_are_resized_with_a_box_filter(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    means = pixels.reshape(64, 2, 64, 3, 3).mean(axis=(1, 3))
    assert np.abs(decode_image(tmp_path / "x.png") - means).max() <= 1  # rounded along each axis


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "I;16", "RGBA", "LA"])
def test_all_pixel_modes_are_converted_to_rgb(tmp_path, mode):
    path = tmp_path / ("x.tif" if mode in ("CMYK", "YCbCr") else "x.png")
    grey = 255 if mode == "1" else 200
    if mode == "I;16":
        Image.fromarray(np.full((9, 200), 200 * 256, dtype=np.uint16)).save(path)
    else:
        image = Image.new("RGB", (9, 200), (grey, grey, grey))
        image.convert(mode, palette=Image.Palette.ADAPTIVE).save(path)
    with Image.open(path) as written:
        assert written.mode == mode
    image = decode_image(path)
    assert (image.shape, image.dtype) == ((64, 64, 3), np.uint8)
    assert (image == grey).all()


def test_transparency_becomes_white(tmp_path):
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "rgba.png")
    Image.new("P", (8, 8), 0).save(tmp_path / "palette.png", transparency=0)
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(tmp_path / "half.png")
    assert (decode_image(tmp_path / "rgba.png") == 255).all()
    assert (decode_image(tmp_path / "palette.png") == 255).all()
    assert (decode_image(tmp_path / "half.png") == (255, 127, 127)).all()


def test_the_exif_orientation_is_applied(tmp_path):
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:32] = 255  # white above, black below
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: upside down
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    assert (decode_image(tmp_path / "x.png")[:32] == 0).all()
    assert (decode_image(tmp_path / "x.png")[32:] == 255).all()


def test_a_folder_is_split_by_count_in_a_fixed_order(tmp_path):
    write_images(tmp_path / "a", 40)
    write_images(tmp_path / "b", 40)
    first, second = prepared(tmp_path / "a"), prepared(tmp_path / "b")
    assert [len(tokens_of(first, split)) for split in SPLITS] == [36, 2, 2]
    assert (all_tokens(first) == all_tokens(second)).all()
    names = [file.name for file in first.files]
    assert names != sorted(names)
    assert (
        all_tokens(first) == images_to_tokens(np.stack([decode_image(f) for f in first.files]))
    ).all()


def test_every_split_has_an_image(tmp_path):
    write_images(tmp_path, 3)
    assert [len(tokens_of(prepared(tmp_path), split)) for split in SPLITS] == [1, 1, 1]


def test_fewer_than_three_images_are_rejected(tmp_path):
    write_images(tmp_path, 2)
    (tmp_path / ".hidden.png").write_bytes((tmp_path / "0.png").read_bytes())
    (tmp_path / "notes.txt").write_text("not an image")
    with pytest.raises(DataError, match="2 readable images, but train, validation and test"):
        ImageFolder.from_folder(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        ImageFolder.from_folder(tmp_path / "0.png")


def test_unreadable_files_are_skipped_with_a_warning_of_one_line(tmp_path, capsys):
    write_images(tmp_path, 4)
    (tmp_path / "web.jpg").write_text("<html>not found</html>")
    jpeg = (tmp_path / "more/1.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    source = ImageFolder.from_folder(tmp_path)
    assert source.n_bytes == 6 * 12288
    source.setup(tmp_path, tmp_path)
    assert source.n_bytes == 4 * 12288
    assert [len(tokens_of(source, split)) for split in SPLITS] == [2, 1, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 of 6 images" in line
    assert "web.jpg" in line or "cut.jpg" in line


def test_a_folder_without_readable_images_is_rejected(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.png").write_text("not an image")
    with pytest.raises(DataError, match="0 readable images, but"):
        prepared(tmp_path)


def test_a_decompression_bomb_is_skipped(tmp_path, monkeypatch, capsys):
    write_images(tmp_path, 3)
    Image.new("L", (500, 500)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20_000)
    assert len(all_tokens(prepared(tmp_path))) == 3
    assert "bomb.png" in capsys.readouterr().err


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_number_of_threads_does_not_change_the_tokens(tmp_path, monkeypatch, capsys, n_threads):
    write_images(tmp_path, 10)
    (tmp_path / "bad.png").write_text("not an image")
    monkeypatch.setattr(images, "N_THREADS", n_threads)
    monkeypatch.setattr(images, "CHUNK", 4)
    source = prepared(tmp_path)
    readable = [file for file in source.files if file.name != "bad.png"]
    assert (
        all_tokens(source) == images_to_tokens(np.stack([decode_image(f) for f in readable]))
    ).all()
    assert capsys.readouterr().err.count("1 of 11 images") == 1


def test_an_interrupt_leaves_no_threads_and_no_files(tmp_path, monkeypatch):
    write_images(tmp_path / "a", 10)
    (tmp_path / "corpus").mkdir()
    source, n_threads = ImageFolder.from_folder(tmp_path / "a"), threading.active_count()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(images, "progress_bar", lambda *_: nullcontext(interrupt))
    with pytest.raises(KeyboardInterrupt):
        source.setup(tmp_path / "corpus", tmp_path)
    assert threading.active_count() == n_threads
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "corpus"]


def test_warnings_of_pillow_are_not_shown(tmp_path, monkeypatch, capsys):
    write_images(tmp_path, 3)
    Image.new("L", (500, 500)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200_000)  # Pillow rejects twice as many
    with pytest.warns(Image.DecompressionBombWarning):
        decode_image(tmp_path / "large.png")
    assert len(all_tokens(prepared(tmp_path))) == 4
    assert capsys.readouterr().err == ""


def test_chunks_requires_setup(tmp_path):
    write_images(tmp_path, 3)
    with pytest.raises(RuntimeError, match="call it before chunks"):
        next(ImageFolder.from_folder(tmp_path).chunks("train"))


def test_missing_pillow_is_reported_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match="pip install pillow"):
        ImageFolder.from_folder(tmp_path)
    with pytest.raises(MissingExtraError, match="pip install pillow"):
        decode_image(tmp_path / "x.png")


def test_a_changed_folder_changes_the_fingerprint(tmp_path):
    write_images(tmp_path, 3)
    before = ImageFolder.from_folder(tmp_path).fingerprint()
    assert ImageFolder.from_folder(tmp_path).fingerprint() == before
    write_images(tmp_path, 4)
    assert ImageFolder.from_folder(tmp_path).fingerprint() != before


def test_broken_links_and_pipes_are_skipped_with_a_warning(tmp_path, capsys):
    write_images(tmp_path, 3)
    (tmp_path / "link.png").symlink_to("nowhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.txt").symlink_to("nowhere.txt")
    assert len(ImageFolder.from_folder(tmp_path).files) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 entries" in line
