"""CelebA as its authors publish it: aligned images and three text files.

    image     uint8 [size, size, 3]
    smiling   uint8, 1 or 0

A client is an identity. Images may have any size. Rows whose image is missing are skipped.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mixfl.data.formats.base import Format, Record
from mixfl.data.formats.images import read_image
from mixfl.data.formats.reading import find, lines, whole, wrong
from mixfl.data.formats.spill import Lookup
from mixfl.data.limits import SHORT_LINE
from mixfl.errors import MixflError

ATTRIBUTES, IDENTITIES = "list_attr_celeba.txt", "identity_CelebA.txt"
PARTITION = "list_eval_partition.txt"
PARTS = ("train", "valid", "test")


class CelebA(Format):
    options = ("size", "partition")
    parts = PARTS
    group = 3  # as in the paper

    def __init__(self, *args):
        super().__init__(*args)
        folders = [self.source / name for name in ("img_align_celeba", "Img/img_align_celeba")]
        self.folder = next((path for path in folders if path.is_dir()), self.source)

    def records(self) -> Iterator[Record]:
        official = self.given.split is not None and self.given.split.by == "official"
        identities, parts = Lookup(), Lookup()
        try:
            people = self.file(IDENTITIES)
            identities.fill(self.pairs(people, "image identity"))
            if official:
                partition = self.file(PARTITION)
                parts.fill(self.pairs(partition, "image 0|1|2", 2))
            for number, image, smiling in self.attributes():
                if not (self.folder / image).is_file():
                    self.skipped["rows without an image"] += 1
                    continue
                person, part = identities.get(image), parts.get(image)
                if person is None or (official and part is None):
                    other = people if person is None else partition
                    raise MixflError(
                        f"{other} has no row for {image}, which is in line {number} of "
                        f"{ATTRIBUTES}: is the file truncated?"
                    )
                place = PARTS[int(part)] if part is not None else ""
                yield Record(person, f"{smiling}{image}".encode(), 0, str(smiling), place)
        finally:
            identities.close()
            parts.close()

    def file(self, name: str) -> Path:
        path = find(self.source, name, f"Anno/{name}", f"Eval/{name}")
        if path is None:
            raise MixflError(
                f"{self.source} has no {name}: expected a folder with {ATTRIBUTES}, {IDENTITIES}, "
                f"{PARTITION} and img_align_celeba, as CelebA's authors publish them."
            )
        return path

    def pairs(self, path: Path, kind: str, high: int = 2**31 - 1) -> Iterator[tuple[str, str]]:
        for number, line in lines(path, self.meter, longest=SHORT_LINE):
            fields = line.split()
            if len(fields) != 2 or whole(fields[1], 0, high) is None:
                raise wrong(path, number, f"expected '{kind}', found {line[:60]!r}.")
            yield fields[0], fields[1]

    def attributes(self) -> Iterator[tuple[int, str, int]]:
        """Line number, image, and 1 if it is smiling."""
        path = self.file(ATTRIBUTES)
        rows = lines(path, self.meter, longest=SHORT_LINE)
        _, first = next(rows, (1, ""))
        _, second = next(rows, (2, ""))
        count, names = whole(first.strip()), second.split()
        if count is None or "Smiling" not in names:
            raise wrong(
                path, 1 if count is None else 2, "expected the number of images, then a line of "
                f"attributes with Smiling among them, found {(first, second)[count is not None]!r}."
            )  # fmt: skip
        at, read = 1 + names.index("Smiling"), 0
        for number, line in rows:
            fields = line.split()
            if len(fields) != 1 + len(names) or fields[at] not in ("1", "-1"):
                raise wrong(
                    path, number, f"expected an image and {len(names)} values 1 or -1, found "
                    f"{len(fields)} fields: {line[:60]!r}; is the file truncated?"
                )  # fmt: skip
            if fields[0] != Path(fields[0]).name or "\0" in fields[0]:
                raise wrong(path, number, f"{fields[0]!r} is not the name of an image.")
            read += 1
            yield number, fields[0], int(fields[at] == "1")
        if read != count:
            raise wrong(
                path, read + 3, f"the file ends after {read} images, but its first line says "
                f"{count}: it is truncated, or not the official one."
            )  # fmt: skip

    def build(self, payloads: list[bytes]) -> dict[str, np.ndarray]:
        names = [p.decode() for p in payloads]
        images = [read_image(self.folder / n[1:], self.given.size or 84) for n in names]
        return {
            "image": np.stack(images),
            "smiling": np.array([int(n[0]) for n in names], np.uint8),
        }
