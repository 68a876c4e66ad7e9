"""Compiled programs are kept between runs, in ~/.cache/mixfl or as JAX_COMPILATION_CACHE_DIR says.

A program's name has a digest of the program itself, of the versions of JAX and XLA, of the
compiler's options and of the machine in it, so that other versions and machines take no harm.
Several processes may use the folder at once: an entry that one finds half-written or gone is
compiled anew.
"""

import contextlib
import glob
import os
import re
import warnings
from pathlib import Path

MOST_BYTES = 512 << 20  # in our own folder; the programs of the demo are 1 MB


def own_cache() -> Path:
    """A folder of the user's, into which nobody else looks."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixfl"
    with contextlib.suppress(OSError):  # whoever needs it finds out
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    return cache


def keep_programs() -> None:
    """Before JAX compiles anything. Small programs are kept too: there are many of them."""
    import jax

    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        cache = own_cache()
        jax.config.update("jax_compilation_cache_dir", str(cache))
        mend(cache)
        trim(cache, MOST_BYTES)


def mend(cache: Path) -> None:
    """A kill can leave half an entry, of which JAX would warn at every start: remove it."""
    show = warnings.showwarning

    def removing(message, *rest, **more):
        found = re.search(r"persistent compilation cache entry for '([^']+)'", str(message))
        if not found:
            return show(message, *rest, **more)
        with contextlib.suppress(OSError):
            # JAX says only the beginning of the entry's name.
            for entry in cache.glob(f"{glob.escape(found[1])}*-cache"):
                entry.unlink(missing_ok=True)

    warnings.showwarning = removing


def trim(cache: Path, most: int) -> None:
    """Removes the entries that were not used for longest, until half of `most` is left."""
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
