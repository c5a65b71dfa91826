"""What comes next where rows have positions: sequences and images."""

from __future__ import annotations

from case import Options
from growth import Growth


def sequence(g: Growth) -> None:
    length, width = g.shape
    units = g.units()
    dropout = {"dropout": 0.3} if g.rng.random() < 0.3 else {}
    plain: dict[str, tuple[Options, tuple[int, ...]]] = {
        "lstm": (
            {"units": units, "return_sequences": True, **dropout},
            (length, units),
        ),
        "gru": ({"units": units, "return_sequences": True}, (length, units)),
        "simple_rnn": (
            {"units": units, "return_sequences": True},
            (length, units),
        ),
        "bidirectional": ({"units": 2}, (length, 4)),
        "conv_1d": (
            {"filters": units, "kernel_size": 2, "padding": "causal"},
            (length, units),
        ),
        "separable_conv_1d": (
            {"filters": units, "kernel_size": 2, "padding": "same"},
            (length, units),
        ),
        "self_attention": (
            {"width": 2, "dropout": g.rng.choice((0.0, 0.0, 0.3))},
            g.shape,
        ),
        "time_distributed": ({"units": units}, (length, units)),
        "spatial_dropout_1d": ({"rate": 0.4}, g.shape),
        "zero_padding_1d": ({"padding": 1}, (length + 2, width)),
        "average_pooling_1d": (
            {"pool_size": 2, "padding": "same"},
            (-(-length // 2), width),
        ),
        "max_pooling_1d": (
            {"pool_size": 2, "padding": "same"},
            (-(-length // 2), width),
        ),
        "upsampling_1d": ({"size": 2}, (2 * length, width)),
        "masking": ({}, g.shape),
    }
    kinds = sorted(plain)
    if g.has_mask:  # convolutions and such do not take one
        kinds = ["lstm", "gru", "simple_rnn", "bidirectional", "self_attention"]
    kind = g.rng.choice(kinds)
    options, shape = plain[kind]
    g.add(kind, keeps=shape == g.shape, **options)
    g.shape = shape


def image(g: Growth) -> None:
    high, wide, channels = g.shape
    filters = g.units()
    plain: dict[str, tuple[Options, tuple[int, ...]]] = {
        "conv_2d": (
            {"filters": filters, "kernel_size": 2, "padding": "same"},
            (high, wide, filters),
        ),
        "depthwise_conv_2d": (
            {"kernel_size": 2, "padding": "same"},
            g.shape,
        ),
        "upsampling_2d": ({"size": 2}, (2 * high, 2 * wide, channels)),
        "max_pooling_2d": (
            {"pool_size": 2, "padding": "same"},
            (-(-high // 2), -(-wide // 2), channels),
        ),
        "average_pooling_2d": (
            {"pool_size": 2, "padding": "same"},
            (-(-high // 2), -(-wide // 2), channels),
        ),
    }
    kind = g.rng.choice(sorted(plain))
    options, shape = plain[kind]
    g.add(kind, keeps=shape == g.shape, **options)
    g.shape = shape


def summarise(g: Growth) -> None:
    """From positions to one vector a row."""
    rank = len(g.shape)
    kinds = {2: "1d", 3: "2d"}[rank]
    kind = g.rng.choice((f"global_average_{kinds}", f"global_max_{kinds}"))
    if rank == 2 and g.rng.random() < 0.3:
        units = g.units()
        g.add("lstm", keeps=False, units=units)
        g.shape = (units,)
    elif g.rng.random() < 0.3 and not g.has_mask:
        size = 1
        for n in g.shape:
            size *= n
        g.add("flatten", keeps=False)
        g.shape = (size,)
    else:
        g.add(kind, keeps=False)
        g.shape = (g.width,)
    g.has_mask = False
