"""Compiled programs are cached between runs, in ~/.cache/mixfl or where JAX_COMPILATION_CACHE_DIR
says.

An entry's name has a digest of the program, the versions of JAX and XLA, the compiler's options and
the machine, so other versions and machines make other entries. Several processes may share the
folder: an entry that is half-written or gone is compiled again.
"""

import contextlib
import functools
import glob
import os
import re
import warnings
from pathlib import Path

MOST_BYTES = 512 << 20  # in our own folder; the demo's programs take 1 MB


def own_cache() -> Path:
    """A folder that only this user can read."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixfl"
    with contextlib.suppress(OSError):  # whoever writes to it gets the error
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache


def programs_folder() -> Path:
    """Where compiled programs are cached, or would be."""
    import jax

    chosen = getattr(jax.config, "jax_compilation_cache_dir", None)
    return Path(chosen) if chosen else own_cache()


def keep_programs() -> None:
    """Call it before JAX compiles anything. Small programs are cached too: there are many."""
    import jax

    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        cache = own_cache()
        jax.config.update("jax_compilation_cache_dir", str(cache))
        remove_damaged(cache)
        trim(cache, MOST_BYTES)


@functools.cache  # once per process and folder
def remove_damaged(cache: Path) -> None:
    """A kill can leave half an entry. JAX would warn of it at every start: it is removed instead,
    and this warning is not shown."""
    show = warnings.showwarning

    def removing(message, *rest, **more):
        entry = re.search(r"persistent compilation cache entry for '([^']+)'", str(message))
        if not entry:
            return show(message, *rest, **more)
        with contextlib.suppress(OSError):
            # JAX gives only the beginning of the entry's name.
            for file in cache.glob(f"{glob.escape(entry[1])}*-cache"):
                file.unlink(missing_ok=True)

    warnings.showwarning = removing


def trim(cache: Path, most: int) -> None:
    """Above `most` bytes, removes the least recently used entries until half of that is left."""
    with contextlib.suppress(OSError):  # another process may do the same
        entries = [(e.stat(), e.path) for e in os.scandir(cache) if e.name.endswith("-cache")]
        total = sum(s.st_size for s, _ in entries)
        if total <= most:
            return
        for s, path in sorted(entries, key=lambda e: max(e[0].st_atime, e[0].st_mtime)):
            if total <= most // 2:
                break
            os.unlink(path)
            total -= s.st_size
