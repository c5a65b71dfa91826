"""Draws a case: the same one for the same (seed, index), on any machine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from case import Case, Options, Spec
from data_sources import SHAPES, SOURCES, VOCABULARY
from generate_layers import ACTIVATIONS, RANDOM, grow
from grow_positions import summarise
from growth import Growth
from objectives import (
    LOSSES,
    METRICS,
    OPTIMIZER_OPTIONS,
    OPTIMIZERS,
    SCHEDULES,
    WHOLE,
    Suits,
)

from tfgpipe.schedules import SCHEDULES as NAMED

NUM_DEVICES = 8
THEN = ("another K",) * 3 + ("file",) * 3 + ("weights", "eager")
REMAT = ("except_last", "always", "never", "mixed")
EARLY = tuple(name for name in NAMED if name != "gpipe")


def generate(seed: int, index: int) -> Case:
    """The case of a seed and an index."""
    rng = random.Random(f"{seed}:{index}")
    found: Options = {"seed": rng.randrange(1000)}
    growth = _layers(rng, found)
    _objective(rng, growth, found)
    _optimizer(rng, found)
    _data(rng, found)
    _pipeline(rng, found)
    found["layers"] = tuple(growth.specs)
    found["then"] = rng.choice(THEN)
    found["dtype"] = rng.choices(("float64", "float32"), (3, 1))[0]
    # XLA takes many seconds.
    found["jit_compile"] = found["then"] != "eager" and rng.random() < 0.03
    return Case(**found)


def is_random(layers: Any) -> bool:
    """Whether training depends on how rows are grouped, by design."""
    return any(
        spec.kind in RANDOM
        or spec.options.get("inner") in RANDOM
        or bool(spec.options.get("dropout"))
        for spec in _with_inner(layers)
    )


def is_random_in_inference(layers: Any) -> bool:
    """Whether a random layer is called as in training all the time."""
    return is_random(
        spec
        for spec in _with_inner(layers)
        if spec.kind == "fixed" and spec.options["value"]
    )


def _with_inner(layers: Any) -> Iterator[Spec]:
    """Layers, and those inside them."""
    for spec in layers:
        yield spec
        inner = spec.options.get("layers", ())
        yield from _with_inner(Spec(**{"options": {}, **i}) for i in inner)


# ---------------------------------------------------------------------- layers
def _layers(rng: random.Random, found: Options) -> Growth:
    kind = rng.choices(
        ("vector", "sequence", "image", "tokens", "dict"), (10, 4, 2, 3, 1)
    )[0]
    found["inputs"] = kind
    found["explicit_input"] = kind != "dict" and rng.random() < 0.3
    growth = Growth(rng, SHAPES.get(kind, (4,)))
    embedding = None
    if kind == "dict":
        growth.add("combine", keeps=False)
    elif kind == "tokens":
        growth.has_mask = rng.random() < 0.6
        embedding = growth.add(
            "embedding",
            keeps=False,
            input_dim=VOCABULARY,
            output_dim=4,
            mask_zero=growth.has_mask,
        )
        growth.shape = (*growth.shape, 4)
    grow(growth, rng.choice((1, 2, 3, 3, 4, 4, 5, 6)))
    if embedding and growth.width == 4 and rng.random() < 0.5:
        growth.add("logits", keeps=False, of=embedding)
        growth.shape = (*growth.shape[:-1], VOCABULARY)
    elif len(growth.shape) > 1 and (
        len(growth.shape) == 3 or rng.random() < 0.5
    ):
        summarise(growth)
    names = [s.name for s in growth.specs if s.kind not in ("again", "closure")]
    if names and rng.random() < 0.12:
        found["frozen"] = (rng.choice(names),)
    return growth


# ------------------------------------------------------------------- objective
def _objective(rng: random.Random, growth: Growth, found: Options) -> None:
    if rng.random() < 0.12 and not growth.has_mask:
        _two_outputs(rng, growth, found)
        return
    rank = len(growth.shape) + 1
    name = rng.choice(sorted(n for n in LOSSES if _fits(LOSSES[n], rank)))
    if rng.random() < 0.25:
        name = "MeanSquaredError"
    suits = LOSSES[name]
    kind = rng.choice(suits.labels)
    units = growth.width if growth.width < 8 else 3
    if rng.random() < 0.8 or units != growth.width:
        growth.add("dense", keeps=False, units=max(units, 2))
        growth.shape = (*growth.shape[:-1], max(units, 2))
    if suits.activation:
        growth.add("activation", keeps=False, activation=suits.activation)
    elif rng.random() < 0.1:
        growth.add("activation", activation=rng.choice(ACTIVATIONS))
    found["losses"], found["labels"] = name, kind
    if name[0].isupper() and rng.random() < 0.25:
        found["reduction"] = rng.choice(("sum", "mean_with_sample_weight"))
    fitting = sorted(
        n
        for n, m in METRICS.items()
        if kind in m.labels
        and _fits(m, rank)
        and m.activation in (None, suits.activation)
    )
    for where in ("metrics", "weighted_metrics"):
        if fitting and rng.random() < 0.4:
            count = min(len(fitting), rng.choice((1, 1, 2)))
            found[where] = tuple(rng.sample(fitting, count))
    choices = [None, None, "rows" if rank == 2 else "positions"]
    if kind == "ids" and rank == 2:
        choices.append("classes")
    found["weights"] = rng.choice(choices)
    if rng.random() < 0.1:
        found["loss_weights"] = [0.3]


def _fits(suits: Suits, rank: int) -> bool:
    return suits.rank is None or rank <= suits.rank


def _two_outputs(rng: random.Random, growth: Growth, found: Options) -> None:
    rank = len(growth.shape) + 1
    second = rng.choice(
        sorted(
            name
            for name, suits in LOSSES.items()
            if _fits(suits, rank) and suits.activation != "softplus"
        )
    )
    named = rng.random() < 0.7
    growth.add(
        "outputs",
        keeps=False,
        units=[2, 3],
        activation=LOSSES[second].activation or "linear",
        named=named,
    )
    names = ("MeanSquaredError", second)
    found["losses"] = dict(zip("ab", names)) if named else list(names)
    if rng.random() < 0.5:
        found["loss_weights"] = {"a": 0.3, "b": 1.7} if named else [0.3, 1.7]
    if rng.random() < 0.4:
        found["metrics"] = (rng.choice(("mae", "CosineSimilarity")),)
    if rank == 2 and rng.random() < 0.3:
        found["weights"] = "rows"


def _optimizer(rng: random.Random, found: Options) -> None:
    name = rng.choice(("SGD", "SGD", "Adam", "AdamW", *OPTIMIZERS))
    options: Options = {}
    if name == "SGD" and rng.random() < 0.5:
        options["momentum"] = 0.9
    if rng.random() < 0.35:
        options.update(rng.choice(OPTIMIZER_OPTIONS))
    if rng.random() < 0.2:
        options["decay"] = rng.choice(sorted(SCHEDULES))
    unfit = {"loss_scale_factor", "use_ema"} & set(options)
    if rng.random() < 0.08 and not unfit:
        options["scaled"] = True
    found["optimizer"] = {"name": name, "options": options}


def _data(rng: random.Random, found: Options) -> None:
    found["rows"] = rng.randint(5, 12)
    found["batch_size"] = rng.randint(3, min(6, found["rows"]))
    found["epochs"] = rng.choice((1, 1, 2))
    found["infers"] = rng.random() < 0.15  # two traces more
    found["source"] = rng.choice(("arrays", "arrays", "arrays", *SOURCES))
    if found.get("weights") == "classes":
        found["source"] = rng.choice(("arrays", "dataset"))


# -------------------------------------------------------------------- pipeline
def _pipeline(rng: random.Random, found: Options) -> None:
    found["num_replicas"] = rng.choices((1, 2, 3), (10, 2, 1))[0]
    found["num_partitions"] = rng.choice((1, 2, 2, 3, 3, 4))
    others = {1, 2, 3, 4} - {found["num_partitions"]}
    found["other_partitions"] = rng.choice(sorted(others))
    found["num_micro_batches"] = rng.choice((1, 1, 2, 2, 3, 4))
    if rng.random() < 0.3:
        names = found["losses"]
        values = names.values() if isinstance(names, dict) else names
        names = {names} if isinstance(names, str) else set(values)
        if not names & WHOLE or rng.random() < 0.05:
            found["schedule"] = rng.choice(EARLY)
    found["remat"] = rng.choice(REMAT)
    found["other_remat"] = rng.choice(REMAT[:3])
    found["remat_groups"] = rng.choices((1, 2), (8, 1))[0]
    if rng.random() < 0.5 or found["remat_groups"] > 1:
        found["cut_seed"] = rng.randrange(1, 1000)


def cut(case: Case, num_partitions: int, count: int) -> list[int] | None:
    """`layers_per_cell` for a number of layers, or None."""
    if not case.cut_seed:
        return None
    spare = count - num_partitions * case.remat_groups
    if spare < 0:
        return None
    rng = random.Random(case.cut_seed + num_partitions)
    sizes = [case.remat_groups] * num_partitions
    for _ in range(spare):
        sizes[rng.randrange(num_partitions)] += 1
    return sizes


def partitions(case: Case, wanted: int) -> int:
    """K: no more than there are layers and devices."""
    most = min(
        len(case.layers) // case.remat_groups,
        NUM_DEVICES // case.num_replicas,
    )
    return max(1, min(wanted, most))
