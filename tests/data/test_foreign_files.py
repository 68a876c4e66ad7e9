"""Files that a stranger made: nothing in them is run, nothing outside is read, and what one of
them may cost is bounded. Each limit is passed by little; most are lowered for the tests."""

import ast
import gzip
import json
import os
import sqlite3
import stat
import subprocess
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from format_files import (
    MUTATION,
    a_store_or_an_error,
    fails,
    leaf,
    lists,
    made,
    mutated,
    pictures,
    proto,
    tff,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mixfl
from mixfl.cli.data import data as data_command
from mixfl.data import limits
from mixfl.data.formats import images, json_stream, parquet, reading, text
from mixfl.data.formats.spill import Spill
from mixfl.data.formats.tff import connect
from mixfl.data.info import info
from mixfl.data.prepare import prepare
from mixfl.errors import MixflError
from mixfl.tasks import read_toml
from mixfl.tasks.movie.recommendation import _titles
from mixfl.tasks.text.vocabulary import Vocabulary

PACKAGE = Path(mixfl.__file__).parent


# Images

EPS = b"""%!PS-Adobe-3.0 EPSF-3.0
%%BoundingBox: 0 0 6 4
%%EndComments
0 0 6 4 rectfill
showpage
%%EOF
"""


@pytest.mark.parametrize("name", ["1.png", "1.jpg"])
def test_an_image_that_would_run_a_program_is_refused(tmp_path, monkeypatch, name):
    started = []

    def start(*words, **_):
        started.append(words)
        raise OSError("no programs in this test")

    for function in ("Popen", "run", "call", "check_call", "check_output"):
        monkeypatch.setattr(subprocess, function, start)
    monkeypatch.setattr("shutil.which", lambda *_, **__: "/usr/bin/gs")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", "gs")
    source = pictures(tmp_path / "p")
    write(source / "emu" / name, EPS)
    with pytest.raises(MixflError) as caught:
        prepare("images", source, tmp_path / "s", options={"partition": "iid:1"})
    assert started == []
    assert "Pillow finds none of BMP" in str(caught.value)
    assert str(source / "emu" / name) in str(caught.value)


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
def test_the_usual_kinds_of_image_are_read(tmp_path, kind):
    path = tmp_path / "x.png"
    Image.new("RGB", (6, 4), (200, 100, 50)).save(path, kind)
    found = images.read_image(path, None)
    assert found.shape == (4, 6, 3)
    assert np.abs(found.astype(int) - [200, 100, 50]).max() <= 12


@pytest.mark.parametrize("kind", ["TGA", "PCX", "SGI", "ICNS", "JPEG2000"])
def test_other_kinds_of_image_are_not(tmp_path, kind):
    path = tmp_path / "x.png"
    Image.new("RGB", (16, 16)).save(path, kind)
    with pytest.raises(MixflError, match="Pillow finds none of"):
        images.read_image(path, None)


def test_pixels_of_16_bits_are_not_cut_to_8(tmp_path):
    Image.fromarray(np.full((4, 6), 30_000, np.uint16)).save(tmp_path / "x.png")
    with pytest.raises(MixflError, match="its pixels are not 8-bit: I;16"):
        images.read_image(tmp_path / "x.png", None)


def test_an_image_that_unpacks_to_too_many_pixels_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.png"
    Image.new("1", (10_000, 10_000)).save(path)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as some programs set it
    with pytest.raises(MixflError, match=r"more than 67,108,864 pixels: make it smaller"):
        images.read_image(path, 84)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(MixflError, match="make it smaller"):
        images.read_image(path, 84)


def test_what_is_no_file_is_no_image(tmp_path):
    source = pictures(tmp_path / "p")
    (source / "emu" / "folder.png").mkdir()
    os.mkfifo(source / "emu" / "waits.png")  # opening it would wait for a writer
    found = made("images", source, tmp_path / "s", partition="iid:1")
    assert len(found["0"]["label"]) == 5


# Paths in a CSV file


def outside(tmp_path):
    pictures(tmp_path / "other")
    pictures(tmp_path / "data" / "in")
    (tmp_path / "data" / "link.png").symlink_to(tmp_path / "other" / "cat" / "1.png")
    (tmp_path / "data" / "folder").symlink_to(tmp_path / "other" / "cat")
    (tmp_path / "data" / "loop.png").symlink_to("loop.png")


OUT = ["../other/cat/1.png", "in/../../other/cat/1.png", "link.png", "folder/1.png", "/etc/passwd",
       "../other/none.png", "ABSOLUTE"]  # fmt: skip


@pytest.mark.parametrize("path", OUT)
def test_paths_do_not_lead_out_of_the_folder(tmp_path, path):
    outside(tmp_path)
    path = path.replace("ABSOLUTE", str(tmp_path / "other" / "cat" / "1.png"))
    rows = f"path,label,client\nin/cat/1.png,0,a\n{path},1,a\n"
    source = write(tmp_path / "data" / "i.csv", rows)
    fails("images", source, tmp_path, "i.csv, line 3", "leads out of", "the option images")


def test_paths_that_stay_in_the_folder(tmp_path):
    outside(tmp_path)
    (tmp_path / "data" / "inner.png").symlink_to("in/cat/1.png")
    absolute = tmp_path / "data" / "in" / "dog" / "1.png"
    rows = f"path,label,client\nin/../in/cat/1.png,0,a\ninner.png,1,a\n{absolute},2,a\n"
    found = made("images", write(tmp_path / "data" / "i.csv", rows), tmp_path / "s")
    assert found["a"]["label"].tolist() == [0, 1, 2]
    for path in ("loop.png", "in", "in/none.png"):
        source = write(tmp_path / "data" / "no.csv", f"path,label,client\n{path},0,a\n")
        fails("images", source, tmp_path, "no.csv, line 2", "there is no file")


def test_another_folder_of_images_is_asked_for(tmp_path):
    outside(tmp_path)
    source = write(tmp_path / "lists" / "i.csv", "path,label,client\ncat/1.png,3,a\n")
    found = made("images", source, tmp_path / "s", images=str(tmp_path / "other"))
    assert found["a"]["label"].tolist() == [3]
    write(source, "path,label,client\n../data/in/cat/1.png,3,a\n")
    fails("images", source, tmp_path, "leads out of", images=str(tmp_path / "other"))
    assert made("images", source, tmp_path / "t", images=str(tmp_path / "data" / "in" / ".."))
    fails("images", source, tmp_path, "nowhere", "not a folder", images=str(tmp_path / "nowhere"))
    fails("images", tmp_path / "other", tmp_path, "is a folder", images="x", partition="iid:1")


def test_a_folder_of_images_on_the_command_line(tmp_path):
    outside(tmp_path)
    source = write(tmp_path / "lists" / "i.csv", "path,label,client\ncat/1.png,3,a\n")
    words = ["prepare", "images", "--from", source, "--to", tmp_path / "s"]
    found = CliRunner().invoke(
        data_command, [*map(str, words), "--images", str(tmp_path / "other")]
    )
    assert "1 clients, 1 examples" in found.output
    assert (tmp_path / "s" / "clients.arrow").exists()


# SQLite

TEXT = proto(tokens=[b"some text"])
ROWS = [("train", "a", TEXT), ("train", "b", TEXT)]
VIEW = """CREATE VIEW examples AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c
LIMIT 5) SELECT n AS rowid, 'train' AS split_name, 'a' AS client_id,
(SELECT x FROM y) AS serialized_example_proto FROM c"""


def database(path, *statements):
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(*statement) if isinstance(statement, tuple) else db.execute(statement)
    db.close()
    return path


def test_a_view_is_no_table(tmp_path):
    """It would run a query of the file's own, here a recursion, which could be without end."""
    source = database(
        tmp_path / "x.sqlite", "CREATE TABLE y (x)", ("INSERT INTO y VALUES (?)", (TEXT,)), VIEW
    )
    fails("tff-stackoverflow", source, tmp_path, "x.sqlite", "examples is a view")


def test_a_virtual_table_and_computed_columns_are_no_data(tmp_path):
    columns = "split_name, client_id, serialized_example_proto"
    virtual = database(
        tmp_path / "v.sqlite", f"CREATE VIRTUAL TABLE examples USING fts4({columns})"
    )
    database(virtual, ("INSERT INTO examples VALUES (?, ?, ?)", ROWS[0]))
    fails("tff-stackoverflow", virtual, tmp_path, "v.sqlite", "it contains more than tables")
    computed = database(
        tmp_path / "c.sqlite",
        "CREATE TABLE examples (split_name, client_id AS (upper(split_name)), "
        "serialized_example_proto)",
        ("INSERT INTO examples VALUES (?, ?)", (ROWS[0][0], TEXT)),
    )
    fails("tff-stackoverflow", computed, tmp_path, "c.sqlite", "'client_id' is not a plain one")
    named = database(
        tmp_path / "n.sqlite",
        "CREATE TABLE examples (rowid, split_name, client_id, serialized_example_proto)",
        ("INSERT INTO examples VALUES (?, ?, ?, ?)", (1, *ROWS[0])),
    )
    fails("tff-stackoverflow", named, tmp_path, "n.sqlite", "'rowid' is not a plain one")


def test_other_things_in_a_database_are_left_alone(tmp_path):
    source = database(
        tff(tmp_path / "x.sqlite", ROWS), "CREATE VIEW v AS SELECT load_extension('x') AS y",
        "CREATE TRIGGER t AFTER INSERT ON examples BEGIN SELECT load_extension('x'); END",
        "CREATE INDEX i ON examples (split_name)", "CREATE TABLE client_metadata (x UNIQUE)",
    )  # fmt: skip
    assert list(made("tff-stackoverflow", source, tmp_path / "s")) == ["a", "b"]


def test_a_database_is_only_read_and_its_schema_not_trusted(tmp_path):
    source = database(tff(tmp_path / "x.sqlite", ROWS), "CREATE VIEW v AS SELECT 1 AS y")
    db = connect(source)
    for query in (
        "SELECT y FROM v", "SELECT upper(client_id) FROM examples", "DELETE FROM examples",
        "ATTACH '/etc/passwd' AS other", "SELECT load_extension('x')",
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n FROM c) SELECT n FROM c LIMIT 1",
    ):  # fmt: skip
        with pytest.raises(sqlite3.DatabaseError, match=r"not authorized|prohibited"):
            db.execute(query).fetchall()
    db.set_authorizer(None)
    assert db.execute("PRAGMA trusted_schema").fetchone() == (0,)
    assert db.execute("PRAGMA cell_size_check").fetchone() == (1,)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        db.execute("DELETE FROM examples")
    db.close()


def test_a_huge_value_in_a_database_is_refused(tmp_path):
    huge = proto(tokens=[b"x" * (limits.EXAMPLE + 1)])
    source = tff(tmp_path / "x.sqlite", [*ROWS, ("train", "c", huge)])
    fails("tff-stackoverflow", source, tmp_path, "x.sqlite", "row 3", "too big")
    source = tff(tmp_path / "y.sqlite", [*ROWS, ("train", "c" * (limits.EXAMPLE + 1), TEXT)])
    fails("tff-stackoverflow", source, tmp_path, "y.sqlite", "too big")


def test_pages_that_give_the_same_rows_again_are_noticed(tmp_path):
    """A page that lists one page of rows many times; with several levels there is no end."""
    source = tff(tmp_path / "x.sqlite", [("train", str(i), TEXT) for i in range(3000)])
    with sqlite3.connect(source) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_master").fetchone()
    db.close()
    data = bytearray(source.read_bytes())
    size = int.from_bytes(data[16:18], "big")
    page = (root - 1) * size
    assert data[page] == 5  # an inner page of a table
    cells = [
        page + int.from_bytes(data[page + 12 + 2 * i :][:2], "big")
        for i in range(int.from_bytes(data[page + 3 : page + 5], "big"))
    ]
    assert len(cells) > 2
    data[cells[1] : cells[1] + 4] = data[cells[0] : cells[0] + 4]
    source.write_bytes(data)
    fails("tff-stackoverflow", source, tmp_path, "x.sqlite", "row 1 comes after row", "damaged")


# JSON and compressed files

USER = '{"user": "a", "texts": ["some text"]}\n'


def test_a_compressed_file_does_not_grow_without_end(tmp_path, monkeypatch):
    """408 KB unpacked to 400 MB and took 1 GB."""
    monkeypatch.setattr(limits, "LONGEST", 1 << 20)
    users = [{"x": [[0] * 5000], "y": [0]}] * 1000
    bombs = {
        "text-by-user": ("t.jsonl.gz", json.dumps({"user": "a", "texts": ["x" * 5000]}) + "\n"),
        "movielens": ("ratings.dat.gz", "1::2::3::4\n"),
        "table": ("t2.jsonl.gz", json.dumps({"client": 1, "x": [0] * 5000}) + "\n"),
        "wikipedia": ("w.gz", "some text\n" * 1000),
    }  # fmt: skip
    for format, (name, rows) in bombs.items():
        text = rows * (1 + (8 << 20) // len(rows))
        source = write(tmp_path / name, text)
        assert source.stat().st_size * limits.GROWTH < len(text)
        fails(format, source, tmp_path, name, "more than 200 times its size", "gunzip")
    source = write(tmp_path / "a.json.gz", leaf({str(i): u for i, u in enumerate(users)}))
    fails("leaf", source, tmp_path, "a.json.gz", "more than 200 times its size", "gunzip")


def test_a_file_that_compresses_well_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LONGEST", 1 << 16)
    rows = "client,x\n" + "".join(f"{i % 7},{i % 100}\n" for i in range(50_000))
    source = write(tmp_path / "t.csv.gz", rows)
    assert len(rows) > 10 * source.stat().st_size
    assert len(made("table", source, tmp_path / "s")) == 7


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("COMMAS", "[" + "0," * 200 + "0]", "more than 32 commas"),
        ("LISTS", "[" + "[]," * 200 + "{}]", "more than 32 lists and objects"),
        ("LONGEST", '"' + "x" * 300 + '"', "more than 32 characters"),
    ],
    ids=["commas", "lists", "characters"],
)
def test_a_json_value_is_bounded(tmp_path, monkeypatch, limit, value, words):
    monkeypatch.setattr(limits, limit, 32)
    monkeypatch.setattr(json_stream, "CHUNK", 64)  # more of the value than is there at first
    line = write(tmp_path / "t.jsonl", USER + '{"user": "a", "texts": ' + value + "}\n")
    whole = write(tmp_path / "a.json", '{"users": ' + value + ', "user_data": {}}')
    if limit == "LONGEST":
        monkeypatch.setattr(reading, "LONGEST", 10**6)
    fails("text-by-user", line, tmp_path, "t.jsonl, line", words)
    fails("leaf", whole, tmp_path, "a.json, line 1", words)


def test_users_of_leaf_are_bounded_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "COMMAS", 64)
    monkeypatch.setattr(json_stream, "CHUNK", 128)
    users = {str(i): {"x": [[i] * 20], "y": [i]} for i in range(50)}
    source = write(tmp_path / "a.json", leaf(users))
    assert lists(made("leaf", source, tmp_path / "s")) == users
    users["9"]["x"] = [[9] * 200]
    write(source, leaf(users))
    fails("leaf", source, tmp_path, "a.json", "more than 64 commas")


def test_what_leaf_does_not_need_is_not_kept(tmp_path):
    others = {f"other{i}": [f"{i} {j}" for j in range(1000)] for i in range(200)}
    source = write(tmp_path / "a.json", leaf({"a": {"x": [[1]], "y": [2]}}, **others))
    del others
    tracemalloc.start()
    try:
        assert list(made("leaf", source, tmp_path / "s")) == ["a"]
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("depth", [limits.DEPTH, 500, 100_000])
def test_json_is_not_nested_without_end(tmp_path, depth):
    deep = "[" * depth + "1" + "]" * depth
    sources = {
        "table": write(tmp_path / "t.jsonl", '{"client": 1, "x": 1, "y": ' + deep + "}\n"),
        "text-by-user": write(tmp_path / "u.jsonl", USER + '{"user": "a", "text": ' + deep + "}\n"),
        "leaf": write(tmp_path / "a.json", '{"users": ["a"], "user_data": {"a": ' + deep + "}}"),
    }  # fmt: skip
    for format, source in sources.items():
        words = "nested more than 64 deep" if format != "leaf" or depth > limits.DEPTH else "x"
        fails(format, source, tmp_path, source.name, words)


def test_lines_of_few_fields_are_short(tmp_path):
    long = "x " * limits.SHORT_LINE
    fails("movielens", write(tmp_path / "r.dat", long), tmp_path, "line 1", "65,536 bytes")
    folder = tmp_path / "c"
    for name in ("list_attr_celeba.txt", "identity_CelebA.txt"):
        write(folder / name, long)
    fails("celeba", folder, tmp_path, "identity_CelebA.txt, line 1", "65,536 bytes")
    doc = '<doc id="1" ' + 'id="2" ' * limits.SHORT_LINE + "\n"  # would be tried in n * n ways
    fails("wikipedia", write(tmp_path / "w", doc), tmp_path, "line 1", "begins an article")


def test_columns_of_a_csv_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "COLUMNS", 10)
    source = write(tmp_path / "t.csv", ",".join(f"c{i}" for i in range(12)) + "\n")
    fails("table", source, tmp_path, "t.csv, line 1", "more than 10 columns")


def test_a_number_without_end_in_html(tmp_path):
    rows = json.dumps({"user": "a", "text": "x &#" + "9" * 5000 + "; y &#233;"}) + "\n"
    source = write(tmp_path / "t.jsonl", rows)
    found = made("text-by-user", source, tmp_path / "s", normalize=True)
    assert bytes(found["a"]["text"][0][:3].astype(np.uint8)) == b"x y"


# Parquet


def test_a_long_text_that_all_rows_share_is_refused(tmp_path):
    """1.4 KB that took 1 GB."""
    columns = {"client": ["x" * 1_000_000] * 100, "x": list(range(100))}
    source = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), source, compression="zstd")
    assert source.stat().st_size < 5000
    fails("table", source, tmp_path, "t.parquet", "'client'", "1,000,000 bytes")


def test_columns_of_a_parquet_file_that_are_left_out_are_not_read(tmp_path, monkeypatch):
    columns = {"client": [1, 1], "x": [1, 2], "note": ["x" * 10_000] * 2}
    source = tmp_path / "t.parquet"
    pq.write_table(pa.table(columns), source)
    read = []
    batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, "iter_batches",
        lambda self, **given: read.append(given["columns"]) or batches(self, **given),
    )  # fmt: skip
    found = prepare("table", source, tmp_path / "s")
    assert read == [["client", "x"]]
    assert found.notes == ["columns without numbers are left out: note."]


def test_a_text_that_rows_of_a_parquet_file_share_is_bounded(tmp_path, monkeypatch):
    columns = {"user": ["a"] * 1000, "text": ["x" * 5000] * 1000}  # in the file once
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    assert (tmp_path / "t.parquet").stat().st_size < 10_000
    monkeypatch.setattr(text, "LONGEST", 4999)
    fails("text-by-user", tmp_path / "t.parquet", tmp_path, "'text' has a text of 5,000 bytes")
    monkeypatch.setattr(text, "LONGEST", 5000)
    monkeypatch.setattr(parquet, "ROWS", 4_000_000)
    fails("text-by-user", tmp_path / "t.parquet", tmp_path, "1000 rows have more than 4,000,000")


def test_rows_of_a_parquet_file_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "ROWS", 10_000)
    source = tmp_path / "t.parquet"
    pq.write_table(pa.table({"client": [1, 2], "x": [[0] * 1000, [0] * 1000]}), source)
    fails("table", source, tmp_path, "t.parquet", "2 rows have more than 10,000 bytes")
    monkeypatch.setattr(parquet, "FOOTER", 10)
    fails("table", source, tmp_path, "t.parquet", "damaged")


# Stores, files beside them and TOML


def stored(path, **change):
    data = mixfl.ClientData.from_arrays({"x": np.arange(4)}, client=[0, 0, 1, 1])
    data.write(path)
    if change:
        names = {"id": ["0", "1"], "end": pa.array([2, 4], pa.int64())} | change
        found = pa.table(names)
        with pa.ipc.new_file(str(path / "clients.arrow"), found.schema) as file:
            file.write_table(found)
    return path


@pytest.mark.parametrize(
    ("column", "values"),
    [("end", [2.5, 4.0]), ("end", pa.array([None, 4], pa.int64())), ("id", [1, 2]),
     ("id", ["a", None])],
)  # fmt: skip
def test_a_store_with_other_columns_is_damaged(tmp_path, column, values):
    with pytest.raises(MixflError, match="is damaged"):
        mixfl.ClientData.open(stored(tmp_path / "s", **{column: values}))


@pytest.mark.parametrize("kind", ["O", "S8", "V8", "M8[ns]", "i4,i4"])
def test_a_store_holds_numbers(tmp_path, kind):
    path = stored(tmp_path / "s")
    schema = pa.schema([pa.field("x", pa.int64(), metadata={"shape": "[]", "dtype": kind})])
    with pa.ipc.new_file(str(path / "data.arrow"), schema) as file:
        file.write_batch(pa.record_batch([pa.array([1, 2, 3, 4])], schema=schema))
    with pytest.raises(MixflError, match="is damaged"):
        mixfl.ClientData.open(path)


def test_files_beside_a_store_are_bounded(tmp_path, monkeypatch):
    path = stored(tmp_path / "s")
    for deep in ("[" * 100_000, '{"a":' * 100_000):
        (path / "labels.json").write_text(deep)
        assert not any("labels" in line for line in info(path))
    (path / "titles.json").write_text("[" * 100_000)
    with pytest.raises(MixflError, match=r"titles\.json can't be read"):
        _titles(None, str(path))
    uses = {
        "titles.json": lambda: _titles(None, str(path)),
        "labels.json": lambda: info(path),
        "vocabulary.json": lambda: Vocabulary.read(path / "vocabulary.json"),
    }
    for name, use in uses.items():
        with (path / name).open("wb") as file:
            file.truncate(limits.SMALL + 1)
        with pytest.raises(MixflError, match="is larger than 16,777,216 bytes"):
            use()
        (path / name).unlink()


def test_names_do_not_steer_the_terminal(tmp_path):
    names = {"a\x1b]0;x\x07": np.arange(4), "y" * 500: np.arange(4)}
    mixfl.ClientData.from_arrays(names, client=[0, 0, 1, 1]).write(tmp_path / "s")
    (tmp_path / "s" / "labels.json").write_text(json.dumps(["cat", "\x1b[2J", "z" * 500]))
    (tmp_path / "s" / "titles.json").write_text(json.dumps({"\x1b[2J": "Heat\r\n"}))
    shown = info(tmp_path / "s")
    assert all(line.isprintable() and len(line) < 250 for line in shown)
    assert any("0 = cat" in line for line in shown)


def test_toml_is_small(tmp_path):
    path = write(tmp_path / "config.toml", "x = 1\n" + "#" * limits.TOML)
    with pytest.raises(MixflError, match="is larger than 65,536 bytes"):
        read_toml(path)
    assert read_toml(write(path, "x = 1\n")) == {"x": 1}
    with pytest.raises(MixflError, match="not valid TOML"):
        read_toml(write(path, b"x = '\xff'\n"))


# Temporary files and modes


def test_what_waits_on_disk_is_nobody_elses():
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    with Spill() as spill:
        spill.db.execute("PRAGMA cache_size = 1")
        rows = [("", "", "", str(i), 0, b"x" * 5000, i) for i in range(200)]
        spill.db.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        links = {
            int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        }  # fmt: skip
        mine = [fd for fd, path in links.items() if "/etilqs_" in path]  # SQLite's name for them
        assert mine
        for fd in mine:
            found = os.fstat(fd)
            assert stat.S_IMODE(found.st_mode) == 0o600
            assert found.st_nlink == 0
            assert found.st_size > 100_000


def test_a_link_in_the_place_of_a_partial_store_is_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "kept", "x")
    (tmp_path / "s.partial").symlink_to(elsewhere)
    source = write(tmp_path / "t.csv", "client,x\na,1\n")
    with pytest.raises(MixflError, match=r"s\.partial"):
        prepare("table", source, tmp_path / "s")
    assert [p.name for p in elsewhere.iterdir()] == ["kept"]


def test_a_store_is_as_open_as_the_umask_says(tmp_path):
    source = write(tmp_path / "t.csv", "client,x\na,1\n")
    before = os.umask(0o077)
    try:
        prepare("table", source, tmp_path / "s")
    finally:
        os.umask(before)
    for path in (tmp_path / "s", *(tmp_path / "s").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


# Mutations


def parquet_bytes():
    out = pa.BufferOutputStream()
    columns = {"client": ["a", "b", "a"], "x": [[1.5, 2], [3, 4], [5, 6]], "label": [0, 1, 0]}
    pq.write_table(pa.table(columns), out, compression="none")
    return out.getvalue().to_pybytes()


PARQUET = parquet_bytes()
LINES = b'{"client": "a", "x": [1, 2.5], "label": 0}\n' * 3
OTHERS = {
    "t.parquet": ("table", PARQUET),
    "t.jsonl": ("table", LINES),
    "t.jsonl.gz": ("table", gzip.compress(LINES, mtime=0)),
    "u.jsonl": ("text-by-user", b'{"user": 7, "text": "a &lt; b &#233; http://x.y"}\n' * 2),
    "w.jsonl": ("wikipedia", b'{"id": "1", "text": "some text"}\n' * 2),
}


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=60)
@given(changes=MUTATION)
def test_fuzz_other_files(name, changes):
    format, data = OTHERS[name]
    options = {"normalize": True} if name == "u.jsonl" else {}
    a_store_or_an_error(format, name, mutated(data, changes), **options)


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize("kind", images.READ)
@settings(max_examples=40)
@given(changes=MUTATION)
def test_fuzz_images(tmp_path_factory, kind, changes):
    path = tmp_path_factory.getbasetemp() / f"fuzzed.{kind}"
    Image.new("RGB", (9, 7), (200, 100, 50)).save(path, kind)
    path.write_bytes(mutated(path.read_bytes(), changes))
    try:
        found = images.read_image(path, 5)
    except MixflError as error:
        assert str(path) in str(error)
    else:
        assert found.shape == (5, 5, 3)


@settings(max_examples=40)
@given(changes=MUTATION)
def test_fuzz_paths(changes):
    data = mutated(b"path,label,client\n../x.png,0,a\ni.csv,1,b\n", changes)
    a_store_or_an_error("images", "i.csv", data)


@settings(max_examples=100)
@given(st.recursive(st.none() | st.text(max_size=3), lambda v: st.lists(v, max_size=3)))
def test_depth_is_counted(value):
    def depth(v):
        return 1 + max(map(depth, v), default=0) if isinstance(v, list) else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DEPTH", 2)
        assert limits.too_deep(value) == (depth(value) > 2)


# The package itself

UNPICKLE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
RUN = {"eval", "exec", "compile"}
CALLS = {"read_pickle", "extractall", "unpack_archive", "system", "popen"}
LOADS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("joblib", "load")}
SAFE = {("torch", "load"): ("weights_only", True), ("np", "load"): ("allow_pickle", False)}


def safe(call, name):
    """Is it told, in so many words, not to unpickle?"""
    return name in SAFE and SAFE[name] in [
        (given.arg, getattr(given.value, "value", None)) for given in call.keywords
    ]


def dangers(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in UNPICKLE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNPICKLE:
            yield node.module
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in RUN:
                yield called.id
            elif isinstance(called, ast.Attribute):
                owner = called.value.id if isinstance(called.value, ast.Name) else ""
                loads = (owner, called.attr) in LOADS and not safe(node, (owner, called.attr))
                if called.attr in CALLS or loads:
                    yield f"{owner}.{called.attr}"
            for given in node.keywords:
                if given.arg in ("allow_pickle", "shell") and not (
                    isinstance(given.value, ast.Constant) and given.value.value is False
                ):
                    yield f"{given.arg}="


def test_nothing_in_the_package_unpickles_or_runs_what_it_reads():
    found = {
        str(path.relative_to(PACKAGE)): list(dangers(path.read_text(encoding="utf-8")))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    assert len(found) > 100
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    ["import pickle", "from pickle import loads", "import torch; torch.load(x)", "np.load(x)",
     "torch.load(x, weights_only=False)", "torch.load(x, weights_only=w)",
     "np.load(x, allow_pickle=True)", "torch.load(x, allow_pickle=False)",
     "eval(x)", "exec(x)", "t.extractall()", "f(x, allow_pickle=True)", "f(x, shell=True)"],
)  # fmt: skip
def test_dangers_are_seen(line):
    assert list(dangers(line))
