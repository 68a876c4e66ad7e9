"""Checkpoints of a run's state, by Orbax.

A checkpoint is written to another folder and then renamed, so it is either complete or not there.
Digests (manifest.py) show damage that happens later: a damaged checkpoint is moved aside, and the
one before it is used. If a checkpoint can't be read for any other reason, that is an error, and
nothing is changed.

The newest few are kept, and the one whose model was the best (choice.py).
"""

import contextlib
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.errors import MixflError
from mixfl.runs import manifest, orbax
from mixfl.runs.aside import Aside
from mixfl.runs.choice import score
from mixfl.runs.model_file import filled, model_paths, nested

KEEP = 3
PARTIAL, OLD = ".partial", ".old"  # being written; being removed


class Checkpoints:
    def __init__(self, path: Path, note: Callable[[str], None] = lambda _: None):
        self.path, self.note = path.absolute(), note

    def rounds(self) -> list[int]:
        """The rounds that have checkpoints, newest first."""
        try:
            names = [p.name for p in self.path.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unreadable(self.path, error) from None
        return sorted((int(n) for n in names if n.isdigit()), reverse=True)

    def best(self) -> int | None:
        """The round of the checkpoint whose model was the best by the metric of the newest. Damaged
        ones don't count."""
        known: list[tuple[manifest.Judged, int]] = []
        for r in self.rounds():
            try:
                judged = manifest.judged(self._folder(r))
            except ValueError:
                continue
            except OSError as error:
                raise self._unreadable(self._folder(r), error) from None
            known += [(judged, r)] if judged is not None else []
        same = [(score(*judged), r) for judged, r in known if judged.by == known[0][0].by]
        return min(same)[1] if same else None

    def save(
        self, round: int, state: Any, meta: dict[str, Any], judged: manifest.Judged | None = None,
        secret: bool = False,
    ) -> None:  # fmt: skip
        """`meta` is JSON: what the run must remember in addition to the state. `judged`: if its
        model was evaluated. `secret`: only the owner may read it."""
        if round in self.rounds():
            return
        leaves = _leaves(state)
        meta = {**meta, "arrays": _signature(leaves)}
        partial = self.path / PARTIAL / str(round)
        try:
            if secret:
                partial.parent.mkdir(0o700, parents=True, exist_ok=True)
            orbax.save(partial, leaves, {**meta, "digest": _digest(leaves, meta)})
            manifest.write(partial, judged)
            if secret:
                for path in (partial, *partial.rglob("*")):
                    path.chmod(0o700 if path.is_dir() else 0o600)
            partial.rename(self._folder(round))
            partial.parent.rmdir()
        except Exception as error:  # whatever a full disk makes Orbax raise
            self.close()  # frees its space
            raise MixflError(
                f"the checkpoint of round {round} could not be written to {self.path}: "
                f"{orbax.reason(error)}. Free some space and go on with --resume."
            ) from None
        self._remove(self._unneeded())

    def _unneeded(self) -> list[int]:
        """Older ones that can be removed; none if the best is not known just now."""
        older = self.rounds()[KEEP:]
        try:
            best = self.best()
            return [r for r in older if r != best and self._says_its_loss(r)]
        except (MixflError, OSError):
            return []

    def _says_its_loss(self, round: int) -> bool:
        """A damaged one may be the best: it is kept, in case it can be repaired."""
        try:
            manifest.read(self._folder(round))
            return True
        except ValueError:
            return False

    def _remove(self, rounds: list[int]) -> None:
        """Renamed first: a half-removed checkpoint must not look like a damaged one."""
        with contextlib.suppress(OSError):
            for round in rounds:
                (self.path / OLD).mkdir(exist_ok=True)
                self._folder(round).rename(self.path / OLD / str(round))
            shutil.rmtree(self.path / OLD, ignore_errors=True)

    def rename(self, round: int, to: int) -> None:
        """The state is also that of round `to`; checkpoints in between are useless."""
        self._remove([r for r in self.rounds() if to <= r < round])
        try:
            self._folder(round).rename(self._folder(to))
        except OSError as error:
            raise self._unreadable(self._folder(round), error) from None

    def latest(self, like: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """(round, state, meta) of the newest undamaged checkpoint; None if there is no checkpoint.
        If all are damaged, that is an error, and nothing is changed."""
        damaged: dict[int, str] = {}
        for round in self.rounds():
            content = self._read(round, like)
            if not isinstance(content, str):
                self._set_aside(damaged)
                return round, *content
            damaged[round] = content
        if damaged:
            which = "; ".join(f"{r}: {why}" for r, why in damaged.items())
            raise MixflError(
                f"all checkpoints in {self.path} are damaged ({which}). Nothing was changed: "
                "restore them, or start over with --restart, which moves them aside."
            )
        return None

    def _set_aside(self, damaged: dict[int, str]) -> None:
        aside = Aside(self.path.parent)
        for round, why in damaged.items():
            aside.copy("metrics.jsonl")  # some of its rows are made again
            aside.move(f"{self.path.name}/{round}")
            self.note(
                f"the checkpoint of round {round} is damaged ({why}) and was moved to "
                f"{aside.path.name}: going back to the one before it"
            )

    def _read(self, round: int, like: Any) -> tuple[Any, dict[str, Any]] | str:
        """Its state and meta, or what is damaged about it."""
        folder = self._folder(round)
        damage = self._damage(folder)
        if damage is not None:
            return damage
        leaves, structure = jax.tree.flatten(like)
        shapes = {_name(i): np.zeros(np.shape(a), a.dtype) for i, a in enumerate(leaves)}
        try:
            saved, expected = orbax.meta(folder)["arrays"], _signature(shapes)
            another = saved["digest"] == _digest({}, saved["names"]) and saved != expected
            state, meta = ({}, {}) if another else orbax.load(folder, shapes)
        except Exception as error:  # whatever Orbax raises: the files are not damaged
            raise self._unreadable(folder, error) from None
        if another:
            raise MixflError(
                f"the checkpoint of round {round} in {self.path} is of another model or "
                "optimizer (other arrays): choose another --out."
            )
        if meta.pop("digest", None) != _digest(state, meta):
            return "its contents have changed"
        del meta["arrays"]
        arrays = [jax.numpy.asarray(state[_name(i)]) for i in range(len(leaves))]
        return jax.tree.unflatten(structure, arrays), meta

    def model(self, round: int, like: Any = None) -> Any:
        """The model of a checkpoint: nested dicts and lists, or a pytree like `like`."""
        folder = self._folder(round)
        damage = self._damage(folder)
        if damage is not None:
            raise MixflError(f"the checkpoint {folder} is damaged ({damage}).")
        try:
            meta = orbax.meta(folder)
            names = meta["arrays"]["names"]
            shapes = {n: np.zeros(shape, np.dtype(dtype)) for n, (shape, dtype) in names.items()}
            state, _ = orbax.load(folder, shapes)
        except Exception as error:
            raise self._unreadable(folder, error) from None
        where = meta.get("model")
        if not where:
            raise MixflError(f"{folder} does not say which of its arrays are the model's.")
        arrays = {name: np.asarray(state[_name(i)]) for name, (i, _) in where.items()}
        if like is not None:
            return filled(like, arrays, folder)
        return nested({name: path for name, (_, path) in where.items()}, arrays)

    def _damage(self, folder: Path) -> str | None:
        try:
            return manifest.damage(folder)
        except OSError as error:
            raise self._unreadable(folder, error) from None

    def _unreadable(self, path: Path, error: Exception) -> MixflError:
        return MixflError(
            f"the checkpoint {path} can't be read: {orbax.reason(error)}. Nothing was changed: fix "
            "that and try again. If it can't be fixed, move that folder away, to go on from the "
            "checkpoint before it."
        )

    def _folder(self, round: int) -> Path:
        return self.path / str(round)

    def close(self) -> None:
        """Removes what a failed save or a kill has left."""
        for left in (PARTIAL, OLD, *(p.name for p in self.path.glob("*.orbax-checkpoint-tmp"))):
            _remove(self.path / left)


def _remove(folder: Path) -> None:
    """After a failed write, Orbax's other writes may go on for a moment in their threads. What they
    leave after this is removed when the run goes on."""
    for _ in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def where_model_is(state: Any) -> dict[str, Any]:
    """For the name of each array of the model, its place in the state and its path in the model.
    Empty if a state only computes its model."""
    places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(state))}
    leaves, paths = jax.tree.leaves(state.x), model_paths(state.x)
    if not all(id(a) in places for a in leaves):
        return {}
    return {n: [places[id(a)], path] for (n, path), a in zip(paths.items(), leaves, strict=True)}


def _name(i: int) -> str:
    return f"{i:04d}"


def _leaves(state: Any) -> dict[str, np.ndarray]:
    return {_name(i): np.asarray(a) for i, a in enumerate(jax.tree.leaves(state))}


def _signature(leaves: dict[str, np.ndarray]) -> dict[str, Any]:
    """Shapes and dtypes, with a digest, so that damage is not taken for another model."""
    names = {name: [list(a.shape), str(a.dtype)] for name, a in leaves.items()}
    return {"names": names, "digest": _digest({}, names)}


def _digest(leaves: dict[str, np.ndarray], meta: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(meta, sort_keys=True).encode())
    for name in sorted(leaves):
        array = np.ascontiguousarray(leaves[name])
        digest.update(f"{name} {array.dtype} {array.shape} {sys.byteorder}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
