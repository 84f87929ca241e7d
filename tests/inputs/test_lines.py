"""JSONL and text: every line is a row, and a bad line never moves the others."""

import gzip
import io
import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorrt_llm_ext.errors import InputError, Refusal
from tensorrt_llm_ext.inputs import Fields, Row, lines, open_input
from tensorrt_llm_ext.inputs.id_rows import together
from tensorrt_llm_ext.inputs.lines import LineInput, _parsed, _quickly_parsed, _read_by_arrow


def rows_of(path, **options):
    return list(open_input(str(path), Fields(), **options).rows())


def test_a_row_number_is_its_line_number_less_one_whatever_the_lines_hold(jsonl):
    path = jsonl('{"text": "a"}', "", "{broken", '{"text": "b"}')
    rows = rows_of(path)
    assert [(row.number, row.line) for row in rows] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [row.fields.code if isinstance(row.fields, Refusal) else row.fields["text"] for row in rows] == [
        "a",
        "empty_row",
        "not_json",
        "b",
    ]


@pytest.mark.parametrize(
    "line, code",
    [
        (b"", "empty_row"),
        (b"  \t", "empty_row"),
        (b"{", "not_json"),
        (b"{'text': 1}", "not_json"),
        (b'{"text": "a"} {"text": "b"}', "not_json"),
        (b"[" * 100_000, "not_json"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not_json"),
        (b'{"text": "a", "text": "b"}', "not_json"),
        (b'"text"', "not_an_object"),
        (b"null", "not_an_object"),
        (b"[1]", "not_an_object"),
        (b'{"text": "\xff"}', "not_utf8"),
        (b"\xed\xa0\x80", "not_utf8"),
    ],
)
def test_a_bad_line_has_its_own_code(jsonl, line, code):
    good = '{"text": "a"}'
    before, bad, after = rows_of(jsonl(good, line, good))
    assert bad.fields.code == code and bad.line == 2
    assert before.fields == after.fields == {"text": "a"}


@pytest.mark.parametrize(
    "line, orjson_reads",  # None: it refuses the line
    [
        ('{"n": 18446744073709551616}', {"n": 2.0**64}),
        ('{"n": -9223372036854775809}', {"n": -(2.0**63)}),
        ('{"n": [18446744073709551616]}', {"n": [2.0**64]}),
        ('{"n": [[18446744073709551616]]}', {"n": [[2.0**64]]}),
        ('{"n": NaN, "m": -Infinity}', None),
        ('{"n": 1e400}', None),
        ('{"text": "\\ud800"}', None),
        ('{"text": "a", "text": "b"}', {"text": "b"}),
        ('{"text": "a", "\\u0074ext": "b"}', {"text": "b"}),
        ('{"text": [{"a": 1, "a": 2}]}', {"text": [{"a": 2}]}),
        ('{"text": ' + "[" * 1020 + "]" * 1020 + "}", ...),  # deeper than json goes
        ('{"n": ' + "9" * 5000 + "}", None),
        ("\ufeff{}", None),
    ],
)
def test_a_line_that_orjson_reads_otherwise_is_what_json_says(jsonl, line, orjson_reads):
    if orjson_reads is None:
        with pytest.raises(orjson.JSONDecodeError):
            orjson.loads(line)
    else:
        assert orjson_reads in (orjson.loads(line), ...)
    _, row = rows_of(jsonl("{}", line))
    says = _parsed(line)
    assert repr(row.fields) == repr(says)
    assert getattr(says, "found", None) == getattr(row.fields, "found", None)
    assert isinstance(says, Refusal) or repr(says) == repr(json.loads(line))


PIECES = st.sampled_from(
    '{ } [ ] , : " \\ "id" "ids" "x" 1 0 23 -4 -0 -0.0 5.5 1e2 1e19 5e-324 9223372036854775808 true null NaN "\\ud800" \t é'.split(" ")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
WRITTEN = st.dictionaries(st.text(max_size=3), VALUES, max_size=4).flatmap(
    lambda value: st.sampled_from([json.dumps(value), json.dumps(value, ensure_ascii=False, separators=(",", ":"))])
)
CHANGED = st.tuples(WRITTEN, PIECES, st.integers(0, 60)).map(lambda parts: parts[0][: parts[2]] + parts[1] + parts[0][parts[2] :])


@settings(max_examples=600, deadline=None)
@given(WRITTEN | CHANGED | st.lists(PIECES, max_size=14).map("".join))
def test_what_orjson_is_trusted_with_is_what_json_says(line):
    value = _quickly_parsed(line.encode())
    assert value is None or repr(value) == repr(_parsed(line))


FIELDS = Fields(ids="ids")
IDS = st.fixed_dictionaries(
    {"ids": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)}, optional={"id": st.text(max_size=3) | st.integers() | st.none()}
)
LINES_OF_IDS = IDS.flatmap(
    lambda value: st.sampled_from([json.dumps(value), json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)])
)
BROKEN = st.tuples(LINES_OF_IDS, PIECES | st.sampled_from(["{}", "}{", "\r", "\0", "\x1f", "\ufeff", "1.0", "01"]), st.integers(0, 40)).map(
    lambda parts: parts[0][: parts[2]] + parts[1] + parts[0][parts[2] :]
)


@settings(max_examples=800, deadline=None)
@given(st.lists(LINES_OF_IDS | BROKEN, min_size=1, max_size=3), st.sampled_from([Fields(ids="ids"), Fields(ids="ids", request_id="id")]))
def test_what_arrow_is_trusted_with_is_what_json_says(texts, fields):
    group = [text.encode(errors="surrogatepass") for text in texts]
    if (found := _read_by_arrow(group, fields, 5, [None] * len(group))) is not None:
        (expected,) = together([Row(5 + n, 6 + n, _parsed(text)) for n, text in enumerate(texts)], fields)
        assert (found.number, found.line, found.request_ids) == (5, 6, expected.request_ids)
        assert found.token_ids.tolist() == expected.token_ids.tolist() and found.offsets.tolist() == expected.offsets.tolist()


@pytest.mark.parametrize("request_id", [None, "r{}".format, lambda n: n - 3])
def test_plain_lines_of_ids_are_read_by_arrow_alone(jsonl, request_id, monkeypatch):
    monkeypatch.setattr(lines, "together", None)
    fields = Fields(ids="ids", request_id=request_id and "id")
    values = [{"ids": [n, -n] * (n % 3), **({"id": request_id(n)} if request_id else {})} for n in range(700)]
    first, second = LineInput(str(jsonl(*map(json.dumps, values))), fields, is_json=True).pieces()
    rows = [*first.rows(fields), *second.rows(fields)]
    assert [row.number for row in rows] == list(range(700)) and [row.line for row in rows] == list(range(1, 701))
    assert [row.fields["ids"].tolist() for row in rows] == [value["ids"] for value in values]
    assert [row.fields.get("id") for row in rows] == [request_id and str(request_id(n)) for n in range(700)]
    assert (second.number, second.line) == (512, 513)


def test_long_lines_of_ids_are_read_by_arrow_too(jsonl, monkeypatch):
    monkeypatch.setattr(lines, "together", None)
    (piece,) = LineInput(str(jsonl(*[json.dumps({"ids": list(range(400_000))})] * 2)), FIELDS, is_json=True).pieces()
    assert [row.fields["ids"].tolist() for row in piece.rows(FIELDS)] == [list(range(400_000))] * 2


def test_a_line_that_is_too_long_stands_alone_among_lines_of_ids(jsonl, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 20)
    short, long = '{"ids": [1, 2]}', json.dumps({"ids": [1] * 20})
    for texts in ((long, short, short), (short, long, short)):
        rows = list(LineInput(str(jsonl(*texts)), FIELDS, is_json=True).rows())
        codes = [row.fields.code if isinstance(row.fields, Refusal) else None for row in rows]
        assert codes == ["line_too_long" if text is long else None for text in texts]


@pytest.mark.parametrize(
    "group",
    [
        ['{"ids": [1]}', "", '{"ids": [2]}{"ids": [3]}'],
        ['{"ids": [1]}', '{"ids": [2]}{"ids": [3]}'],
        ['{"ids": [1]}', "", '{"ids": [2]}'],
        ['{"ids": [1]}', '{"ids": [2]}\0 and more'],
        ['{"ids": [1]}', '{"ids": [2', '{"ids": [3]}'],
        ['{"ids": [1]}', '{"ids": [2]} {'],
        ['{"ids": [1]}', ' \t{"ids": [2]}'],
        ['{"ids": [1]}', '{"ids": [2], "x": 1}'],
        ['{"ids": [1]}', '{"ids": [2], "ids": [3]}'],
        ['{"ids": [1]}', '{"ids": null}'],
        ['{"ids": [1]}', '{"ids": [null]}'],
        ['{"ids": [1]}', '{"ids": [1.0]}'],
        ['{"ids": [1]}', '{"ids": [true]}'],
        ['{"ids": [1]}', '{"ids": ["1"]}'],
        ['{"ids": [1]}', '{"ids": [2147483648]}'],
        ['{"ids": [1]}', "{}"],
        ['{"ids": [1]}'],
    ],
)
def test_lines_that_arrow_would_read_otherwise_or_not_at_all_are_left_to_json(group):
    assert _read_by_arrow([line.encode() for line in group], FIELDS, 0, [None] * len(group)) is None


@pytest.mark.parametrize("second", [b'"\xff"', b'"\\ud800"', b'""', b"null", b"2", b"true", b"1.5"])
def test_ids_of_requests_that_arrow_cannot_give_are_left_to_json(second):
    group = [b'{"id": "a", "ids": [1]}', b'{"id": %s, "ids": [1]}' % second]
    assert _read_by_arrow(group, Fields(ids="ids", request_id="id"), 0, [None] * 2) is None


@pytest.mark.parametrize(
    "line", ['{"ids": [1, 2]}', '{"id": 7, "text": "é", "x": -0.5, "y": [null, true, "a"], "z": 9223372036854775807}']
)
def test_lines_of_plain_fields_need_no_second_reading(jsonl, line, monkeypatch):
    monkeypatch.setattr(lines, "_parsed", None)
    (row,) = rows_of(jsonl(line))
    assert row.fields == json.loads(line)


def test_a_key_that_stands_twice_is_named(jsonl):
    (row,) = rows_of(jsonl('{"text": "a", "id": 1, "text": "b"}'))
    assert "'text' stands twice" in row.fields.found


def test_a_line_beyond_the_limit_is_passed_over_in_pieces_and_counted(jsonl, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 20)
    rows = rows_of(jsonl('{"text": "12345678"}', '{"text": "123456789"}', "x" * 1000, '{"text": "a"}'))
    assert rows[0].fields == {"text": "12345678"} and rows[3].fields == {"text": "a"}
    assert [row.fields.code for row in rows[1:3]] == ["line_too_long"] * 2
    assert [row.fields.found for row in rows[1:3]] == ["22 bytes", "1001 bytes"]


def test_text_keeps_everything_but_the_line_ending(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbf first \r\n\r\n\tsecond\xe2\x80\xa8still second\x0b\nlast")
    assert [row.fields["text"] for row in rows_of(path)] == [" first ", "", "\tsecond\u2028still second\x0b", "last"]


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "prompts.jsonl").write_bytes(b"")
    assert rows_of(tmp_path / "prompts.jsonl") == []


def test_a_gzipped_file_reads_the_same(tmp_path, jsonl):
    plain = jsonl('{"text": "a"}', "", '{"text": "b"}')
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert [(row.line, str(row.fields)) for row in rows_of(packed)] == [
        (row.line, str(row.fields)) for row in rows_of(plain)
    ]


def flipped(whole: bytes, place: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]


@pytest.mark.parametrize(
    ("damage", "message", "advice"),
    [
        (lambda whole: whole[:-10], "breaks off while it is read", "--resume goes on from there"),
        (lambda whole: b"junk", "is not a gzip file, or not as it was written", "a new dataset"),
        (lambda whole: whole[:12] + b"\0" * 50, "is not a gzip file, or not as it was written", "a new dataset"),
        (lambda whole: flipped(whole, 14), "is not a gzip file, or not as it was written", "a new dataset"),
        (lambda whole: flipped(whole, -6), "is not a gzip file, or not as it was written", "a new dataset"),
    ],
)
def test_a_damaged_gzip_file_stops_the_run(tmp_path, damage, message, advice):
    path = tmp_path / "prompts.txt.gz"
    path.write_bytes(damage(gzip.compress(b"a line\n" * 1000)))
    with pytest.raises(InputError, match=message) as error:
        rows_of(path)
    assert advice in error.value.fix


def test_standard_input_is_jsonl_unless_said_otherwise(monkeypatch):
    def standard_input(content):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))

    standard_input(b'{"text": "a"}\n')
    assert [row.fields for row in rows_of("-")] == [{"text": "a"}]
    standard_input(b"a\nb\n")
    rows = rows_of("-", format="text")
    assert [row.fields["text"] for row in rows] == ["a", "b"]
    assert {row.fraction for row in rows} == {None}


def test_a_closed_standard_input_is_named(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # what Python makes of ``<&-``
    with pytest.raises(InputError, match="standard input is closed"):
        rows_of("-")


def test_the_fraction_read_grows_to_one(jsonl):
    fractions = [row.fraction for row in rows_of(jsonl(*['{"text": "abc"}'] * 5000))]
    assert fractions == sorted(fractions) and 0 < fractions[0] < 0.5 and fractions[-1] == 1.0
