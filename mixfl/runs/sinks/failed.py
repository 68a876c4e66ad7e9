"""What to say when a tracker fails."""

import shlex
from pathlib import Path


def failed(tracker: str, option: str, error: Exception, folder: Path) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    later = ["mixfl", "run", "--config", f"{folder}/config.toml", "--out", str(folder)]
    return (
        f"{tracker} failed ({lines[0][:200]}): going on without it. To log what is missing there "
        f"later: {shlex.join(later)} --resume --track {option}"
    )
