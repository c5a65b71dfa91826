"""Timed cells beside their bounds."""

import pytest

from tfgpipe.schedules import CHUNKS
from tools.bench import efficiency, timed_layers


def test_efficiency_measures_every_setting(tables):
    rows = tables(
        "efficiency",
        "--table=schedules",
        "--k=2",
        "--m=k,1k",
        "--cell_ms=1",
        "--rounds=1",
        "--schedule=gpipe",
        "--cells=equal,uneven",
        "--remat=except_last",
    )["efficiency"]
    assert [(r["m"], r["cells"]) for r in rows] == [(2, "equal"), (2, "uneven")]
    # Fill-drain: 4 M - 1 tasks of the last cell, and 3 on the way to it.
    assert rows[0]["bound_ms"] == pytest.approx(4 * 2 - 1 + 3)
    assert rows[0]["bound_ms"] < rows[1]["bound_ms"]
    assert all(r["ratio"] > 0 and r["net_ratio"] > 0 for r in rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*side effects")
def test_shards_share_the_time_of_a_layer(tables):
    first, other = tables(
        "efficiency", "--table=shards", "--shards=1,2", "--rounds=1"
    )["shards"]
    # 8 micro-batches of 20 ms forward, and twice as long back.
    assert first["step_ms"] >= 8 * 60
    assert first["step_ms"] > other["step_ms"] >= 4 * 60
    assert first["sent_mib"] == 0 < other["sent_mib"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*side effects")
def test_what_is_on_the_host_takes_no_time_beside_cells(tables):
    rows = tables("efficiency", "--table=host", "--rounds=1")["host"]
    assert [row["held"] for row in rows[:2]] == ["2 of 8", "2 of 4"]
    # The cells of a device, one after the other, forward and back.
    assert all(row["step_ms"] > row["cells"] / 4 * 8 * 60 for row in rows)


@pytest.mark.parametrize("name", efficiency.SCHEDULES)
def test_bound_of_uneven_cells_is_that_of_the_slowest_at_least(name):
    for cells, slowest in (("equal", 1), ("uneven", 2)):
        chunks = CHUNKS[name] or 2
        setting = efficiency.Setting(name, "never", cells, 1, 4, 32, chunks)
        duration = timed_layers.durations(setting.seconds())
        work = 3 * 32 * slowest / chunks if chunks == 1 else 3 * 32
        assert setting.program().length(duration) > work / 1000
