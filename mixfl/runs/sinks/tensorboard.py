"""The metrics as TensorBoard events."""

import struct
import time
from pathlib import Path
from typing import Any

from mixfl.runs.files import append_whole, disk_error
from mixfl.runs.sinks.base import Sink


class TensorBoard(Sink):
    """Events, in a new file each time the run starts.

    They are written at once. tensorboardX's own writer works in the background: a kill loses what
    is in its queue, and a full disk stops it for good.
    """

    def __init__(self, path: Path):
        self.path = path

    def begin(self, start):
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{int(time.time()):010d}.mixfl.{start.round:08d}"
        self.file = self.path / name
        try:
            self.path.mkdir(exist_ok=True)
            self.file.open("ab").close()  # it exists if the run starts twice in a second
        except OSError as error:
            raise disk_error(self.file, error) from None
        self._add(Event(file_version="brain.Event:2"))
        # Hides what an earlier process wrote about the rounds that are made again.
        self._add(Event(step=start.round + 1, session_log=SessionLog(status=SessionLog.START)))

    def evaluated(self, row):
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
