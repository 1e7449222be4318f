from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from msllm.engine.data import formats
from msllm.engine.data.records import Record, find_files, read_blocks, split_keys
from msllm.errors import InputError

TEXTS = ["one", 'zwei\nzeilen, "quoted"', "三\t𝄞", "x" * 3000, "\u2028 \x0c\r mid"]


def records(path: Path, *keys: str) -> list[Record]:
    keys = keys or ("text",)
    return [record for block in read_blocks(path, keys) for record in block.records(keys)]


def texts(path: Path, *keys: str) -> list[str]:
    found = records(path, *keys)
    assert not [record.flaw for record in found if record.flaw]
    return [record.text for record in found]


def flaws(path: Path, *keys: str) -> list[tuple[int, str]]:
    return [(record.line, record.flaw) for record in records(path, *keys) if record.flaw]


def as_bytes(kind: str) -> bytes:
    rows = [{"id": i, "text": text} for i, text in enumerate(TEXTS)]
    if kind == "jsonl":
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if kind == "json":
        return json.dumps(rows, indent=1, ensure_ascii=False).encode()
    if kind == "csv":
        quoted = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
        lines = [f"{i},{text}\n" for i, text in enumerate(quoted)]
        return ("id,text\n" + "".join(lines)).encode()
    sink = pa.BufferOutputStream()
    table = pa.table({"id": list(range(len(rows))), "text": TEXTS})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, sink, row_group_size=2)
    elif kind == "feather":
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "arrow", "feather"])
@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_each_kind_gives_the_texts_in_order(tmp_path, kind, compression):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    path = tmp_path / f"data.v1.{kind}{compression}"
    path.write_bytes(pack(as_bytes(kind)))
    assert texts(path) == TEXTS


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
def test_a_txt_file_is_one_document(tmp_path, compression):
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    path = tmp_path / f"book.txt{compression}"
    path.write_bytes(pack(b"\xef\xbb\xbfone\n\ntwo\r\n"))
    assert texts(path) == ["one\n\ntwo\r\n"]


def test_members_of_concatenated_archives_are_all_read(tmp_path):
    rows = [b'{"text": "a"}\n', b'{"text": "b"}\n']
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, rows)))
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(zstandard.compress, rows)))
    assert texts(tmp_path / "a.jsonl.gz") == texts(tmp_path / "a.jsonl.zst") == ["a", "b"]


def test_broken_lines_of_json_are_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "bom"}\n'
        b"\n"
        b'{"text": "bad \xff utf"}\n'
        b'{"text": "cut"\n'
        b'{"content": "x", "id": 1}\n'
        b'{"text": ["nested"]}\n'
        b'{"text": null}\n'
        b'["text"]\n'
        b'{"text": "\\ud800 half"}\n'
        b'{"text": "  "}\r\n'
        b'{"text": "last"}'
    )
    assert flaws(path) == [
        (3, "invalid UTF-8 at byte 15"),
        (4, "invalid JSON: Expecting ',' delimiter: line 1 column 15 (char 14)"),
        (5, "no key `text`; keys there: content, id"),
        (6, "`text` is a list, not text"),
        (8, "not an object but a list"),
        (9, "half a surrogate pair at character 1"),
    ]
    good = [(r.line, r.text) for r in records(path) if not r.flaw]
    assert good == [(1, "bom"), (2, ""), (7, ""), (10, ""), (11, "last")]


def test_lines_count_on_over_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "BLOCK_BYTES", 50)
    path = tmp_path / "data.jsonl"
    rows = [json.dumps({"text": "y" * (i % 70)}) for i in range(200)]
    rows[150] = "broken"
    path.write_text("\n".join(rows))
    found = records(path)
    assert [record.line for record in found] == list(range(1, 201))
    assert [record.line for record in found if record.flaw] == [151]
    assert [len(r.text) for r in found if not r.flaw] == [i % 70 for i in range(200) if i != 150]
    blocks = list(read_blocks(path, ("text",)))
    assert len(blocks) > 50
    assert sum(block.read_bytes for block in blocks) == path.stat().st_size


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.dictionaries(
            st.sampled_from(["text", "n"]),
            st.one_of(st.text(max_size=30), st.integers(), st.lists(st.booleans(), max_size=3)),
            min_size=1,
        ),
        max_size=12,
    ),
    indent=st.sampled_from([None, 2]),
    layout=st.sampled_from(["array", "lines", "joined"]),
    ascii_only=st.booleans(),
    size=st.integers(1, 40),
)
def test_json_is_read_whatever_the_reads_cut(
    tmp_path_factory, values, indent, layout, ascii_only, size
):
    path = tmp_path_factory.mktemp("json") / "data.json"
    dumped = [json.dumps(value, indent=indent, ensure_ascii=ascii_only) for value in values]
    joined = {
        "array": f"[{','.join(dumped)}]",
        "lines": "\n".join(dumped),
        "joined": "".join(dumped),
    }
    path.write_text(joined[layout], "utf-8", errors="surrogatepass")
    whole = records(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "READ_BYTES", size)
        assert records(path) == whole
    assert len(whole) == len(values)
    for record, value in zip(whole, values, strict=True):
        text = value.get("text")
        if isinstance(text, str):
            assert record.flaw == ""
            assert record.text == (text if text.strip() else "")
        else:
            assert record.flaw


def test_broken_json_is_named_and_lines_after_it_are_read(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('{"text": "a"}\n{"text": }\n{"text": "unclosed\n{"text": "b"}\n7\n')
    assert [line for line, _ in flaws(path)] == [2, 3, 5]
    assert [r.text for r in records(path) if not r.flaw] == ["a", "b"]
    path.write_text('[\n{"text": "a"},\n{"text": "b"')
    assert [line for line, _ in flaws(path)] == [3, 3]
    path.write_bytes(b'[{"text": "a"},\n{"text": "\xff"},\n{"text": "c"}]')
    assert flaws(path) == [(2, "half a surrogate pair at character 1")]


def test_broken_rows_of_csv_are_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(
        b'\xef\xbb\xbftext,id\n"two\nlines",1\nonly one\n"a"b,2\nx\xff,3\n\ngood,4\n'
        + b"L" * 300_000
        + b",5\n"
    )
    assert flaws(path) == [
        (4, "1 fields, the header has 2"),
        (5, "invalid CSV: ',' expected after '\"'"),
        (6, "half a surrogate pair at character 2"),
    ]
    good = [(r.line, r.text[:9]) for r in records(path) if not r.flaw]
    assert good == [(2, "two\nlines"), (7, ""), (8, "good"), (9, "L" * 9)]
    path.write_text("content,id\nx,1\n")
    assert flaws(path) == [(2, "no key `text`; keys there: content, id")]


def test_columns_that_are_missing_null_or_not_text(tmp_path):
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pa.table({"body": ["a"], "n": [1]}), path)
    with pytest.raises(InputError, match=r"no column `text`.*its columns: body, n"):
        records(path)
    assert flaws(path, "n") == [(1, "`n` is a number, not text")]
    for kind in (pa.large_string(), pa.dictionary(pa.int8(), pa.string())):
        column = pa.array(["a", None, "c"]).cast(kind)
        pyarrow.parquet.write_table(pa.table({"text": column}), path)
        assert texts(path) == ["a", "", "c"]
    bad = pa.array([b"ok", b"\xff"]).view(pa.string())
    with pa.OSFile(str(tmp_path / "bad.arrow"), "wb") as sink:
        table = pa.table({"text": bad})
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    assert flaws(tmp_path / "bad.arrow") == [(2, "invalid UTF-8 at byte 1")]


def test_several_keys_are_joined(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"title": "T", "body": "B"}\n{"title": "T"}\n')
    keys = split_keys("title, body")
    assert [r.text for r in records(path, *keys)] == ["T\nB", ""]
    assert flaws(path, *keys) == [(2, "no key `body`; keys there: title")]
    with pytest.raises(InputError, match="no key given"):
        split_keys(" , ")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_a_file_that_is_not_what_its_name_says(tmp_path, name):
    (tmp_path / name).write_bytes(b"plain text and nothing else\n" * 10)
    with pytest.raises(InputError, match=f"{name}: can't be read"):
        records(tmp_path / name)


def test_an_archive_that_was_cut_is_refused(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(as_bytes("jsonl") * 50)[:-20])
    with pytest.raises(InputError, match="can't be read"):
        records(path)
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(as_bytes("jsonl") * 50)[:-20])
    with pytest.raises(InputError, match="can't be read"):
        records(path)


def test_folders_are_walked_by_name_and_problems_come_together(tmp_path):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / ".git").mkdir()
    for name in ["b.txt", "a.jsonl", "sub/c.csv.gz", "notes.md", ".git/x.txt"]:
        (tmp_path / "d" / name).write_text("x")
    (tmp_path / "d" / "empty.txt").touch()
    found = find_files([tmp_path / "d", tmp_path / "d" / "b.txt"])
    names = [str(path.relative_to(tmp_path / "d")) for path in found]
    assert names == ["a.jsonl", "b.txt", "empty.txt", "sub/c.csv.gz", "b.txt"]
    (tmp_path / "none").mkdir()
    (tmp_path / "empties").mkdir()
    (tmp_path / "empties" / "a.txt").touch()
    bad = ["missing.txt", "none", "empties", "d/notes.md", "d/empty.txt"]
    with pytest.raises(InputError) as caught:
        find_files([tmp_path / name for name in bad])
    assert [problem.problem for problem in caught.value.problems] == [
        "file not found",
        "no data files in the folder",
        "only empty data files in the folder",
        "not a kind of file msllm reads",
        "the file is empty",
    ]
