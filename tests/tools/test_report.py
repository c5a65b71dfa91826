"""What is printed: tables, spreads, the machine."""

import csv
import io
import json

import keras

from tools.report import Column, Report, Table, spread


def report(style):
    made = Report("test", style)
    columns = [Column("what", "what"), Column("ms", "time", ".1f")]
    rows = [{"what": "a", "ms": 1 / 3}, {"what": "long", "extra": 7}]
    made.add(Table("first", "The first table", columns, rows, ["A note."]))
    made.add(Table("second", "Second", columns, [{"ms": 12.34, "what": "b"}]))
    made.add(Table("empty", "Has no rows", columns))
    made.print()


def test_text_aligns_columns_and_shows_the_machine(capsys):
    report("text")
    shown = capsys.readouterr().out
    for name in ("tensorflow", "keras", "machine", "cores"):
        assert f"\n{name} " in f"\n{shown}"
    assert keras.__version__ in shown
    first = "what  time\n----  ----\na      0.3\nlong     -\nA note."
    assert f"The first table\n\n{first}\n" in shown
    assert "12.3" in shown
    assert "Has no rows" not in shown


def test_json_has_all_values(capsys):
    report("json")
    made = json.loads(capsys.readouterr().out)
    assert made["environment"]["keras"] == keras.__version__
    assert made["tables"][0]["rows"] == [
        {"what": "a", "ms": 0.333333},
        {"what": "long", "extra": 7},
    ]
    assert made["tables"][0]["notes"] == ["A note."]


def test_csv_is_one_table(capsys):
    report("csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["table"] for row in rows] == ["first", "first", "second"]
    assert [row["ms"] for row in rows] == ["0.333333", "", "12.34"]
    assert [row["extra"] for row in rows] == ["", "7", ""]
    assert {row["keras"] for row in rows} == {keras.__version__}


def test_spread_of_one_measurement_is_that():
    assert spread([2.0]) == (2.0, 2.0, 2.0)
    assert spread([1.0, 2.0]).times(10) == (15, 12.5, 17.5)
