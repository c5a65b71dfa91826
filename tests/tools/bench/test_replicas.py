"""Replicas of timed cells, and what they own."""

import pytest


@pytest.mark.slow
def test_replicas_are_timed_and_their_variables_counted(tables):
    found = tables(
        "replicas",
        "--r=1,2",
        "--k=2",
        "--m=3",
        "--cell_ms=1",
        "--exchange_ms=1",
        "--rounds=1",
    )
    speed, memory = found["speed"], found["memory"]
    assert [r["bound_ms"] for r in speed] == pytest.approx([14, 14])
    for row in speed:
        assert 0 < row["efficiency"] <= 1
        assert 0 <= row["hidden"] <= 1
        assert row["step_ms"] > row["bound_ms"]
    one, two = memory
    # 4 blocks of 4 * 64 * 64 + 2 * 64 * 256 weights and 13 vectors, and slots
    block = 4 * (64 * 65) + 256 * 65 + 64 * 257 + 4 * 64
    assert one["owned_mib"] == pytest.approx(4 * 3 * 4 * block / 2**20, 1e-3)
    assert two["owned_mib"] == pytest.approx(one["owned_mib"] / 2, 0.01)
    assert one["exchanged_mib"] == 0
    # half of the weights come in, gradients of as many go out
    assert two["exchanged_mib"] == pytest.approx(4 * 4 * block / 2**20, 0.01)
