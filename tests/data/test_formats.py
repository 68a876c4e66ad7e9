"""Official formats: small files as they are published, and what becomes of them; damaged ones."""

import csv
import gzip
import io
import itertools
import json
import shutil
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_files import (
    MUTATION,
    a_store_or_an_error,
    contents,
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
from mixfl.data import prepare as preparing
from mixfl.data import writer
from mixfl.data.formats.example_proto import parse_example, varints
from mixfl.data.formats.text import normalized, windows
from mixfl.data.prepare import FORMATS, info, prepare
from mixfl.data.split import HeldOutRows, group_sizes, held_out_clients
from mixfl.errors import MixflError

# MovieLens

RATINGS = (
    "2::1193::5::300\n2::661::3::100\n2::914::3::200\n1::3408::4::7\n10::5::1::1\n10::6::2::1\n"
)


def test_movielens_1m(tmp_path):
    write(tmp_path / "ml-1m" / "ratings.dat", RATINGS)
    write(tmp_path / "ml-1m" / "movies.dat", "1::Léon (1994)::Crime\n", "latin-1")
    found = made("movielens", tmp_path / "ml-1m", tmp_path / "s")
    pad = [0] * 8
    assert lists(found) == {  # user 1 has one rating and no example; 10 comes after 2
        "2": {"context": [[661, 0, *pad], [661, 914, *pad]], "movie": [914, 1193]},
        "10": {"context": [[5, 0, *pad]], "movie": [6]},
    }
    assert all(a.dtype == np.int32 for columns in found.values() for a in columns.values())


MOVIES = "1::Toy Story (1995)::Animation|Comedy\n73::Misérables, Les (1995)::Drama\n"
ITEMS = "1|Toy Story (1995)|01-Jan-1995||http://x|0|1\n267|unknown||||1|0\n"


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
@pytest.mark.parametrize("name", ["movies.dat", "movies.dat.gz"])
def test_titles_of_movies(tmp_path, name, encoding):
    path = write(tmp_path / "ml" / "ratings.dat", RATINGS)
    write(tmp_path / "ml" / name, MOVIES, encoding)
    made("movielens", path, tmp_path / "s", split="example:0.5")
    titles = {"1": "Toy Story (1995)", "73": "Misérables, Les (1995)"}
    for part in ("train", "test"):
        assert json.loads((tmp_path / "s" / part / "titles.json").read_text()) == titles
    assert "1 = Toy Story (1995), 73 = Mis" in info(tmp_path / "s")[-1]


def test_titles_of_movielens_100k_and_none(tmp_path):
    path = write(tmp_path / "ml" / "u.data", "1\t2\t3\t4\n1\t3\t3\t5\n")
    write(tmp_path / "ml" / "movies.dat", "of another data set")
    made("movielens", path, tmp_path / "none")
    assert not (tmp_path / "none" / "titles.json").exists()
    write(tmp_path / "ml" / "u.item", ITEMS, "latin-1")
    made("movielens", tmp_path / "ml", tmp_path / "s")
    found = json.loads((tmp_path / "s" / "titles.json").read_text())
    assert found == {"1": "Toy Story (1995)", "267": "unknown"}


@pytest.mark.parametrize(
    ("ratings", "name", "line"),
    [
        ("ratings.dat", "movies.dat", "3::Heat"),
        ("ratings.dat", "movies.dat", "x::Heat (1995)::Crime"),
        ("ratings.dat", "movies.dat", "0::Heat (1995)::Crime"),
        ("ratings.dat", "movies.dat", "3:: ::Crime"),
        ("ratings.dat", "movies.dat", "3|Heat (1995)|Crime"),
        ("ratings.dat", "movies.dat", ""),
        ("u.data", "u.item", "3|Heat (19"),
        ("u.data", "u.item", "3::Heat (1995)::Crime"),
    ],
)
def test_damaged_titles(tmp_path, ratings, name, line):
    good = {"movies.dat": MOVIES, "u.item": ITEMS}[name]
    write(tmp_path / "ml" / ratings, RATINGS)
    write(tmp_path / "ml" / name, good + line + "\n", "latin-1")
    fails("movielens", tmp_path / "ml", tmp_path, f"{name}, line 3", "title")


def test_movielens_context_is_the_last_ten(tmp_path):
    rows = "".join(f"7::{m}::4::{1000 + m}\n" for m in reversed(range(1, 14)))
    found = made("movielens", write(tmp_path / "ratings.dat.gz", rows), tmp_path / "s")["7"]
    assert found["movie"].tolist() == list(range(2, 14))
    assert found["context"][-1].tolist() == list(range(3, 13))
    assert found["context"][9].tolist() == list(range(1, 11))
    assert found["context"][8].tolist() == [*range(1, 10), 0]


def test_movielens_100k(tmp_path):
    write(tmp_path / "u.data", "196\t242\t3\t881250949\n196\t302\t3\t881250948\n")
    found = made("movielens", tmp_path, tmp_path / "s")
    assert lists(found) == {"196": {"context": [[302] + [0] * 9], "movie": [242]}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("1::2::3\n", 1),
        (RATINGS + "1::2", 7),
        (RATINGS + "1::x::3::4\n", 7),
        (RATINGS + "1::2::9::4\n", 7),
        (RATINGS + "1::0::3::4\n", 7),
        (RATINGS + "1::99999999999::3::4\n", 7),
        ("1::2::3::4\n\n", 2),
        ("userId,movieId\n", 1),
    ],
)
def test_damaged_ratings(tmp_path, text, line):
    fails(
        "movielens", write(tmp_path / "ratings.dat", text), tmp_path, "ratings.dat", f"line {line}"
    )


def test_movielens_without_its_file_or_rows(tmp_path):
    fails("movielens", tmp_path, tmp_path, "ratings.dat", "u.data")
    fails("movielens", write(tmp_path / "ratings.dat", ""), tmp_path, "no usable rows")
    one = write(tmp_path / "one.dat", "1::2::3::4\n")
    fails("movielens", one, tmp_path, "no example")


# CelebA


def celeba(folder, identities=(3, 1, 3, 1, 20), missing=(), size=(178, 218)):
    """The layout and files of the official archive; image i is of one colour."""
    names = [f"{i + 1:06d}.jpg" for i in range(len(identities))]
    smiling = [1 if i % 2 else -1 for i in range(len(names))]
    (folder / "img_align_celeba").mkdir(parents=True)
    for i, name in enumerate(names):
        if i not in missing:
            image = Image.new("RGB", size, (40 * i, 100, 250 - 40 * i))
            image.save(folder / "img_align_celeba" / name, quality=95)
    rows = [f"{n} {1:2d} {s:2d} -1 \n" for n, s in zip(names, smiling, strict=True)]
    write(folder / "list_attr_celeba.txt", f"{len(names)}\nMale Smiling Young \n{''.join(rows)}")
    pairs = zip(names, identities, strict=True)
    write(folder / "identity_CelebA.txt", "".join(f"{n} {i}\n" for n, i in pairs))
    parts = [0] * (len(names) - 2) + [1, 2]
    pairs = zip(names, parts, strict=True)
    write(folder / "list_eval_partition.txt", "".join(f"{n} {p}\n" for n, p in pairs))
    return folder


def test_celeba(tmp_path):
    source = celeba(tmp_path / "celeba", missing=(3,))
    result = prepare("celeba", source, tmp_path / "s", options={"group": 1})
    assert result.skipped == {"rows without an image": 1}
    found = contents(tmp_path / "s")
    assert list(found) == ["1", "3", "20"]
    assert found["3"]["image"].shape == (2, 84, 84, 3)
    assert found["3"]["image"].dtype == found["3"]["smiling"].dtype == np.uint8
    for client, row, image in (("3", 0, 0), ("1", 0, 1), ("3", 1, 2), ("20", 0, 4)):
        colour = np.array([40 * image, 100, 250 - 40 * image])
        assert np.abs(found[client]["image"][row].astype(int) - colour).max() <= 3
        assert found[client]["smiling"][row] == image % 2
    assert result.lines()[0].endswith("3 clients, 4 examples")


def test_three_identities_are_a_client_unless_said_otherwise(tmp_path):
    source = celeba(tmp_path / "celeba", identities=(1, 2, 3, 4, 5, 6, 7), size=(9, 9))
    assert list(made("celeba", source, tmp_path / "a", size=4)) == ["1..3", "4..7"]
    assert list(made("celeba", source, tmp_path / "b", size=4, group="2")) == [
        "1..2", "3..4", "5..7"
    ]  # fmt: skip
    assert list(made("celeba", source, tmp_path / "c", size=4, partition="iid:5")) == list("01234")
    more = made("celeba", source, tmp_path / "d", size=4, group_examples=4)
    assert list(more) == ["1..7"]


def test_celeba_official_split_other_layout_and_size(tmp_path):
    flat = celeba(tmp_path / "flat", size=(20, 30))
    source = tmp_path / "official"
    for part, names in {
        "Anno": ("list_attr_celeba.txt", "identity_CelebA.txt"),
        "Eval": ("list_eval_partition.txt",),
        "Img": ("img_align_celeba",),
    }.items():
        (source / part).mkdir(parents=True)
        for name in names:
            (flat / name).rename(source / part / name)  # fmt: skip
    found = made("celeba", source, tmp_path / "s", split="official", size=8, group=1)
    assert {part: list(clients) for part, clients in found.items()} == {
        "train": ["1", "3"], "valid": ["1"], "test": ["20"],
    }  # fmt: skip
    assert found["test"]["20"]["image"].shape == (1, 8, 8, 3)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("list_attr_celeba.txt", lambda t: t[:-8], ["line 7"]),
        ("list_attr_celeba.txt", lambda t: t[: t.rindex(b"000005")], ["line 7", "after 4"]),
        ("list_attr_celeba.txt", lambda t: t.replace(b"Smiling", b"Smile"), ["line 2", "Smiling"]),
        ("list_attr_celeba.txt", lambda t: t[2:], ["line 1"]),
        ("list_attr_celeba.txt", lambda t: t.replace(b"000003", b"\xff00003"), ["line 5", "utf-8"]),
        ("list_attr_celeba.txt", lambda t: t.replace(b"000003", b"../003"), ["line 5"]),
        ("list_attr_celeba.txt", lambda t: b"", ["line 1"]),
        ("identity_CelebA.txt", lambda t: t.replace(b" 20", b" x"), ["line 5"]),
        ("identity_CelebA.txt", lambda t: t[: t.index(b"000004")], ["000004.jpg"]),
        ("list_eval_partition.txt", lambda t: t.replace(b" 2", b" 3"), ["line 5"]),
        ("img_align_celeba/000002.jpg", lambda t: t[:300], ["000002.jpg", "image"]),
        ("img_align_celeba/000002.jpg", lambda t: b"", ["000002.jpg", "image"]),
    ],
)
def test_damaged_celeba(tmp_path, name, change, words):
    path = celeba(tmp_path / "celeba") / name
    path.write_bytes(change(path.read_bytes()))
    split = "official" if "partition" in name else None
    fails("celeba", tmp_path / "celeba", tmp_path, Path(name).name, *words, split=split)


def test_celeba_without_a_file_or_any_image(tmp_path):
    source = celeba(tmp_path / "a")
    (source / "identity_CelebA.txt").unlink()
    fails("celeba", source, tmp_path, "identity_CelebA.txt")
    fails("celeba", celeba(tmp_path / "b", missing=range(5)), tmp_path, "5 rows without an image")


# Text


def chars(rows):
    return ["".join(map(chr, r[r > 0])) for r in rows]


def test_windows_predict_each_character_once():
    for n in range(2, 25):
        text = "".join(chr(200 + i) for i in range(n))
        rows = windows(text, 5)
        assert rows.shape == (-(-(n - 1) // 5), 6)
        targets = [c for r in chars(rows) for c in r[1:]]
        assert targets == list(text[1:])
        assert all(r[0] for r in rows)


def test_text_by_user(tmp_path):
    rows = [
        {"site": "b", "user": "2", "texts": ["abcdefg", "x", "héé😀"]},
        {"site": "a", "user": 10, "texts": ["second"]},
        {"site": "a", "user": 9, "texts": ["first\n\u0000\ud83d"]},
        {"site": "b", "user": "2", "texts": ["later"]},
    ]
    text = "\ufeff" + "\n\n".join(json.dumps(r) for r in rows)
    result = prepare(
        "text-by-user", write(tmp_path / "t.jsonl.gz", text), tmp_path / "s", options={"length": 4}
    )
    found = contents(tmp_path / "s")
    assert {c: chars(x["text"]) for c, x in found.items()} == {
        "a/9": ["first", "t\n\ufffd"], "a/10": ["secon", "nd"],
        "b/2": ["abcde", "efg", "héé😀", "later"],
    }  # fmt: skip
    assert found["b/2"]["text"].dtype == np.int32
    assert result.skipped == {"texts shorter than two characters": 1}


def test_text_by_user_in_parquet(tmp_path):
    columns = {"author": ["a", "b", "a"], "body": ["hello", "x", "bye"], "n": [1, 2, 3]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    done = prepare("text-by-user", tmp_path / "t.parquet", tmp_path / "s",
                   options={"text": "body", "length": 4})  # fmt: skip
    assert chars(contents(tmp_path / "s")["a"]["text"]) == ["hello", "bye"]
    assert done.skipped == {"texts shorter than two characters": 1}
    numbers = {"user": [1, 2], "text": ["hello", "bye"], "site": ["a", "b"]}
    pq.write_table(pa.table(numbers), tmp_path / "l.parquet")
    found = made("text-by-user", tmp_path / "l.parquet", tmp_path / "l")
    assert {c: chars(v["text"]) for c, v in found.items()} == {"a/1": ["hello"], "b/2": ["bye"]}
    fails("text-by-user", tmp_path / "t.parquet", tmp_path, "line 1", "'text' with one", "option")
    missing = {"user": ["a", None], "text": ["hello", "you"]}
    pq.write_table(pa.table(missing), tmp_path / "m.parquet")
    fails("text-by-user", tmp_path / "m.parquet", tmp_path, "m.parquet, line 2", "an id")


def test_text_fields(tmp_path):
    one = write(tmp_path / "t.jsonl", '{"who": "x", "text": "some text"}\n')
    found = made("text-by-user", one, tmp_path / "s", client="who")
    assert chars(found["x"]["text"]) == ["some text"]
    fails("text-by-user", one, tmp_path, "t.jsonl, line 1", "'who'", "user")


def test_normalized_as_in_tff():
    text = "I can't re-use  &lt;b&gt; at https://x.org/?a=b, été!\nOK_now"
    assert normalized(text) == "i can't re-use < b > at <url> t ! ok _ now"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"user": "a", "texts": ["xyz"]}\n{"user": "a", "te', ["line 2", "JSON"]),
        (
            b'{"user": "a", "texts": ["xyz"]}\n{"user": "a", "texts": ["\xe9"]}\n',
            ["line 2", "utf-8"],
        ),
        (b'{"user": "a", "texts": "xyz"}\n', ["line 1", "texts"]),
        (b'{"user": "", "texts": ["xyz"]}\n', ["line 1"]),
        (b'{"texts": ["xyz"]}\n', ["line 1", "user"]),
        (b"[1, 2]\n", ["line 1", "object"]),
        (b"[" * 100_000, ["line 1"]),
        (b'{"user": ' + b"9" * 5000 + b', "texts": []}', ["line 1"]),
        (b"", ["no usable rows"]),
        (b'{"user": "a", "texts": []}\n', ["no usable rows"]),
    ],
)
def test_damaged_text_by_user(tmp_path, data, words):
    fails("text-by-user", write(tmp_path / "t.jsonl", data), tmp_path, "t.jsonl", *words)


def test_truncated_gzip(tmp_path):
    rows = "".join(json.dumps({"user": i, "texts": [str(i**9)]}) + "\n" for i in range(5000))
    path = write(tmp_path / "t.jsonl.gz", rows)
    path.write_bytes(path.read_bytes()[:-2000])
    fails("text-by-user", path, tmp_path, "t.jsonl.gz, line 4", "truncated")
    fails(
        "text-by-user", write(tmp_path / "u.gz.x", b"x").rename(tmp_path / "u.gz"), tmp_path, "u.gz"
    )


EXTRACTED = (
    '<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="Anarchism">\nAnarchism\n\n'
    'is.\n</doc>\n\n<doc id="9" revid="3" url="u" title="A > B">\nNine\n</doc>\n'
)


def test_wikipedia(tmp_path):
    write(tmp_path / "x" / "AA" / "wiki_00", EXTRACTED)
    write(tmp_path / "x" / "AB" / "wiki_01.gz", '{"id": "10", "title": "T", "text": "ten"}\n')
    write(tmp_path / "x" / "AB" / "wiki_02", '{"title": "T", "text": "tee"}\n{"text": "none"}\n')
    found = made("wikipedia", tmp_path / "x", tmp_path / "s")
    assert {c: chars(x["text"]) for c, x in found.items()} == {
        "9": ["Nine"], "10": ["ten"], "12": ["Anarchism\n\nis."], "T": ["tee"],
        "wiki_02:2": ["none"],
    }  # fmt: skip
    assert found["9"]["text"].shape == (1, 101)


def test_wikipedia_plain_text_is_cut_into_clients(tmp_path):
    text = "".join(f"line {i} of the text\n" for i in range(8000))
    found = made("wikipedia", write(tmp_path / "w.txt", text), tmp_path / "s")
    assert list(found) == ["w.txt:1", "w.txt:2", "w.txt:3"]
    joined = "\n".join(
        "".join(r[:-1] for r in chars(x["text"])[:-1]) + chars(x["text"])[-1]
        for x in found.values()
    )
    assert joined == text.strip("\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (EXTRACTED[:-8], ["line 7", "</doc>"]),
        (EXTRACTED.replace("</doc>\n\n", ""), ["line 5", "line 1"]),
        (EXTRACTED.replace('id="9"', ""), ["line 7", "id"]),
        (EXTRACTED + "more\n", ["line 10", "outside"]),
        ('{"text": "ab"}\n{"txt": "cd"}\n', ["line 2", "'text'"]),
        (EXTRACTED.encode() + b"\xff", ["line 10", "utf-8"]),
        ("", ["no usable rows"]),
    ],
)
def test_damaged_wikipedia(tmp_path, text, words):
    fails("wikipedia", write(tmp_path / "wiki_00", text), tmp_path, "wiki_00", *words)


# Tables

COLUMNS = {"user": ["b", "a", "b"], "x": [1.5, 2.0, -3.0], "n": [1, 2, 300], "note": ["p", "", "q"]}
EXPECTED = {"a": {"x": [2.0], "n": [2]}, "b": {"x": [1.5, -3.0], "n": [1, 300]}}


def table(path, columns=COLUMNS):
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if ".csv" in path.name:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(columns))
        writer.writeheader()
        writer.writerows(rows)
        return write(path, text.getvalue())
    if ".jsonl" in path.name:
        return write(path, "".join(json.dumps(r) + "\n" for r in rows))
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.jsonl", "t.jsonl.gz", "t.parquet"])
def test_table(tmp_path, name):
    path = table(tmp_path / name)
    result = prepare("table", path, tmp_path / "s", options={"client": "user"})
    found = contents(tmp_path / "s")
    assert lists(found) == EXPECTED
    assert {k: a.dtype for k, a in found["a"].items()} == {"x": np.float32, "n": np.int32}
    assert result.notes == ["columns without numbers are left out: note."]
    fails("table", path, tmp_path, name, "client", "user")


def test_table_of_lists_and_narrow_types(tmp_path):
    pixels = np.arange(12, dtype=np.uint8)
    columns = {
        "client": pa.array([7, 7, 5]),
        "image": pa.FixedSizeListArray.from_arrays(pa.array(pixels), 4),
        "pair": pa.array([[0.5, 1], [2, 3], [4, 5]], pa.list_(pa.float32())),
        "small": pa.array([1, 2, 3], pa.int16()),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = made("table", tmp_path / "t.parquet", tmp_path / "s")
    assert {k: str(a.dtype) for k, a in found["7"].items()} == {
        "image": "uint8", "pair": "float32", "small": "int16",
    }  # fmt: skip
    assert found["7"]["image"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    rows = write(tmp_path / "t.jsonl", '{"client": "é", "x": [[1, 2], [3, 4.5]], "y": true}\n')
    assert lists(made("table", rows, tmp_path / "j")) == {
        "é": {"x": [[[1, 2], [3, 4.5]]], "y": [1]}
    }


LISTS = {"client": [1, 2, 1, 2, 3], "t": [[], [1, 2], [3], [4, 5, 6], []],
         "f": [[0.5], [1.0], [], [2.0], []], "y": [1, 2, 3, 4, 5]}  # fmt: skip


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
@pytest.mark.parametrize("split", [False, True])
def test_table_of_lists_of_different_lengths(tmp_path, name, split):
    path = table(tmp_path / name, LISTS)
    options = {"split": "example:0.4"} if split else {}
    done = prepare("table", path, tmp_path / "s", options=options)
    assert sum("has lists of different lengths" in line for line in done.lines()) == 2
    found: dict = {}
    for part in ("train", "test") if split else (".",):
        for columns in contents(tmp_path / "s" / part).values():
            assert columns["t"].dtype == np.int32
            assert columns["f"].dtype == np.float32
            for i, y in enumerate(columns["y"].tolist()):
                found[y] = {c: columns[c][i][: columns[f"{c}_length"][i]].tolist() for c in "tf"}
                assert not columns["t"][i][columns["t_length"][i] :].any()
    assert found == {y: {"t": LISTS["t"][y - 1], "f": LISTS["f"][y - 1]} for y in LISTS["y"]}
    joined_up = made("table", path, tmp_path / "g", group=3)
    assert joined_up["1..3"]["t_length"].tolist() == [0, 1, 2, 3, 0]


def test_whole_numbers_too_large_to_be_exact_are_floats(tmp_path):
    path = write(tmp_path / "t.jsonl", '{"client": 1, "x": 1, "y": [1]}\n' * 2)
    path.write_text(path.read_text() + '{"client": 1, "x": 1e30, "y": [1e30]}\n')
    found = made("table", path, tmp_path / "s")["1"]
    assert found["x"].tolist() == [1, 1, np.float32(1e30)]
    assert found["y"].dtype == np.float32


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.csv", "client,x\na,1\nb,one\n", ["line 3", "'x'", "'one'"]),
        ("t.csv", "client,x\na,1\nb,\n", ["line 3", "'x'"]),
        ("t.csv", "client,x\na,1\nb\n", ["line 3", "1 fields"]),
        ("t.csv", 'client,x\na,1\nb,"2\n', ["line 3", "CSV"]),
        ("t.csv", "client,x\na,1\n,2\n", ["line 3", "client"]),
        ("t.csv", "client,x,x\na,1,2\n", ["line 1", "header"]),
        ("t.csv", "client,x\na,1\nb,1e50\n", ["line 3"]),
        ("t.csv", "client,x\na,text\n", ["line 2", "numbers"]),
        ("t.csv", "", ["line 1", "header"]),
        ("t.csv", "client,x\n", ["no usable rows"]),
        ("t.csv", "client,x\na,99999999999\n", ["32 bits"]),
        ("t.csv", b"client,x\na,1\n\xff,2\n", ["line 3", "utf-8"]),
        ("t.jsonl", '{"client": 1, "x": 1}\n{"client": 1}\n', ["line 2", "'x'"]),
        (
            "t.jsonl",
            '{"client": 1, "x": [[1]]}\n{"client": 1, "x": [[1, 2]]}\n',
            ["line 2", "[1, 1]"],
        ),
        ("t.jsonl", '{"client": 1, "x": [1]}\n{"client": 1, "x": ["a", "b"]}\n', ["line 2", "[1]"]),
        ("t.jsonl", '{"client": 1, "x": [1]}\n{"client": 1, "x": 2}\n', ["line 2", "[1]"]),
        ("t.jsonl", '{"client": 1, "x": 1}\n{"client": 1, "x": NaN}\n', ["line 2", "'nan'"]),
        ("t.jsonl", '{"client": 1, "x": 1}\n{"client": null, "x": 1}\n', ["line 2", "client"]),
        ("t.jsonl", '{"client": 1, "x": 1}\n{"client": 1, "x": "2"}\n', ["line 2", "'x'"]),
        ("t.txt", "client,x\n", [".parquet"]),
    ],
)
def test_damaged_tables(tmp_path, name, text, words):
    fails("table", write(tmp_path / name, text), tmp_path, name, *words)


def test_damaged_parquet(tmp_path):
    path = table(tmp_path / "t.parquet", {"client": [1, 2], "x": [1, None]})
    fails("table", path, tmp_path, "t.parquet, line 2", "'x'")
    path.write_bytes(path.read_bytes()[:-20])
    fails("table", path, tmp_path, "t.parquet", "damaged")


# LEAF


def test_leaf(tmp_path):
    first = {"f2": {"x": [[0.5, 1.0], [0.25, 2.0]], "y": [3, 4]}, "f1": {"x": [[1, 1]], "y": [0]}}
    write(tmp_path / "d" / "a.json", leaf(first, hierarchies=["h", "h"]))
    write(tmp_path / "d" / "b.json.gz", leaf({"f10": {"x": [[2, 3]], "y": [9]}}))
    found = made("leaf", tmp_path / "d", tmp_path / "s")
    assert lists(found) == {
        "f1": {"x": [[1, 1]], "y": [0]},
        "f2": {"x": [[0.5, 1.0], [0.25, 2.0]], "y": [3, 4]},
        "f10": {"x": [[2, 3]], "y": [9]},
    }
    assert found["f1"]["x"].dtype == np.float32
    assert found["f1"]["y"].dtype == np.int32


def test_leaf_larger_than_a_chunk_and_text(tmp_path):
    rng = np.random.default_rng(0)
    data = {str(i): {"x": rng.integers(0, 9, (40, 30)).tolist(), "y": [i] * 40} for i in range(99)}
    path = write(tmp_path / "a.json", json.dumps(json.loads(leaf(data)), indent=1))
    assert lists(made("leaf", path, tmp_path / "s")) == data
    speech = {"ROMEO": {"x": ["to be ", "o be o"], "y": ["o", "r"]}}
    found = made("leaf", write(tmp_path / "b.json", leaf(speech)), tmp_path / "t", length=6)
    assert chars(found["ROMEO"]["text"]) == ["to be o", "o be or"]


def test_leaf_sent140(tmp_path):
    tweets = {
        "ann": {
            "x": [["1", "Mon", "NO_QUERY", "ann", "hi é"], ["2", "d", "q", "ann", ""]],
            "y": [1, 0],
        },
        "bob": {"x": [["3", "Tue", "NO_QUERY", "bob", "so, no"]], "y": [0]},
    }
    found = made("leaf", write(tmp_path / "all_data.json", leaf(tweets)), tmp_path / "s")
    assert "".join(map(chr, found["ann"]["text"][0][:4])) == "hi é"
    assert found["ann"]["text_length"].tolist() == [4, 0]
    assert found["ann"]["text"].shape == (2, 6)
    assert found["ann"]["label"].tolist() == [1, 0]
    assert "".join(map(chr, found["bob"]["text"][0])) == "so, no"
    for bad in ({"x": [["1", "d", "q", "a", "text"]], "y": ["good"]}, {"x": [[1.0]], "y": [1]}):
        text = leaf({**tweets, "cy": bad})
        fails("leaf", write(tmp_path / "bad.json", text), tmp_path, "user 'cy', example 1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (leaf({"a": {"x": [[1]], "y": [2]}})[:-9], ["line 1", "JSON"]),
        ("\n\n" + leaf({"a": {"x": [[1]], "y": [2]}}) + "x", ["line 3", "more"]),
        (leaf({"a": {"x": [[1]], "y": [2, 3]}}), ["'a'", "equal length"]),
        (leaf({"a": {"x": ["1.jpg"], "y": [2]}}), ["'a'", "celeba"]),
        (leaf({"a": {"x": [[1], [1, 2]], "y": [2, 3]}}), ["'x'", "[1]"]),
        (leaf({"a": {"x": [[1]], "y": [2]}}).replace('["a"]', '["a", "b"]'), ["2 names", "has 1"]),
        (leaf({}), ["user_data"]),
        ("[]", ["line 1"]),
        ("{}", ["users"]),
        (b'{"users": ["\xff"]}', ["line 1", "UTF-8"]),
        ('{"users": {"a": nul}}' + " " * 100, ["line 1"]),
    ],
)
def test_damaged_leaf(tmp_path, text, words):
    fails("leaf", write(tmp_path / "a.json", text), tmp_path, "a.json", *words)


# Images


def test_images_in_folders(tmp_path):
    source = pictures(tmp_path / "p")
    fails("images", source, tmp_path, "partition", "iid:100")
    found = made("images", source, tmp_path / "s", partition="iid:2")
    assert sorted(len(c["label"]) for c in found.values()) == [2, 3]
    rows = sorted((int(c["image"][i, 0, 0, 0]), int(c["label"][i])) for c in found.values()
                  for i in range(len(c["label"])))  # fmt: skip
    assert rows == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
    assert found["0"]["image"].shape[1:] == (4, 6, 3)
    assert "0 = cat, 1 = dog, 2 = emu" in info(tmp_path / "s")[-1]


def test_images_in_a_csv(tmp_path):
    pictures(tmp_path)
    rows = "path,label,client\ncat/1.png,7,u2\ndog/1.png,3,u1\nemu/1.png,7,u2\n"
    found = made("images", write(tmp_path / "i.csv", rows), tmp_path / "s", size=5)
    assert {c: x["label"].tolist() for c, x in found.items()} == {"u1": [3], "u2": [7, 7]}
    assert found["u2"]["image"][1].tolist() == np.full((5, 5, 3), [4, 8, 12]).tolist()
    fails("images", tmp_path / "i.csv", tmp_path, "line 2", "who", client="who")
    missing = write(tmp_path / "m.csv", rows + "cat/9.png,1,u\n")
    fails("images", missing, tmp_path, "m.csv, line 5", "cat/9.png")


def test_images_of_two_sizes_and_damaged(tmp_path):
    source = pictures(tmp_path / "p")
    Image.new("RGB", (9, 9)).save(source / "emu" / "1.png")
    fails("images", source, tmp_path, "9x9", "6x4", "size", partition="iid:1")
    write(source / "emu" / "1.png", b"garbage")
    fails("images", source, tmp_path, "1.png", "Pillow", partition="iid:1")
    (tmp_path / "none").mkdir()
    fails("images", tmp_path / "none", tmp_path, "folder per class", partition="iid:1")


# TFF


def test_examples_as_protobuf_writes_them():
    found = parse_example(proto(a=[b"x", b"yz"], b=[0.5, -2.0], c=[0, -1, 300, 2**62]))
    assert found["a"] == [b"x", b"yz"]
    assert found["b"].tolist() == [0.5, -2.0]
    assert found["c"].tolist() == [0, -1, 300, 2**62]
    assert varints(b"\x00\x7f\x80\x01").tolist() == [0, 127, 128]


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 200), st.integers(1, 255))
def test_damaged_examples_are_value_errors(noise, at, flip):
    valid = bytearray(proto(a=[b"x"], b=[0.5], c=[0, 300]))
    valid[at % len(valid)] ^= flip
    for data in (noise, bytes(valid), bytes(valid[: at % len(valid)]), bytes(valid) + noise):
        try:
            parse_example(data)
        except ValueError:
            pass


def test_tff_celeba(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (3, 84, 84, 3))
    protos = [proto(image=x.ravel().tolist(), smiling=[i % 2], male=[1])
              for i, x in enumerate(images)]  # fmt: skip
    rows = [
        ("split_by_clients_test", "7", protos[0]),
        ("split_by_clients_train", "10", protos[1]),
        ("split_by_clients_train", "9", protos[2]),
        ("split_by_examples_test", "9", b"x"),
    ]
    path = tff(tmp_path / "celeba.sqlite", rows)
    assert list(made("tff-celeba", path, tmp_path / "grouped")) == ["7..10"]
    found = made("tff-celeba", path, tmp_path / "s", group=1)
    assert list(found) == ["7", "9", "10"]
    np.testing.assert_array_equal(found["9"]["image"], images[2:])
    assert [c["smiling"].tolist() for c in found.values()] == [[0], [0], [1]]
    assert found["9"]["image"].dtype == found["9"]["smiling"].dtype == np.uint8
    split = made("tff-celeba", path, tmp_path / "t", split="official", group=1)
    assert {k: list(v) for k, v in split.items()} == {"test": ["7"], "train": ["9", "10"]}


def test_tff_stackoverflow(tmp_path):
    def row(split, client, text):
        return split, client, proto(tokens=[text.encode()], score=[5], title=[b"t"])

    rows = [row("train", "0012", "how do i ?"), row("heldout", "0100", "held out"),
            row("train", "0012", "like this ."), row("test", "0012", "x"),
            row("test", "0013", "after 2018")]  # fmt: skip
    path = tff(tmp_path / "so.sqlite", rows)
    found = made("tff-stackoverflow", path, tmp_path / "s", length=20)
    assert {c: chars(x["text"]) for c, x in found.items()} == {
        "0012": ["how do i ?", "like this ."], "0013": ["after 2018"], "0100": ["held out"],
    }  # fmt: skip
    split = made("tff-stackoverflow", path, tmp_path / "t", split="official")
    assert {k: list(v) for k, v in split.items()} == {
        "train": ["0012"], "heldout": ["0100"], "test": ["0013"],
    }  # fmt: skip


def test_damaged_tff(tmp_path):
    good = ("train", "a", proto(tokens=[b"some text"]))
    for i, (row, word) in enumerate([
        (("train", "b", b"\xff\xff"), "row 2"), (("train", "b", None), "row 2"),
        (("train", "b", proto(other=[1])), "'tokens'"), (("train", "", b""), "client_id"),
        (("train", "b", proto(tokens=[b"\xff\xfe"])), "row 2"),
        (("train", b"\xff", proto(tokens=[b"abc"])), "row 2"),
    ]):  # fmt: skip
        path = tff(tmp_path / f"{i}.sqlite", [good, row])
        fails("tff-stackoverflow", path, tmp_path, path.name, word)
    fails("tff-celeba", path, tmp_path, "split_by_clients_train")
    path.write_bytes(path.read_bytes()[:5000])
    fails("tff-stackoverflow", path, tmp_path, path.name, "SQLite")
    fails(
        "tff-celeba", write(tmp_path / "x.sqlite", b"garbage" * 999), tmp_path, "x.sqlite", "SQLite"
    )
    fails("tff-celeba", tmp_path, tmp_path, "SQLite")


# Groups, partitions, splits


def numbers(path, clients=10, rows=6):
    text = "client,x,label\n" + "".join(
        f"{c},{c * 100 + r},{r % 3}\n" for r in range(rows) for c in range(clients)
    )
    return write(path, text)


def values(clients):
    return sorted(x for c in clients.values() for x in c["x"].tolist())


ALL = sorted(c * 100 + r for r in range(6) for c in range(10))


def test_group_sizes():
    def sizes(clients, size):
        return group_sizes([("", 1)] * clients, size)

    assert sizes(9, 3) == [3, 3, 3]
    assert sizes(10, 3) == [3, 3, 4]
    assert sizes(11, 3) == [3, 3, 5]
    assert sizes(7, 4) == [7]
    assert len(sizes(8408, 3)) == 2802  # as the paper has it
    assert sizes(5, 4) == [5]
    assert sizes(1, 4) == [1]


def test_groups_of_at_least_so_many_examples():
    def sizes(counts, size=1, examples=1):
        return group_sizes([("", n) for n in counts], size, examples)

    assert sizes([9, 1, 1, 8, 9], examples=9) == [1, 3, 1]
    assert sizes([9, 1, 1, 8, 3, 4], examples=9) == [1, 5]  # what is left is too little
    assert sizes([1, 2], examples=9) == [2]  # there is no group that it could join
    assert sizes([9, 9, 9, 1, 1, 9], size=2, examples=9) == [2, 2, 2]
    assert sizes([4, 4, 4, 4, 4, 4], size=2, examples=9) == [3, 3]
    assert sizes([9, 9, 9, 9, 9], size=2, examples=9) == [2, 3]
    sites = [("a", 5), ("a", 1), ("a", 6), ("b", 1), ("c", 6), ("c", 1)]
    assert group_sizes(sites, 1, 6) == [2, 1, 1, 2]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=60),
    st.integers(1, 5), st.integers(1, 20),
)  # fmt: skip
def test_groups_are_whole_of_one_site_and_large_enough(clients, size, examples):
    clients = sorted(clients, key=lambda client: client[0])
    groups = group_sizes(clients, size, examples)
    assert sum(groups) == len(clients)
    at = np.cumsum([0, *groups])
    found = [clients[a:b] for a, b in itertools.pairwise(at)]
    for group in found:
        sites = {site for site, _ in group}
        assert len(sites) == 1
        alone = sum({site for site, _ in other} == sites for other in found) == 1
        assert alone or (len(group) >= size and sum(n for _, n in group) >= examples)


def by_site(path, text="x" * 21):
    """Sites s9 and s10 with users that have 1, 2, 3, ... texts of two sequences of ten."""
    rows = [
        {"site": site, "user": user, "texts": [text] * user}
        for site in ("s10", "s9") for user in range(1, 8)
    ]  # fmt: skip
    return write(path, "".join(json.dumps(r) + "\n" for r in rows))


def test_texts_are_joined_within_a_site(tmp_path):
    path = by_site(tmp_path / "t.jsonl")
    found = made("text-by-user", path, tmp_path / "s", length=10, group_examples=20)
    assert {c: len(x["text"]) for c, x in found.items()} == {
        "s9/1..s9/4": 20, "s9/5..s9/7": 36, "s10/1..s10/4": 20, "s10/5..s10/7": 36,
    }  # fmt: skip
    by_number = made("text-by-user", path, tmp_path / "n", length=10, group=5)
    assert list(by_number) == ["s9/1..s9/7", "s10/1..s10/7"]
    both = made("text-by-user", path, tmp_path / "b", length=10, group_examples=20, group=6)
    assert list(both) == ["s9/1..s9/7", "s10/1..s10/7"]


def test_sites_are_kept_apart_whatever_their_names(tmp_path):
    users = [("a/b", "c"), ("a", "b/c"), ("a/b", "d"), ("a", "d"), ("7", "1"), ("07", "2")]
    rows = [{"site": s, "user": u, "text": f"{s}:{u}"} for s, u in users]
    rows.append({"user": "7/3", "text": ":7/3"})
    path = write(tmp_path / "t.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    found = made("text-by-user", path, tmp_path / "s", group=9)
    groups = [{text.split(":")[0] for text in chars(x["text"])} for x in found.values()]
    assert sorted(map(sorted, groups)) == [[""], ["07"], ["7"], ["a"], ["a/b"]]


def test_held_out_clients_of_uneven_groups_are_disjoint(tmp_path):
    path, seen = by_site(tmp_path / "t.jsonl"), []
    options = {"length": 10, "group_examples": 12, "split": "client:0.3"}
    prepare("text-by-user", path, tmp_path / "s", options=options, report=lambda *s: seen.append(s))
    parts = {name: contents(tmp_path / "s" / name) for name in ("train", "test")}
    assert {name: len(clients) for name, clients in parts.items()} == {"train": 6, "test": 2}
    assert not set(parts["train"]) & set(parts["test"])
    assert sum(len(c["text"]) for p in parts.values() for c in p.values()) == 112
    assert {text for *_, text in seen} == {
        "reading t.jsonl",
        "counting examples",
        "writing clients",
    }
    assert seen[-1] == (8, 8, "writing clients")


def test_examples_are_counted_as_they_are_made(tmp_path):
    """In each format: no group ends before it has enough, and none goes on after it."""
    so = [("train", str(i), proto(tokens=[b"t" * (8 * i + 1)])) for i in range(1, 9)]
    speech = {str(i): {"x": ["to be or not"] * i, "y": ["o"] * i} for i in range(1, 9)}
    sources = {
        "tff-stackoverflow": tff(tmp_path / "so.sqlite", so),
        "leaf": write(tmp_path / "b.json", leaf(speech)),
        "movielens": write(tmp_path / "r.dat", "".join(
            f"{u}::{m + 1}::4::{m}\n" for u in range(1, 9) for m in range(u))),
        "table": write(tmp_path / "t.csv", "client,x\n" + "".join(
            f"{c},1\n" * c for c in range(1, 9))),
        "wikipedia": write(tmp_path / "w.jsonl", "".join(
            json.dumps({"id": i, "text": "w" * 7 * i}) + "\n" for i in range(1, 9))),
    }  # fmt: skip
    for format, source in sources.items():
        length = {} if format in ("movielens", "table") else {"length": 5}
        single = made(format, source, tmp_path / f"{format}-1", **length)
        sizes = [len(next(iter(c.values()))) for c in single.values()]
        joined = made(format, source, tmp_path / f"{format}-8", group_examples=8, **length)
        expected = group_sizes([("", n) for n in sizes], 1, 8)
        names, at = list(single), 0
        for name, size in zip(joined, expected, strict=True):
            first, last = names[at], names[at + size - 1]
            assert name == (first if size == 1 else f"{first}..{last}")
            at += size


def test_groups_in_order_of_id(tmp_path):
    found = made("table", numbers(tmp_path / "t.csv", clients=12), tmp_path / "s", group=5)
    assert list(found) == ["0..4", "5..11"]
    assert found["0..4"]["x"].tolist() == [c * 100 + r for c in range(5) for r in range(6)]


def test_split_by_client(tmp_path):
    path = numbers(tmp_path / "t.csv")
    found = made("table", path, tmp_path / "s", split="client:0.3")
    assert len(found["test"]) == 3
    assert not set(found["train"]) & set(found["test"])
    assert values(found["train"] | found["test"]) == ALL
    again = made("table", path, tmp_path / "t", split="client:0.3")
    assert list(again["test"]) == list(found["test"])
    other = made("table", path, tmp_path / "u", split="client:0.3", seed=1)
    assert list(other["test"]) != list(found["test"])
    fails(
        "table",
        path,
        tmp_path,
        "split by client needs at least two clients",
        split="client:0.3",
        group=20,
    )


def test_split_by_example(tmp_path):
    found = made("table", numbers(tmp_path / "t.csv"), tmp_path / "s", split="example:0.25")
    assert sum(len(c["x"]) for c in found["test"].values()) == 15
    assert sorted(values(found["train"]) + values(found["test"])) == ALL
    assert {len(c["x"]) for c in found["train"].values()} == {4, 5}
    one = write(tmp_path / "one.csv", "client,x\na,1\nb,2\n")
    fails("table", one, tmp_path, "no examples for 'test'", split="example:0.9")


def test_movies_are_split_in_time(tmp_path):
    rows = "".join(f"{u}::{m}::4::{m}\n" for u in (1, 2) for m in range(1, 12))
    found = made(
        "movielens", write(tmp_path / "ratings.dat", rows), tmp_path / "s", split="example:0.2"
    )
    assert found["train"]["1"]["movie"].tolist() == list(range(2, 10))
    assert found["test"]["2"]["movie"].tolist() == [10, 11]


def test_rounding_is_carried_over():
    rows = HeldOutRows(0.1, 0, False)
    assert sum(int(rows.choose(3).sum()) for _ in range(100)) == 30
    assert HeldOutRows(0.9, 0, True).choose(4).tolist() == [False, True, True, True]
    assert held_out_clients(1000, 0.1, 0).sum() == 100


def test_iid_partition(tmp_path):
    path = numbers(tmp_path / "t.csv")
    found = made("table", path, tmp_path / "s", partition="iid:7")
    assert sorted(len(c["x"]) for c in found.values()) == [8] * 3 + [9] * 4
    assert values(found) == ALL


def test_dirichlet_partition(tmp_path):
    text = "x,label\n" + "".join(f"{i},{i % 2}\n" for i in range(4000))
    path = write(tmp_path / "t.csv", text)

    def spread(alpha):
        """Mean over labels of the largest client's share."""
        found = made("table", path, tmp_path / alpha, partition=f"dirichlet:{alpha}:10")
        assert values(found) == list(range(4000))
        counts = np.array([np.bincount(c["label"], minlength=2) for c in found.values()])
        return (counts / counts.sum(0)).max(0).mean()

    assert spread("1000") < 0.15
    assert spread("0.001") > 0.9
    fails("table", path, tmp_path, "option label", partition="dirichlet:1:10", label="y")
    wiki = write(tmp_path / "w.jsonl", '{"text": "abc"}\n')
    fails("wikipedia", wiki, tmp_path, "dirichlet", partition="dirichlet:1:2")


def test_limit_and_progress(tmp_path):
    seen = []
    prepare(
        "table", numbers(tmp_path / "t.csv"), tmp_path / "s", options={"limit": 25},
        report=lambda *step: seen.append(step),
    )  # fmt: skip
    assert len(values(contents(tmp_path / "s"))) == 25
    assert seen[-1] == (10, 10, "writing clients")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group": 0}, ["group", "whole number"]),
        ({"group": "x"}, ["group"]),
        ({"group_examples": 0}, ["group_examples", "whole number"]),
        ({"size": 3}, ["no option 'size'", "client"]),
        ({"split": "client"}, ["client:0.1"]),
        ({"split": "client:1.5"}, ["client:1.5"]),
        ({"split": "official"}, ["official"]),
        ({"partition": "iid"}, ["iid:100"]),
        ({"partition": "dirichlet:0:5"}, ["dirichlet:0.3:100"]),
        ({"partition": "dirichlet:nan:5"}, ["dirichlet:0.3:100"]),
    ],
)
def test_bad_options(tmp_path, options, words):
    fails("table", numbers(tmp_path / "t.csv"), tmp_path, *words, **options)


def test_bad_format_source_and_target(tmp_path):
    fails("celebra", tmp_path, tmp_path, "Did you mean 'celeba'")
    for format in FORMATS:
        fails(format, tmp_path / "nowhere", tmp_path, "nowhere", "does not exist")
    (tmp_path / "target").mkdir()
    fails("table", numbers(tmp_path / "t.csv"), tmp_path, "already exists")


@pytest.mark.parametrize("split", [None, "client:0.5"])
def test_what_a_killed_preparation_leaves_is_replaced(tmp_path, split):
    path = numbers(tmp_path / "t.csv")
    made("table", path, tmp_path / "s.partial", split=split)
    assert made("table", path, tmp_path / "s", split=split)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s", "t.csv"]


@pytest.mark.parametrize("split", [None, "client:0.5"])
def test_interrupted(tmp_path, split, monkeypatch):
    monkeypatch.setattr(writer, "BATCH_BYTES", 16)

    def stop(done, total, text):
        if text == "writing clients" and done == total:
            raise KeyboardInterrupt

    path = numbers(tmp_path / "t.csv")
    before = set(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        prepare("table", path, tmp_path / "s", options={"split": split}, report=stop)
    assert set(tmp_path.rglob("*")) == before


def test_info_of_a_folder_of_stores_shows_them_all(tmp_path):
    data = mixfl.ClientData.from_arrays({"x": np.arange(4)}, client=np.arange(4))
    for name in ("federated", "central/train", "central/test"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        data.write(tmp_path / name)
    shown = info(tmp_path)
    for name in ("federated", "central/train", "central/test"):
        assert str(tmp_path / name) in shown


def test_info(tmp_path):
    made("table", numbers(tmp_path / "t.csv"), tmp_path / "s", group=4)
    lines = info(tmp_path / "s")
    assert lines[1:3] == ["  clients    2", "  examples   60"]
    assert "    x      int32 []" in lines
    assert "  examples per client: min 24, median 30, mean 30.0, max 36" in lines
    assert next(line.split() for line in lines if line.endswith("#")) == ["24", "1", "#" * 40]
    made("table", tmp_path / "t.csv", tmp_path / "split", split="client:0.5")
    assert sum("clients    5" in line for line in info(tmp_path / "split")) == 2
    with pytest.raises(MixflError, match="not a client store"):
        info(tmp_path / "nowhere")


# Whatever the bytes are


def rows_of(n, name):
    users = max(n // 50, 1)
    if name == "ratings.dat":
        return "".join(f"{i % users + 1}::{i % 97 + 1}::4::{i}\n" for i in range(n))
    if name == "t.csv":
        return "client,x\n" + "".join(f"{i % users},{i}\n" for i in range(n))
    if name == "a.json":
        return leaf({str(i): {"x": [[i] * 9] * 50, "y": [1] * 50} for i in range(users)})
    return "".join(
        json.dumps({"user": i % users, "id": i % users, "text": f"text {i} " * 5}) + "\n"
        for i in range(n)
    )


@pytest.mark.parametrize(
    ("format", "name"),
    [("movielens", "ratings.dat"), ("table", "t.csv"), ("text-by-user", "t.jsonl"),
     ("wikipedia", "w.jsonl"), ("leaf", "a.json")],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"group_examples": 60}])
def test_memory_stays_flat(tmp_path, monkeypatch, format, name, options):
    monkeypatch.setattr(writer, "BATCH_BYTES", 1 << 13)

    def peak(n):
        path = write(tmp_path / str(n) / name, rows_of(n, name))
        tracemalloc.start()
        prepare(format, path, tmp_path / f"s{n}", options=options)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(100)  # imports
    few, many = peak(1000), peak(10000)
    assert many < 1.5 * few + 200_000


VALID = {
    "movielens": ("ratings.dat", RATINGS.encode()),
    "text-by-user": (
        "t.jsonl",
        b'{"site": "s", "user": "a", "texts": ["some text", "more"]}\n' * 3,
    ),
    "wikipedia": ("wiki_00", EXTRACTED.encode()),
    "leaf": ("a.json", leaf({"a": {"x": [[0.5, 1]], "y": [2]}, "b": {"x": [], "y": []}}).encode()),
    "table": ("t.csv", b"client,x,label\na,1,0\nb,2.5,1\na,-3,0\n"),
}


@pytest.mark.parametrize("format", VALID)
@settings(max_examples=150)
@given(
    changes=MUTATION, noise=st.binary(max_size=80), group=st.integers(1, 3), least=st.integers(1, 4)
)  # fmt: skip
def test_fuzz_mutations(format, changes, noise, group, least):
    name, data = VALID[format]
    given = {"group": group, "group_examples": least}
    a_store_or_an_error(format, name, mutated(data, changes), **given)
    a_store_or_an_error(format, name, noise, **given)


@settings(max_examples=100)
@given(changes=MUTATION, which=st.integers(0, 1))
def test_fuzz_titles(changes, which):
    ratings, name = [("ratings.dat", "movies.dat"), ("u.data", "u.item")][which]
    data = mutated([MOVIES, ITEMS][which].encode("latin-1"), changes)
    with tempfile.TemporaryDirectory() as folder:
        source = write(Path(folder) / "in" / ratings, RATINGS)
        source.with_name(name).write_bytes(data)
        try:
            prepare("movielens", source, Path(folder) / "s", options={})
        except MixflError as error:
            assert f"{name}, line" in str(error)
        else:
            json.loads((Path(folder) / "s" / "titles.json").read_text(encoding="utf-8"))
            assert info(Path(folder) / "s")


@pytest.mark.parametrize(
    ("format", "name"),
    [(f, VALID[f][0] + ".gz") for f in VALID] + [("table", "t.jsonl"), ("table", "t.parquet"),
     ("tff-celeba", "x.sqlite"), ("tff-stackoverflow", "x.sqlite"), ("images", "i.csv")],
)  # fmt: skip
@settings(max_examples=40)
@given(noise=st.binary(max_size=80), zipped=st.booleans(), cut=st.integers(0, 40))
def test_fuzz_noise(format, name, noise, zipped, cut):
    data = gzip.compress(noise)[: -cut or None] if zipped else noise
    a_store_or_an_error(format, name, data)


@settings(max_examples=60)
@given(changes=MUTATION)
def test_fuzz_sqlite(changes):
    with tempfile.TemporaryDirectory() as folder:
        rows = [("train", str(i), proto(tokens=[b"text %d" % i])) for i in range(5)]
        data = tff(Path(folder) / "x.sqlite", rows).read_bytes()
    changes = [(kind, at * 7, new) for kind, at, new in changes]
    a_store_or_an_error("tff-stackoverflow", "x.sqlite", mutated(data, changes))


@settings(max_examples=40)
@given(changes=MUTATION, which=st.integers(0, 3))
def test_fuzz_celeba(changes, which):
    with tempfile.TemporaryDirectory() as folder:
        source = celeba(Path(folder) / "c", size=(9, 9))
        name = ("list_attr_celeba.txt", "identity_CelebA.txt", "list_eval_partition.txt",
                "img_align_celeba/000002.jpg")[which]  # fmt: skip
        (source / name).write_bytes(mutated((source / name).read_bytes(), changes))
        try:
            prepare("celeba", source, Path(folder) / "s", options={"split": "official", "size": 4})
        except MixflError:
            assert not (Path(folder) / "s").exists()
        else:
            assert info(Path(folder) / "s")
        shutil.rmtree(Path(folder) / "s", ignore_errors=True)
        assert [p.name for p in Path(folder).iterdir()] == ["c"]


def test_all_formats_are_there():
    assert set(preparing.FORMATS) == {
        "celeba", "images", "leaf", "movielens", "table", "text-by-user", "tff-celeba",
        "tff-hdf5", "tff-stackoverflow", "wikipedia",
    }  # fmt: skip
