"""Draws what reads weights by odd ways, is changed later, or mixes rows.

Each case has one topic: layers, and what else they need to show.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from case import Options
from growth import Growth
from mixing_layers import LENGTHS, PENALTIES, STATES
from mixing_layers import METRICS as IN_LAYERS
from objectives import STATEFUL
from own_optimizers import SCALING
from row_operations import MIXING, PLACES
from storage_layers import SIZES

READS = ("none", "before", "after")
_LONG = 2050


def _nothing(*_: Any) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Topic:
    """What a case is about.

    Attributes:
        grow: Adds layers.
        start: Sets what must be known before there are layers.
        end: Changes a case that is drawn.
        is_graph: Whether the model is functional; None to draw it.
        inputs: What `x` is; None to draw it.
        is_first: Whether its layers come first.
    """

    grow: Callable[[Growth, Options], None] = _nothing
    start: Callable[[random.Random, Options], None] = _nothing
    end: Callable[[random.Random, Options], None] = _nothing
    is_graph: bool | None = None
    inputs: str | None = None
    is_first: bool = False


def draw(rng: random.Random, found: Options) -> Topic:
    """A topic; at times one that is about nothing."""
    topic = (
        TOPICS[rng.choice(sorted(TOPICS))] if rng.random() < 0.95 else Topic()
    )
    topic.start(rng, found)
    return topic


# ------------------------------------------------------------- weights, storage
def _unfrozen(g: Growth, found: Options) -> None:
    options: Options = {"kernel_regularizer": g.rng.choice(("l1", "l2"))}
    if g.rng.random() < 0.7:
        options["built"] = [None, *g.shape]
    name = g.add("dense", units=g.width, **options)
    found["frozen"], found["unfreezes"] = (name,), True


def _made_frozen(g: Growth, found: Options) -> None:
    made = g.rng.random() < 0.4
    when = "later" if made else g.rng.choice(("at once", "later"))
    g.add("frozen_weight", made=made, when=when)


def _substituted(g: Growth, found: Options) -> None:
    g.add("substituted", units=g.width)


def _differentiating(g: Growth, found: Options) -> None:
    g.add("differentiating", by=g.rng.choice(("weights", "weights", "rows")))


def _storage_reader(g: Growth, found: Options) -> None:
    built = [None, *g.shape]
    name = g.add("dense", units=g.width, activation="tanh", built=built)
    place = g.rng.choice(sorted(PLACES.keys() - {"map"}))
    g.add("storage_reader", of=name, place=place)


# --------------------------------------------------------------- opened layers
def _sized(g: Growth, found: Options) -> None:
    if len(g.shape) == 2:
        phase = g.rng.choice((None, None, True, False))
        size = next(s for s in _sizes(g) if SIZES[s](found["length"]))
        if g.rng.random() < 0.2:
            size = g.rng.choice(sorted(SIZES))
        g.add("sized", units=g.width, axis=1, size=size, phase=phase)


def _sizes(g: Growth) -> list[str]:
    """Their kinds in a drawn order; any length has one of them."""
    return g.rng.sample(sorted(SIZES), len(SIZES))


def _start_length(rng: random.Random, found: Options) -> None:
    found["length"] = rng.choice((1, 2, 4, 4, 6, 8, 10, 12, _LONG))


def _end_length(rng: random.Random, found: Options) -> None:
    found["infers"] = rng.random() < 0.5
    if found["length"] == _LONG:
        found.update(rows=5, batch_size=5, epochs=1)


def _sized_rows(g: Growth, found: Options) -> None:
    size = g.rng.choice(("even", "of four", "one"))
    g.add("sized", units=g.width, axis=0, size=size)


def _end_rows(rng: random.Random, found: Options) -> None:
    """A number of rows that a step knows."""
    found["batch_size"] = 4
    found["source"] = rng.choice(("remainder", "remainder", "arrays"))


def _changed(g: Growth, found: Options) -> None:
    g.add("changed", units=g.width, phase=g.rng.random() < 0.3)


def _infers(rng: random.Random, found: Options) -> None:
    found["infers"] = True


# ------------------------------------------------------------------- objectives
def _end_loss(rng: random.Random, found: Options) -> None:
    name, losses = rng.choice(sorted(STATEFUL)), found["losses"]
    if isinstance(losses, str):
        weights = found.get("weights")
        found.update(
            losses=name,
            labels="real",
            metrics=(),
            weighted_metrics=(),
            weights=weights if weights != "classes" else None,
        )
    elif isinstance(losses, dict):
        found["losses"] = {**losses, "a": name}
    else:
        found["losses"] = [name, *losses[1:]]
    found["schedule"] = "gpipe"
    found["bad_row"] = None


def _end_scale(rng: random.Random, found: Options) -> None:
    found["optimizer"] = {"name": rng.choice(sorted(SCALING)), "options": {}}
    found["schedule"] = "gpipe"
    found["bad_row"] = None


def _end_inputs(rng: random.Random, found: Options) -> None:
    found["override"] = rng.choice(("loss of x", "loss of x", "metrics of x"))
    found["schedule"] = "gpipe"
    if isinstance(found["losses"], str):
        found["bad_row"] = None


# ------------------------------------------------------------------ rows of all
def _mixed(g: Growth, found: Options) -> None:
    how, place = g.rng.choice(sorted(MIXING)), g.rng.choice(sorted(PLACES))
    g.add("mixed", how=how, place=place)


def _odd_state(g: Growth, found: Options) -> None:
    rule = g.rng.choice(sorted(STATES))
    name = g.add("odd_state", rule=rule, reads=g.rng.choice(READS))
    g.states.append((name, g.shape))


def _state_afar(g: Growth, found: Options) -> None:
    """A mean over rows that a later layer reads."""
    kind = g.rng.choice(("kept_average", "kept_queue", "odd_state"))
    options = {"rule": g.rng.choice(("mean", "last"))}
    name = g.add(kind, **(options if kind == "odd_state" else {}))
    for _ in range(g.rng.choice((0, 1, 2))):
        g.add("layer_norm")
    g.add("state_reader", keeps=False, of=name)


def _odd_penalty(g: Growth, found: Options) -> None:
    g.add("odd_penalty", rule=g.rng.choice(sorted(PENALTIES)))


def _odd_metric(g: Growth, found: Options) -> None:
    rule = g.rng.choice((*sorted(IN_LAYERS), "reset"))
    g.add("odd_metric", rule=rule, adds=g.rng.random() < 0.3)


def _positions(g: Growth, found: Options) -> None:
    if len(g.shape) == 2:
        by = g.rng.choice((*sorted(LENGTHS), "unique"))
        g.add("positions", by=by)


def _end_positions(rng: random.Random, found: Options) -> None:
    """Of an optimizer that sees slices one by one."""
    if rng.random() < 0.8:
        name = rng.choice(("Adam", "Adagrad", "RMSprop"))
        found["optimizer"] = {"name": name, "options": {}}


def _drawn(g: Growth, found: Options) -> None:
    if g.rng.random() < 0.5:
        g.add("drawn_state", reads=g.rng.choice(READS))
    else:
        g.add("own_moments", momentum=0.8)


# -------------------------------------------------- as models of people are
def _spare(g: Growth, found: Options) -> None:
    g.add("spare", units=g.width)


def _end_scaled(rng: random.Random, found: Options) -> None:
    found["optimizer"]["options"].pop("use_ema", None)
    found["optimizer"]["options"].pop("loss_scale_factor", None)
    found["optimizer"]["options"]["scaled"] = True
    found["bad_row"] = None


def _end_policy(rng: random.Random, found: Options) -> None:
    found["override"], found["schedule"] = "own policy", "gpipe"
    found["optimizer"]["options"].pop("loss_scale_factor", None)
    found["optimizer"]["options"].pop("scaled", None)
    found["bad_row"] = None


def _end_weights(rng: random.Random, found: Options) -> None:
    found["override"] = "own weights"
    found["then"] = rng.choice(("weights", "weights", "another K", "eager"))


def _resource(g: Growth, found: Options) -> None:
    g.add("resource")


def _end_resource(rng: random.Random, found: Options) -> None:
    found["override"], found["schedule"] = "assigns resources", "gpipe"
    found["bad_row"] = None


def _router(g: Growth, found: Options) -> None:
    g.add("router")


TOPICS = {
    "attribute that is changed": Topic(_changed, end=_infers, is_graph=True),
    "bytes": Topic(end=_end_inputs, is_graph=False, inputs="bytes"),
    "drawn state": Topic(_drawn),
    "loss that assigns or draws": Topic(end=_end_loss),
    "loss that is scaled": Topic(end=_end_scale),
    "made frozen": Topic(_made_frozen),
    "layer that is not built": Topic(_spare, end=_end_scaled),
    "metric in a layer": Topic(_odd_metric),
    "names": Topic(end=_end_inputs, is_graph=True, inputs="names"),
    "policy of the model": Topic(end=_end_policy, is_graph=True),
    "positions": Topic(
        _positions, end=_end_positions, inputs="sequence", is_first=True
    ),
    "resource": Topic(_resource, end=_end_resource),
    "router": Topic(_router),
    "router of tokens": Topic(_router, is_graph=False, inputs="tokens"),
    "rows mixed": Topic(_mixed),
    "scope inside": Topic(_substituted),
    "size of a row": Topic(
        _sized,
        _start_length,
        _end_length,
        is_graph=True,
        inputs="sequence",
        is_first=True,
    ),
    "size of a batch": Topic(_sized_rows, end=_end_rows, is_graph=True),
    "state afar": Topic(_state_afar),
    "state that is no mean": Topic(_odd_state),
    "storage": Topic(_storage_reader),
    "sum that is added": Topic(_odd_penalty),
    "tape inside": Topic(_differentiating),
    "unfrozen": Topic(_unfrozen),
    "weights of the model": Topic(end=_end_weights, is_graph=True),
}
