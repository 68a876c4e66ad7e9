"""Images: a folder per class, or a CSV file with path, label and client.

    image   uint8 [height, width, 3]
    label   int32, the class: numbers stay as they are, names are numbered in order

Paths in a CSV are relative to its folder (or to the one named by the option images) and must stay
in it. For folders, and for a CSV without a client column, the option partition assigns examples to
clients.
"""

import csv
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.reading import lines, name, plain, whole, wrong
from mixfl.data.formats.spill import natural
from mixfl.data.limits import COLUMNS, PIXELS
from mixfl.errors import MixflError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# Pillow knows more, but some run programs (EPS: Ghostscript), and most are hardly tested.
READ = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")


def read_image(
    path: Path | BinaryIO, size: int | None, gray: bool = False, called: str = ""
) -> np.ndarray:
    """uint8 [height, width, 3], resized to size x size if a size is given. With `gray`, images
    without colors are [height, width]. `called`: the name for errors."""
    from PIL import Image

    name = called or path

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=READ) as image:
                if image.width * image.height > PIXELS:
                    raise Image.DecompressionBombError
                if image.mode.startswith(("I", "F")):  # converting would cut them to 255
                    raise ValueError(f"its pixels are not 8-bit: {image.mode}")
                rgb = image.convert("L" if gray and image.mode in ("1", "L") else "RGB")
                if size is not None and rgb.size != (size, size):
                    rgb = rgb.resize((size, size), Image.Resampling.BILINEAR)
                return np.asarray(rgb)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise MixflError(
            f"{name}: the image has more than {PIXELS:,} pixels: make it smaller."
        ) from None
    except Exception as error:  # a damaged file can make Pillow raise anything
        unknown = f"Pillow finds none of {', '.join(READ)} in it"
        what = unknown if "identify" in str(error) else str(error)
        raise MixflError(f"{name}: the image cannot be read ({what}): fetch it again.") from None


class Images(Format):
    options = ("size", "client", "partition", "images")

    def __init__(self, *args):
        super().__init__(*args)
        self.natural = self.source.is_file()
        if self.given.images and not self.natural:
            raise MixflError(
                f"the option images is for the paths of a CSV file, but {self.source} is a folder."
            )
        self.base = Path(self.given.images or self.source.parent)
        self.real_base = os.path.realpath(self.base)
        if self.natural and not self.base.is_dir():
            raise MixflError(f"{self.base}, the option images, is not a folder.")
        self.classes: set[str] = set()
        self.shape: tuple[int, ...] | None = None

    def records(self) -> Iterator[Record]:
        rows = self.from_csv() if self.source.is_file() else self.from_folders()
        for client, path, label in rows:
            self.classes.add(label)
            yield Record(client, f"{label}\0{path}".encode("utf-8", "surrogateescape"), label=label)
        self.number_classes()

    def from_folders(self) -> Iterator[tuple[str, str, str]]:
        classes = sorted(p for p in self.source.iterdir() if p.is_dir())
        for i, folder in enumerate(classes):
            for path in sorted(folder.rglob("*")):
                if not path.is_file():
                    continue
                if path.suffix.lower() in SUFFIXES:
                    yield "all", str(path), plain(folder.name)
                else:
                    self.skipped["files that are not images"] += 1
            self.meter.at(i + 1, len(classes), "reading folders")
        if not self.classes:
            raise MixflError(
                f"{self.source} has no folder with images in it: expected a folder per class, "
                "or give a CSV file with the columns path, label, client."
            )

    def from_csv(self) -> Iterator[tuple[str, str, str]]:
        client = self.given.client or "client"
        wanted = ["path", "label"] + ([] if self.given.partition else [client])
        for number, row in csv_rows(self.source, self.meter):
            missing = [c for c in wanted if not row.get(c)]
            if missing:
                raise wrong(
                    self.source, number, f"has nothing in {', '.join(missing)} (the columns are "
                    f"{', '.join(row)}): expected {', '.join(wanted)}."
                )  # fmt: skip
            path = self.image(number, row["path"])
            yield name(row.get(client)) or "all", str(path), plain(row["label"])

    def image(self, number: int, given: str) -> Path:
        """The file named in a line. It must be in the folder."""
        path = self.base / given
        if "\0" not in given and not Path(os.path.realpath(path)).is_relative_to(self.real_base):
            raise wrong(
                self.source, number, f"{given!r} leads out of {self.base}: put the images there, "
                "or name the folder that has all of them with the option images."
            )  # fmt: skip
        if "\0" in given or not path.is_file():
            raise wrong(self.source, number, f"there is no file {given!r}.")
        return path

    def number_classes(self) -> None:
        numbers = {label: whole(label, 0) for label in self.classes}
        if None in numbers.values() or len(set(numbers.values())) < len(numbers):
            names = sorted(self.classes, key=lambda label: (natural(label), label))
            numbers = {label: i for i, label in enumerate(names)}
            self.extra_files["labels.json"] = names
        self.numbers = numbers

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        pairs = [p.decode("utf-8", "surrogateescape").split("\0") for p in payloads]
        images = []
        for _, path in pairs:
            image = read_image(Path(path), self.given.size)
            self.shape = self.shape or image.shape
            if image.shape != self.shape:
                raise MixflError(
                    f"{path} has {image.shape[1]}x{image.shape[0]} pixels, but earlier images have "
                    f"{self.shape[1]}x{self.shape[0]}: resize all of them with the option size."
                )
            images.append(image)
        labels = np.array([self.numbers[label] for label, _ in pairs], np.int32)
        return {"image": np.stack(images), "label": labels}


def csv_rows(path: Path, meter) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file with a header, each with the number of its last line."""
    at = 0

    def numbered() -> Iterator[str]:
        nonlocal at
        for number, line in lines(path, meter):
            at = number
            if line.count(",") >= COLUMNS:
                raise wrong(path, number, f"has more than {COLUMNS:,} columns.")
            yield line + "\n"

    rows = csv.reader(numbered(), strict=True)
    try:
        header = [column.strip() for column in next(rows, [])]
        if not any(header) or len(set(header)) < len(header):
            raise wrong(path, 1, f"expected a header of different names, found {header[:20]}.")
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise wrong(
                    path, at, f"has {len(row)} fields, but the header has {len(header)}; is the "
                    "file truncated?"
                )  # fmt: skip
            yield at, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise wrong(path, at, f"is not valid CSV ({error}).") from None
