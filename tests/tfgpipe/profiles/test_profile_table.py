"""The table of a profile."""

from fabricated_profile import layer, profile, tasks

ROWS = """
layer  rows  forward  recompute  backward   +-  outputs   kept
a         2     2 us          -         -  10%     20 B   40 B
a         8  3.14 ms        1 s      12 s  10%     80 B  160 B
loss      2   500 us          -         -  10%     20 B   40 B
loss      8   500 us          -         -  10%     80 B  160 B
"""
HELD = """
  weights  slots  gradients
      8 B   16 B        8 B
      8 B   16 B        8 B
      0 B    0 B        0 B
      0 B    0 B        0 B
"""
LAST = "On /device:CPU:0; slots of Adam; a call takes 15 us of each."


def test_table_has_a_line_for_every_layer_and_size():
    found = profile(
        layer("a", tasks(2, 2e-6), tasks(8, 3.14e-3, 1.0, 1.0, 12.0)),
        loss=layer("loss", tasks(2, 5e-4), tasks(8, 5e-4), weights=0),
        call_seconds=1.5e-5,
    )
    rows, held = (text.split("\n")[1:-1] for text in (ROWS, HELD))
    expected = [*map("".join, zip(rows, held, strict=True)), LAST]
    assert str(found).split("\n") == expected
