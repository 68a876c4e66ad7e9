"""A trained model as a safetensors file, and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from mixfl.errors import MixflError


def model_bytes(params: Any, frozen: str = "") -> bytes:
    """safetensors with names like hidden/w; its metadata has their paths in the pytree, and the
    digest of the frozen arrays that the model was trained with, if there are any."""
    import jax
    from safetensors.numpy import save

    paths = model_paths(params)
    leaves = [np.asarray(leaf, order="C") for leaf in jax.tree.leaves(params)]
    arrays = dict(zip(paths, leaves, strict=True))
    # Only one entry: safetensors writes several in a changing order, which changes the bytes.
    if frozen:
        return save(arrays, metadata={"mixfl": json.dumps({"paths": paths, "frozen": frozen})})
    return save(arrays, metadata={"paths": json.dumps(paths)})


def trained_with(path: Path) -> str:
    """The digest of the frozen arrays that a model was trained with; empty if there were none."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return json.loads((file.metadata() or {}).get("mixfl", "{}")).get("frozen", "")
    except Exception:  # `load_model` says what is wrong with it
        return ""


def load_model(path: Path, like: Any = None) -> Any:
    from safetensors import safe_open

    try:
        path.open("rb").close()
    except OSError as error:  # this is no damage
        raise MixflError(f"{path} can't be read: {error.strerror or error}.") from None
    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
            paths = json.loads(metadata.get("mixfl", "{}")).get("paths")
            paths = paths or json.loads(metadata.get("paths", "{}"))
        if like is None:
            return nested({name: paths.get(name, [name]) for name in arrays}, arrays)
    except Exception as error:  # whatever a damaged file makes safetensors and json raise
        raise MixflError(
            f"{path} is damaged: {error}. Remove it, and run the same command with --resume to "
            "write it again."
        ) from None
    return filled(like, arrays, path)


def filled(like: Any, arrays: dict[str, np.ndarray], path: Path) -> Any:
    """A pytree like `like` with these arrays, by their names; `path` is the file they are from."""
    import jax

    names = list(model_paths(like))
    if sorted(names) != sorted(arrays):
        raise MixflError(f"{path} has the arrays {sorted(arrays)}, expected {sorted(names)}.")
    for name, leaf in zip(names, jax.tree.leaves(like), strict=True):
        if np.shape(leaf) != arrays[name].shape:
            raise MixflError(
                f"{path} has {name} with shape {arrays[name].shape}, expected {np.shape(leaf)}."
            )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in names])


def model_paths(tree: Any) -> dict[str, list[str | int]]:
    """Each leaf's name and its path in the pytree. A number in a path is a place in a list."""
    import jax

    paths: dict[str, list[str | int]] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        parts = [
            k.idx if hasattr(k, "idx") else str(getattr(k, "key", getattr(k, "name", k)))
            for k in path
        ]
        name = "/".join(map(str, parts)) or "params"
        while name in paths:  # a key with a / in it may look like another
            name += "'"
        paths[name] = parts
    return paths


def nested(paths: dict[str, list[str | int]], arrays: dict[str, np.ndarray]) -> Any:
    """Dicts, and lists if the keys are numbers. A model that is one array stays that."""
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        *parents, last = "root", *path
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = arrays[name]

    def with_lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        children = {k: with_lists(v) for k, v in node.items()}
        if all(isinstance(k, int) for k in children):
            return [children.get(i) for i in range(max(children) + 1)]
        return children

    return with_lists(root)["root"]
