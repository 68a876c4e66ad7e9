"""Groups records by client on disk instead of in memory.

The records are in a temporary SQLite database without a name in any folder: SQLite unlinks it as
soon as it is open, so nothing is left behind however the program ends. It is stored in the folder
that SQLITE_TMPDIR or TMPDIR names, otherwise in /var/tmp.
"""

import itertools
import re
import sqlite3
from collections.abc import Iterable, Iterator
from functools import lru_cache

from mixfl.data.formats.base import Record


@lru_cache(4096)
def natural(client: str) -> str:
    """A key that sorts client 9 before client 10."""
    return re.sub("[0-9]+", lambda digits: digits[0].zfill(20), client)


def site_key(site: str) -> str:
    """A key with the same order. Sites that differ only in leading zeros stay separate."""
    return f"{natural(site)}\0{site}" if site else ""


class Spill:
    """Takes records in any order and returns them client by client, in order of site and id."""

    def __init__(self) -> None:
        self.db = sqlite3.connect("", isolation_level=None)
        self.db.execute("PRAGMA journal_mode = OFF")
        self.db.execute("PRAGMA synchronous = OFF")
        self.db.execute(
            "CREATE TABLE records (part, site, key, client, position INTEGER, payload BLOB, "
            "number INTEGER PRIMARY KEY)"
        )
        self.sorted, self.last = True, ("", "", "", "")
        self.records = 0

    def __enter__(self) -> "Spill":
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def fill(self, records: Iterable[Record]) -> None:
        self.db.execute("BEGIN")
        rows = self._rows(records)
        self.db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, NULL)", rows)
        self.db.execute("COMMIT")

    def _rows(self, records: Iterable[Record]) -> Iterator[tuple]:
        for r in records:
            place = (r.part, site_key(r.site), natural(r.client), r.client)
            self.sorted, self.last = self.sorted and place >= self.last, place
            self.records += 1
            yield (*place, r.order, r.payload)

    def index(self) -> None:
        if not self.sorted:
            self.db.execute("CREATE INDEX places ON records (part, site, key, client)")
        self.db.execute(
            "CREATE TABLE clients AS SELECT part, site, key, client, count(*) AS size FROM records "
            "GROUP BY part, site, key, client"
        )

    def count(self, part: str, minimum: int) -> tuple[int, int]:
        """The number of clients with at least `minimum` records, and of those with fewer."""
        query = "SELECT total(size >= ?), total(size < ?) FROM clients WHERE part = ?"
        enough, fewer = self.db.execute(query, (minimum, minimum, part)).fetchone()
        return int(enough), int(fewer)

    def sites(self, part: str, minimum: int) -> Iterator[str]:
        """The site of each client that `clients` yields."""
        query = "SELECT site FROM clients WHERE part = ? AND size >= ? ORDER BY site, key, client"
        return (site for (site,) in self.db.execute(query, (part, minimum)))

    def clients(self, part: str, minimum: int) -> Iterator[tuple[str, list[bytes]]]:
        order = "number" if self.sorted else "site, key, client, number"
        rows = self.db.execute(
            f"SELECT site, client, position, payload FROM records WHERE part = ? ORDER BY {order}",
            (part,),
        )
        for (_, client), group in itertools.groupby(rows, key=lambda row: row[:2]):
            records = sorted(group, key=lambda row: row[2])
            if len(records) >= minimum:
                yield client, [payload for *_, payload in records]


class Lookup:
    """A dict on disk, for joining two files by name."""

    def __init__(self) -> None:
        self.db = sqlite3.connect("", isolation_level=None)
        self.db.execute("PRAGMA journal_mode = OFF")
        self.db.execute("CREATE TABLE pairs (name PRIMARY KEY, value) WITHOUT ROWID")

    def fill(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.db.execute("BEGIN")
        self.db.executemany("INSERT OR REPLACE INTO pairs VALUES (?, ?)", pairs)
        self.db.execute("COMMIT")

    def get(self, name: str) -> str | None:
        row = self.db.execute("SELECT value FROM pairs WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self.db.close()
