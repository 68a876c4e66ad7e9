"""Characters and their numbers: 0 is padding, 1 any character outside the vocabulary.

Stores hold Unicode code points and are read unchanged. A table turns the points into numbers on the
device; it ends just after the vocabulary's largest code point.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mixfl.data.examples import Examples
from mixfl.data.limits import read_small
from mixfl.errors import MixflError

FILE = "vocabulary.json"
UNKNOWN, FIRST = 1, 2  # numbers of an unknown character, and of the first known one
POINTS = 0x110000  # Unicode code points
READ = 500_000  # sequences read to count characters, at most

# In the order of TFF's tutorial "Federated Learning for Text Generation".
TFF = "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"


@dataclass(frozen=True)
class Vocabulary:
    characters: tuple[str, ...]  # numbered from FIRST

    @classmethod
    def of(cls, examples: Examples, size: int, seed: int) -> "Vocabulary":
        """The most frequent characters in at most half a million of the sequences."""
        n = len(examples)
        rows = np.arange(n)
        if n > READ:
            rows = np.sort(np.random.default_rng(seed).choice(n, READ, replace=False))
        counts = np.zeros(POINTS, np.int64)
        for part in np.array_split(rows, -(-len(rows) // 10_000)):
            text = examples.take(part)["text"].reshape(-1)
            if text.min() < 0 or text.max() >= POINTS:
                bad = text[(text < 0) | (text >= POINTS)][0]
                raise MixflError(
                    f"the central text has the number {bad}, which is not a Unicode code point: "
                    "prepare it with `mixfl data prepare` (docs/data.md)."
                )
            occurrences = np.bincount(text)
            counts[: len(occurrences)] += occurrences
        counts[0] = 0
        order = np.argsort(-counts, kind="stable")[:size]  # ties in Unicode order
        chosen = order[counts[order] > 0]
        if not len(chosen):
            raise MixflError("the central text has no characters: prepare it again.")
        return cls(tuple(map(chr, chosen.tolist())))

    def __len__(self) -> int:
        """The count of numbers, including those for padding and unknown characters."""
        return len(self.characters) + FIRST

    @cached_property
    def table(self) -> np.ndarray:
        """Code point -> number. The last entry stands for all points beyond the end: unknown."""
        points = [ord(c) for c in self.characters]
        table = np.full(max(points) + 2, UNKNOWN, np.int16)
        table[0] = 0
        table[points] = np.arange(FIRST, len(self))
        return table

    def encode(self, text: str) -> np.ndarray:
        points = np.array([ord(c) for c in text], np.int64)
        return self.table[np.minimum(points, len(self.table) - 1)]

    def decode(self, numbers: np.ndarray) -> str:
        """The text for numbers of known characters."""
        return "".join(self.characters[i - FIRST] for i in np.asarray(numbers).tolist())

    def to_json(self) -> str:
        return json.dumps({"padding": 0, "unknown": UNKNOWN, "characters": self.characters}) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Vocabulary":
        try:
            characters = json.loads(read_small(path))["characters"]
            good = characters and all(isinstance(c, str) and len(c) == 1 for c in characters)
        except FileNotFoundError:
            raise MixflError(f"there is no {path}: a run of the text task writes it.") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            good = False
        if not good or len(set(characters)) < len(characters):
            raise MixflError(f"{path} is damaged: restore it, or train again.")
        return cls(tuple(characters))
