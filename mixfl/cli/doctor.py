"""The command doctor: is everything there, and how fast is it?"""

import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path

import click
from rich.markup import escape

from mixfl.cli.process import cores, start_jax
from mixfl.cli.terminal import print_table
from mixfl.errors import MixflError

OK, NOTE, BROKEN = "ok", "note", "broken"
ROOM = 2 << 30  # bytes of memory below which runs are short of it


class Findings:
    """Lines of the table, and what to do."""

    def __init__(self):
        self.lines: list[list[str]] = []
        self.advice: list[str] = []
        self.broken = False

    def add(self, what: str, found: str, state: str = OK, advice: str = "") -> None:
        self.lines.append([what, escape(found), state])  # [onnx] is no markup
        self.advice += [advice] if advice else []
        self.broken |= state == BROKEN


@click.command()
@click.option("--quick", is_flag=True, help="Without the speed test.")
def doctor(quick):
    """Look at this installation and machine: what is there, how fast it is, what to do.

    The exit code is 1 only if something is broken.
    """
    found = Findings()
    _software(found)
    _machine(found)
    if not found.broken:
        _jax(found)
    _extras(found)
    if not quick and not found.broken:
        click.echo("Measuring for about ten seconds ...", err=True)
        _speed(found)
    print_table(["what", "found", ""], found.lines)
    for advice in found.advice:
        click.echo(f"- {advice}")
    if not found.advice:
        click.echo("Nothing to do.")
    raise SystemExit(1 if found.broken else 0)


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """mixfl's dependencies, and those of each extra, as its metadata names them."""
    needed: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in importlib.metadata.requires("mixfl") or []:
        name = re.match(r"[A-Za-z0-9._-]+", line)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", line)
        if name is None or name[0] == "mixfl":
            continue
        (extras.setdefault(extra[1], []) if extra else needed).append(name[0])
    return needed, extras


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _software(found: Findings) -> None:
    import mixfl

    found.add("mixfl", mixfl.__version__)
    good = sys.version_info >= (3, 11)
    found.add("Python", platform.python_version(), OK if good else BROKEN,
              "" if good else "Install Python 3.11 or newer.")  # fmt: skip
    try:
        needed, _ = _requirements()
    except importlib.metadata.PackageNotFoundError:
        found.add("packages", "mixfl is not installed, only found on the path", NOTE,
                  "Install it: pip install -e . (in the clone).")  # fmt: skip
        return
    missing = [p for p in needed if version(p) is None]
    shown = ", ".join(f"{p} {version(p)}" for p in ("jax", "numpy", "optax") if p not in missing)
    if missing:
        found.add("packages", f"missing: {', '.join(missing)}", BROKEN,
                  f"pip install {' '.join(missing)}")  # fmt: skip
    else:
        found.add("packages", f"{shown} and {len(needed) - 3} more")


def _machine(found: Findings) -> None:
    found.add("machine", f"{platform.uname().system} {platform.machine()}")
    count, load = cores(), os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > 1.5 * count
    found.add("cores", f"{count} (load {load:.1f})", NOTE if busy else OK,
              "Other programs keep the cores busy: times are not this machine's best."
              if busy else "")  # fmt: skip
    memory = _memory()
    if memory is not None:
        low = memory < ROOM
        found.add("memory free", f"{memory / 2**30:.1f} GB", NOTE if low else OK,
                  "Memory is short: try --preset demo, --jobs 1, or a lower cohort_chunk."
                  if low else "")  # fmt: skip
    folder = Path.cwd()
    writable = os.access(folder, os.W_OK)
    found.add("current folder", "can be written" if writable else "can't be written",
              OK if writable else NOTE,
              "" if writable else "Give --out DIR, or change to a folder of yours.")  # fmt: skip


def _memory() -> int | None:
    """Bytes that are free; None where it is not known."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration, ValueError):
        return None


def _jax(found: Findings) -> None:
    try:
        start_jax({})
        import jax

        devices = jax.devices()
        good = int(jax.numpy.ones(3).sum()) == 3
    except Exception as error:  # whatever a broken installation raises
        lines = str(error).strip().splitlines() or [""]
        found.add("JAX", f"{type(error).__name__}: {lines[0][:80]}", BROKEN,
                  "JAX does not work: pip install --force-reinstall 'jax>=0.10,<0.11'")  # fmt: skip
        return
    kinds = sorted({f"{d.platform} ({d.device_kind})" for d in devices})
    found.add("devices", f"{len(devices)}: {', '.join(kinds)}", OK if good else BROKEN,
              "" if good else "JAX computes wrong sums: reinstall it.")  # fmt: skip
    from mixfl.process.compilation_cache import own_cache

    try:
        found.add(
            "compiled programs", str(jax.config.values["jax_compilation_cache_dir"] or own_cache())
        )
    except (MixflError, OSError) as error:
        found.add("compiled programs", "are not kept", NOTE,
                  f"Every start compiles anew ({error}): set XDG_CACHE_HOME to a folder of yours."
                  )  # fmt: skip


def _extras(found: Findings) -> None:
    try:
        _, extras = _requirements()
    except importlib.metadata.PackageNotFoundError:
        return
    for extra, packages in sorted(extras.items()):
        if extra in ("dev", "examples"):
            continue
        missing = [p for p in packages if version(p) is None]
        said = f"not installed: pip install 'mixfl[{extra}]'" if missing else (
            ", ".join(f"{p} {version(p)}" for p in packages[:2]))  # fmt: skip
        found.add(f"extra {extra}", said, "" if missing else OK)


def _speed(found: Findings) -> None:
    from mixfl.measure import speed

    try:
        measured = speed.measure()
    except Exception as error:  # a round can't be run: something is broken
        found.add("speed", f"{type(error).__name__}: {error}"[:100], BROKEN,
                  "A small training fails on this machine: please report it.")  # fmt: skip
        return
    found.add("products", f"{measured.gflops:.0f} GFLOP/s (recorded: {speed.RECORDED_GFLOPS:g} on "
              f"{speed.RECORDED_CORES} cores)")  # fmt: skip
    said = (
        f"{measured.round_ms:.0f} ms (recorded: {speed.RECORDED_MS:g} ms; expected here, by the "
        f"products: {measured.expected_ms:.0f} ms)"
    )
    found.add("a round", said, NOTE if measured.slow else OK,
              "Rounds take longer than this machine's products let one expect: look for other "
              "programs, limits of a container, or XLA_FLAGS that you have set."
              if measured.slow else "")  # fmt: skip
