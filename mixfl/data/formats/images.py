"""Images: a folder per class, or a CSV file with path, label and client.

    image   uint8 [height, width, 3]
    label   int32, the class: numbers as they are, names by their place in order

Paths in a CSV are relative to its folder. Without a client column, and in folders, a partition
says how examples are dealt to clients.
"""

import csv
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.reading import lines, plain, whole, wrong
from mixfl.data.formats.spill import natural
from mixfl.errors import MixflError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def read_image(path: Path, size: int | None) -> np.ndarray:
    """uint8 [height, width, 3], brought to size x size if one is given."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                rgb = image.convert("RGB")
                if size is not None and rgb.size != (size, size):
                    rgb = rgb.resize((size, size), Image.Resampling.BILINEAR)
                return np.asarray(rgb)
    except Exception as error:  # Pillow's readers raise whatever a damaged file leads them to
        what = "is not an image that Pillow knows" if "identify" in str(error) else str(error)
        raise MixflError(f"{path}: the image cannot be read ({what}): fetch it again.") from None


class Images(Format):
    options = ("size", "client", "partition")

    def __init__(self, *args):
        super().__init__(*args)
        self.natural = self.source.is_file()
        self.classes: set[str] = set()
        self.shape: tuple[int, ...] | None = None

    def records(self) -> Iterator[Record]:
        found = self.from_csv() if self.source.is_file() else self.from_folders()
        for client, path, label in found:
            self.classes.add(label)
            yield Record(client, f"{label}\0{path}".encode("utf-8", "surrogateescape"), label=label)
        self.number_classes()

    def from_folders(self) -> Iterator[tuple[str, str, str]]:
        classes = sorted(p for p in self.source.iterdir() if p.is_dir())
        for i, folder in enumerate(classes):
            for path in sorted(folder.rglob("*")):
                if path.suffix.lower() in SUFFIXES:
                    yield "all", str(path), plain(folder.name)
                elif path.is_file():
                    self.skipped["files that are no images"] += 1
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
            path = self.source.parent / row["path"]
            if "\0" in row["path"] or not path.is_file():
                raise wrong(self.source, number, f"there is no file {row['path']!r}.")
            yield plain(row.get(client) or "all") or "all", str(path), plain(row["label"])

    def number_classes(self) -> None:
        numbers = {label: whole(label, 0) for label in self.classes}
        if None in numbers.values() or len(set(numbers.values())) < len(numbers):
            names = sorted(self.classes, key=lambda label: (natural(label), label))
            numbers = {label: i for i, label in enumerate(names)}
            self.beside["labels.json"] = names
        self.numbers = numbers

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        pairs = [p.decode("utf-8", "surrogateescape").split("\0") for p in payloads]
        images = []
        for _, path in pairs:
            image = read_image(Path(path), self.given.size)
            self.shape = self.shape or image.shape
            if image.shape != self.shape:
                raise MixflError(
                    f"{path} has {image.shape[1]}x{image.shape[0]} pixels, those before it "
                    f"{self.shape[1]}x{self.shape[0]}: bring all to one size with the option size."
                )
            images.append(image)
        labels = np.array([self.numbers[label] for label, _ in pairs], np.int32)
        return {"image": np.stack(images), "label": labels}


def csv_rows(path: Path, meter) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file with a header, with the number of their last line."""
    at = 0

    def numbered() -> Iterator[str]:
        nonlocal at
        for number, line in lines(path, meter):
            at = number
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
                    path, at, f"has {len(row)} fields, the header {len(header)}; is the file "
                    "cut off?"
                )  # fmt: skip
            yield at, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise wrong(path, at, f"is not valid CSV ({error}).") from None
