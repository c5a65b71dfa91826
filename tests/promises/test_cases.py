"""Cases as plain data, one for each topic of layers that keep, read or draw.

Each trains as in plain Keras, to rounding; then with other cells or from a
file, to the bit; or eagerly: see `compare.py`. `make fuzz` draws more.
"""

import compare
import pytest
from case import Case, Spec
from quick import quick

ADAM = {"name": "Adam"}
MOMENTUM = {"name": "SGD", "options": {"momentum": 0.9}}
# Weight decay tells a gradient of zeros from none.
DECAY = {"name": "AdamW", "options": {"weight_decay": 0.1}}


def case(*specs, **values):
    """A case of layers by their kinds, with options; named by their places."""
    pairs = [(s, {}) if isinstance(s, str) else s for s in specs]
    names = [f"l{i}" for i in range(len(pairs))]
    defaults = {
        "optimizer": MOMENTUM,
        "rows": 7,
        "batch_size": 4,
        "epochs": 2,
        "num_partitions": 3,
        "num_micro_batches": 3,
        "other_partitions": 2,
        "then": "another K",
    }
    made = [Spec(n, kind, o) for n, (kind, o) in zip(names, pairs)]
    return Case(tuple(made), **{**defaults, **values})


def dense(**options):
    return "dense", {"units": 4, **options}


def of(kind, index, **options):
    """A layer that reads an earlier or later one, or calls it again."""
    return kind, {"of": f"l{index}", **options}


BUILT = {"built": [None, 4]}
ONE = {"num_micro_batches": 1}
CASES = {
    "state": case(
        dense(),
        ("kept_average", {"reads": "before"}),
        ("kept_float_count", {"reads": "after"}),
        ("kept_infinite", {"reads": "after"}),
        ("kept_target", {"reads": "after"}),
        dense(),
    ),
    "complex state": case(dense(), "kept_complex", dense(), then="eager"),
    "state read at once": case(
        dense(),
        ("kept_average", {"reads": "after"}),
        ("kept_codebook", {"reads": "after"}),
        ("kept_queue", {"reads": "before"}),
        ("kept_metric", {"reads": "after"}),
        of("state_reader", 1),
        dense(),
        then="file",
        **ONE,
    ),
    # Of several micro-batches the bits of other cells, and no mask twice.
    "state over micro-batches": case(
        ("batch_norm", {"momentum": 0.8}),
        dense(activation="tanh"),
        ("kept_average", {"reads": "after"}),
        ("dropout", {"rate": 0.4}),
        of("again", 0),
        of("again", 3),
        dense(),
        then="file",
    ),
    "moments": case(
        ("batch_norm", {"momentum": 0.8, "renorm": True}),
        dense(activation="tanh"),
        ("unbiased_norm", {"momentum": 0.8}),
        ("warm_norm", {"momentum": 0.9}),
        ("own_moments", {"momentum": 0.8}),
        of("again", 0),
        of("moments_reader", 2),
        **ONE,
    ),
    "frozen, and then not": case(
        dense(activation="tanh", kernel_regularizer="l2", **BUILT),
        ("frozen_weight", {"made": False, "when": "at once"}),
        ("frozen_weight", {"made": False, "when": "later"}),
        ("frozen_weight", {"made": True, "when": "later"}),
        dense(),
        frozen=("l0",),
        unfreezes=True,
        optimizer=DECAY,
    ),
    "tape inside": case(
        dense(activation="tanh"), ("differentiating", {}), dense()
    ),
    "storage that a step assigns": case(
        dense(), "resource", dense(), override="assigns resources"
    ),
    "lookups": case(
        ("lookup", {"by": "inputs"}),
        ("lookup", {"by": "constants"}),
        ("lookup", {"by": "both"}),
        dense(),
        optimizer=ADAM,
        then="file",
    ),
    "positions": case(
        *(("positions", {"by": by}) for by in ("shape", "split", "transposed")),
        dense(),
        inputs="sequence",
        optimizer=ADAM,
    ),
    "draws": case(
        ("lookup", {"by": "draws"}),
        ("lookup", {"by": "drawn rows"}),
        "unordered_noise",
        "noise_of_shared_seeds",
        "noise_of_shared_seeds",
        dense(),
        **ONE,
    ),
    "names": case(
        *("special_name", dense()) * 2,
        *("special_constraint", dense()) * 2,
        *("special_variable", dense()) * 2,
        cells=(2,) * 6,
        num_partitions=6,
    ),
    "training that leaks": case(
        ("fixed", {"inner": "dropout", "value": False}),
        dense(),
        ("hidden", {"inner": "dropout"}),
        ("fixed", {"inner": "gaussian_noise", "value": True}),
        dense(),
        then="eager",
        **ONE,
    ),
    "other dtypes": case(
        ("float8_dense", {"units": 4, "width": 4}),
        ("int8_dense", {"units": 4, "width": 4}),
        ("lora_dense", {"units": 4, "width": 4}),
        dense(dtype="float32"),
        **ONE,
    ),
    "shared": case(
        dense(**BUILT),
        of("tied", 0),
        of("closure", 4),
        of("again", 0),
        dense(**BUILT),
        ("spectral", {"units": 4}),
        of("tied_inner", 5),
        "counter",
        dense(),
        of("count_reader", 7),
        other_partitions=1,
    ),
    "losses of layers": case(
        dense(**BUILT),
        "idle",
        of("near_dense", 0, units=4),
        "penalty",
        ("activity", {"l2": 0.05}),
        dense(activity_regularizer="l2"),
        override="losses",  # beside it, two other losses read a kernel
        then="eager",
    ),
    "scaled losses": case(
        ("spare", {"units": 4}),
        "overwritten",
        dense(),
        optimizer={"name": "SGD", "options": {"scaled": True}},
    ),
    "sizes": case(
        ("sized", {"units": 4, "axis": 1, "size": "one", "phase": True}),
        ("sized", {"units": 4, "axis": 1, "size": "even"}),
        dense(),
        inputs="sequence",
        length=4,
        infers=True,
    ),
    "changed later": case(
        ("changed", {"units": 4, "phase": True}),
        ("changed", {"units": 4, "phase": False}),
        dense(),
        infers=True,
        toggle="weights",
    ),
    "rows mixed": case(
        ("mixed", {"how": "sort", "place": "loop"}),
        ("odd_state", {"rule": "segment", "reads": "after"}),
        ("odd_penalty", {"rule": "masked"}),
        ("odd_metric", {"rule": "deviation"}),
        "router",
        dense(),
        **ONE,
    ),
    "bytes": case(
        ("rescaling", {"scale": 1 / 128}),
        dense(),
        inputs="bytes",
        override="loss of x",
        source="pydataset",
    ),
    "a condition": case(
        dense(), "choice", dense(), remat=0.6, then="file", source="uneven"
    ),
}


# Others have most of what these have, or take longest.
SLOW = {
    *("changed later", "complex state", "losses of layers", "other dtypes"),
    *("scaled losses", "sizes", "state", "state read at once"),
}


@pytest.mark.parametrize("name", quick(CASES, CASES.keys() - SLOW))
def test_case_is_equal_to_keras(name):
    found = compare.run(CASES[name])
    assert found.kind == "passed", found.detail


def test_case_is_what_it_prints():
    for made in CASES.values():
        assert Case.parse(str(made)) == made
