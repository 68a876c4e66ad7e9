"""flower-superexec without tokens on command lines, which every user of a machine can read.

A run's server gets its token in a file without a name. The server ends when superexec does, even
if superexec is killed. This replaces a part of flwr 1.41. With another version, use its own
flower-superexec.
"""

import os
import subprocess
import sys

from flwr.supercore.cli import flower_superexec
from flwr.supercore.superexec.executor import subprocess_executor

from mixfl.deploy.flower.processes import end_with


class Quiet:
    """Replaces `subprocess` in Flower's executor."""

    DEVNULL = subprocess.DEVNULL

    @staticmethod
    def Popen(arguments: list[str], **options) -> subprocess.Popen:  # noqa: N802 (Flower's name)
        place = arguments.index("--token")
        file = os.memfd_create("token", 0)
        try:
            os.write(file, arguments[place + 1].encode())
            arguments = [
                *arguments[:place], "--token-file", f"/proc/self/fd/{file}", *arguments[place + 2 :]
            ]  # fmt: skip
            return subprocess.Popen(
                arguments, pass_fds=[file], preexec_fn=end_with(os.getpid()), **options
            )
        finally:
            os.close(file)


def superexec(arguments: list[str]) -> None:
    if hasattr(os, "memfd_create"):
        subprocess_executor.subprocess = Quiet  # type: ignore[misc,assignment]
    sys.argv = ["flower-superexec", *arguments]
    flower_superexec()
