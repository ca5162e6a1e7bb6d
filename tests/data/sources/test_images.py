"""Folders of images: any kind and size, decoded by threads, divided by number."""

import os
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from PIL import Image

from transformer_vq.data.sources import images
from transformer_vq.data.sources.base import SPLITS, DataError
from transformer_vq.data.sources.imagenet64 import to_tokens
from transformer_vq.data.sources.images import ImageFolder, decode
from transformer_vq.errors import MissingExtraError


def tokens_of(source, split):
    pieces = list(source.chunks(split))
    assert all(p.begins and p.n_bytes == 12288 and len(p.tokens) == 12288 for p in pieces)
    return np.stack([p.tokens for p in pieces])


def write_images(folder, n):
    """Images of odd sizes, in several formats, in two folders."""
    (folder / "more").mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for i in range(n):
        pixels = generator.integers(0, 256, (30 + 17 * i % 90, 100 - 7 * i % 60, 3), dtype=np.uint8)
        name = f"{i}.{('png', 'jpg', 'JPEG', 'bmp', 'gif', 'tif')[i % 6]}"
        Image.fromarray(pixels).save((folder / "more" if i % 2 else folder) / name)


def prepared(folder):
    source = ImageFolder.of(folder)
    source.setup(folder)
    return source


def all_tokens(source):
    return np.concatenate([tokens_of(source, split) for split in SPLITS])


def test_images_are_squashed_with_the_box_filter(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (128, 192, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    means = pixels.reshape(64, 2, 64, 3, 3).mean(axis=(1, 3))
    assert np.abs(decode(tmp_path / "x.png") - means).max() <= 1  # rounded along each axis


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "I;16", "RGBA", "LA"])
def test_all_kinds_of_pixels_become_red_green_and_blue(tmp_path, mode):
    path = tmp_path / ("x.tif" if mode in ("CMYK", "YCbCr") else "x.png")
    grey = 255 if mode == "1" else 200
    if mode == "I;16":
        Image.fromarray(np.full((9, 200), 200 * 256, dtype=np.uint16)).save(path)
    else:
        image = Image.new("RGB", (9, 200), (grey, grey, grey))
        image.convert(mode, palette=Image.Palette.ADAPTIVE).save(path)
    with Image.open(path) as written:
        assert written.mode == mode
    image = decode(path)
    assert (image.shape, image.dtype) == ((64, 64, 3), np.uint8)
    assert (image == grey).all()


def test_what_is_transparent_is_white(tmp_path):
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(tmp_path / "rgba.png")
    Image.new("P", (8, 8), 0).save(tmp_path / "palette.png", transparency=0)
    Image.new("RGBA", (8, 8), (255, 0, 0, 128)).save(tmp_path / "half.png")
    assert (decode(tmp_path / "rgba.png") == 255).all()
    assert (decode(tmp_path / "palette.png") == 255).all()
    assert (decode(tmp_path / "half.png") == (255, 127, 127)).all()


def test_images_are_turned_the_way_up_they_were_taken(tmp_path):
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:32] = 255  # white above, black below
    exif = Image.Exif()
    exif[0x0112] = 3  # orientation: upside down
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    assert (decode(tmp_path / "x.png")[:32] == 0).all()
    assert (decode(tmp_path / "x.png")[32:] == 255).all()


def test_a_folder_is_divided_by_number_and_always_in_the_same_order(tmp_path):
    write_images(tmp_path / "a", 40)
    write_images(tmp_path / "b", 40)
    first, second = prepared(tmp_path / "a"), prepared(tmp_path / "b")
    assert [len(tokens_of(first, split)) for split in SPLITS] == [36, 2, 2]
    assert (all_tokens(first) == all_tokens(second)).all()
    names = [file.name for file in first.files]
    assert names != sorted(names)
    assert (all_tokens(first) == to_tokens(np.stack([decode(f) for f in first.files]))).all()


def test_every_split_has_a_image(tmp_path):
    write_images(tmp_path, 3)
    assert [len(tokens_of(prepared(tmp_path), split)) for split in SPLITS] == [1, 1, 1]


def test_fewer_than_three_images_are_refused(tmp_path):
    write_images(tmp_path, 2)
    (tmp_path / ".hidden.png").write_bytes((tmp_path / "0.png").read_bytes())
    (tmp_path / "notes.txt").write_text("no image")
    with pytest.raises(DataError, match="2, but train, validation and test"):
        ImageFolder.of(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        ImageFolder.of(tmp_path / "0.png")


def test_unreadable_files_are_left_out_with_one_line_of_warning(tmp_path, capsys):
    write_images(tmp_path, 4)
    (tmp_path / "web.jpg").write_text("<html>not found</html>")
    jpeg = (tmp_path / "more/1.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    source = ImageFolder.of(tmp_path)
    assert source.n_bytes == 6 * 12288
    source.setup(tmp_path)
    assert source.n_bytes == 4 * 12288
    assert [len(tokens_of(source, split)) for split in SPLITS] == [2, 1, 1]
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 of 6 images" in line
    assert "web.jpg" in line or "cut.jpg" in line


def test_no_readable_image_is_an_error(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.png").write_text("no image")
    with pytest.raises(DataError, match="0, but"):
        prepared(tmp_path)


def test_a_image_too_large_to_be_harmless_is_left_out(tmp_path, monkeypatch, capsys):
    write_images(tmp_path, 3)
    Image.new("L", (500, 500)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20_000)
    assert len(all_tokens(prepared(tmp_path))) == 3
    assert "bomb.png" in capsys.readouterr().err


@pytest.mark.parametrize("n_threads", [1, 3])
def test_threads_change_nothing(tmp_path, monkeypatch, capsys, n_threads):
    write_images(tmp_path, 10)
    (tmp_path / "bad.png").write_text("no image")
    monkeypatch.setattr(images, "N_THREADS", n_threads)
    monkeypatch.setattr(images, "CHUNK", 4)
    source = prepared(tmp_path)
    readable = [file for file in source.files if file.name != "bad.png"]
    assert (all_tokens(source) == to_tokens(np.stack([decode(f) for f in readable]))).all()
    assert capsys.readouterr().err.count("1 of 11 images") == 1


def test_no_thread_and_no_file_is_left_when_decoding_is_interrupted(tmp_path, monkeypatch):
    write_images(tmp_path / "a", 10)
    (tmp_path / "corpus").mkdir()
    source, n_threads = ImageFolder.of(tmp_path / "a"), threading.active_count()

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(images, "progress_bar", lambda *_: nullcontext(interrupt))
    with pytest.raises(KeyboardInterrupt):
        source.setup(tmp_path / "corpus")
    assert threading.active_count() == n_threads
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "corpus"]


def test_warnings_of_pillow_are_not_shown(tmp_path, monkeypatch, capsys):
    write_images(tmp_path, 3)
    Image.new("L", (500, 500)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 200_000)  # half of what is refused
    with pytest.warns(Image.DecompressionBombWarning):
        decode(tmp_path / "large.png")
    assert len(all_tokens(prepared(tmp_path))) == 4
    assert capsys.readouterr().err == ""


def test_decoding_comes_before_reading(tmp_path):
    write_images(tmp_path, 3)
    with pytest.raises(RuntimeError, match="call it before chunks"):
        next(ImageFolder.of(tmp_path).chunks("train"))


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'transformer-vq\[image\]'"):
        ImageFolder.of(tmp_path)
    with pytest.raises(MissingExtraError, match=r"pip install 'transformer-vq\[image\]'"):
        decode(tmp_path / "x.png")


def test_a_changed_folder_changes_the_fingerprint(tmp_path):
    write_images(tmp_path, 3)
    before = ImageFolder.of(tmp_path).fingerprint()
    assert ImageFolder.of(tmp_path).fingerprint() == before
    write_images(tmp_path, 4)
    assert ImageFolder.of(tmp_path).fingerprint() != before


def test_broken_links_and_pipes_are_skipped_with_a_warning(tmp_path, capsys):
    write_images(tmp_path, 3)
    (tmp_path / "link.png").symlink_to("nowhere.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "link.txt").symlink_to("nowhere.txt")
    assert len(ImageFolder.of(tmp_path).files) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 entries" in line
