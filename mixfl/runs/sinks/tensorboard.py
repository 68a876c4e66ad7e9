"""The metrics as TensorBoard events."""

import struct
import time
from pathlib import Path
from typing import Any

from mixfl.runs.files import append_whole, disk_error


class Events:
    """The metrics for TensorBoard, a file per start of the run.

    Written at once: tensorboardX's own writer works in the background, so that a kill loses
    what its queue holds, and a full disk stops it for good.
    """

    def __init__(self, path: Path, start: int):
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self.file = path / f"events.out.tfevents.{int(time.time()):010d}.mixfl.{start:08d}"
        try:
            path.mkdir(exist_ok=True)
            self.file.open("ab").close()  # there already, if it is begun twice in a second
        except OSError as error:
            raise disk_error(self.file, error) from None
        self._add(Event(file_version="brain.Event:2"))
        # What an earlier process wrote of the rounds that are made again is hidden.
        self._add(Event(step=start + 1, session_log=SessionLog(status=SessionLog.START)))

    def add(self, row: dict[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=key, simple_value=value)
            for key, value in row.items()
            if key != "round" and value is not None
        ]
        self._add(Event(step=row["round"], summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        """A record: its length and its bytes, each followed by a checksum."""
        from tensorboardX.record_writer import masked_crc32c

        event.wall_time = time.time()
        content = event.SerializeToString()
        length = struct.pack("<Q", len(content))
        checksum = lambda part: struct.pack("<I", masked_crc32c(part))  # noqa: E731
        append_whole(self.file, length + checksum(length) + content + checksum(content))
