"""What training depends on besides the numbers of a mini-batch.

Where a layer sees micro-batches apart, by a rule of the guide ("Exactness",
"State"), a pipeline has Keras's numbers at one micro-batch only; at more, the
same bits for any K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from case import Case, Spec

# Inference and training differ, or micro-batches see less than a mini-batch.
RANDOM = {
    *("alpha_dropout", "batch_norm", "branch", "dropout", "drawn_state"),
    "float8_dense",  # rounds the gradients of a micro-batch
    *("gaussian_dropout", "gaussian_noise", "noise", "noise_of_shared_seeds"),
    *("own_moments", "spatial_dropout_1d", "tf_noise", "unbiased_norm"),
    *("unordered_noise", "warm_norm"),
}
# Numbers follow from several rows: with more than one micro-batch they are
# Keras's, or the layer is warned of.
MIXING = {
    *("kept_codebook", "kept_queue", "mixed", "odd_metric", "odd_penalty"),
    *("odd_state", "router"),
}
# State that is a mean over rows: what is read after its assignment is that of
# the micro-batch.
MEANS = {"kept_average": "after", "kept_complex": "after"}
DRAWN = ("draws", "drawn rows")


def is_random(layers: Any) -> bool:
    """Whether training depends on how rows are grouped, by design."""
    every = list(_with_inner(layers))
    return any(
        spec.kind in RANDOM
        or spec.options.get("inner") in RANDOM
        or bool(spec.options.get("dropout"))
        or is_drawn(spec)
        for spec in every
    )


def mixing(layers: Any) -> set[str]:
    """The names of layers whose numbers follow from several rows.

    With more than one micro-batch they must be Keras's, or warned of.
    """
    every = list(_with_inner(layers))
    kinds = {spec.name: spec.kind for spec in every}
    return {
        spec.name
        for spec in every
        if spec.kind in MIXING
        or spec.options.get("by") == "rows"
        or (spec.kind == "sized" and spec.options["axis"] == 0)
        or _reads_groups(spec, kinds)
    }


def _reads_groups(spec: Spec, kinds: dict[str, str]) -> bool:
    """Whether a layer reads what micro-batches have changed."""
    reads = spec.options.get("reads", "none")
    if spec.kind == "state_reader":
        means = {*MEANS, *MIXING, "kept_metric"}
        return kinds.get(spec.options["of"]) in means
    if spec.kind == "kept_metric":  # which runs on
        return reads != "none"
    return reads == MEANS.get(spec.kind, "")


def is_drawn(spec: Spec) -> bool:
    """Whether a layer draws what it looks up."""
    return spec.options.get("by") in DRAWN


def is_unseeded(layers: Any) -> bool:
    """Whether a layer draws what no seed tells."""
    return any(spec.kind == "tf_noise" for spec in _with_inner(layers))


def is_random_in_inference(layers: Any) -> bool:
    """Whether a random layer is called as in training all the time."""
    every = list(_with_inner(layers))
    if is_unseeded(every) or any(map(is_drawn, every)):
        return True
    return is_random(
        spec for spec in every if spec.kind == "fixed" and spec.options["value"]
    )


# Keras casts to complex numbers by way of float32, and makes adapters of it.
_COARSE = {"float8_dense", "int8_dense", "kept_complex", "lora_dense"}


def precision(case: Case) -> str:
    """The coarsest dtype that is computed in."""
    dtypes = {spec.options.get("dtype") for spec in case.layers}
    kinds = {spec.kind for spec in case.layers}
    if "mixed_bfloat16" in dtypes:
        return "bfloat16"
    coarse = "float32" in dtypes or kinds & _COARSE
    return "float32" if coarse else case.dtype


def _with_inner(layers: Any) -> Iterator[Spec]:
    """Layers, and those inside them."""
    for spec in layers:
        yield spec
        inner = spec.options.get("layers", ())
        yield from _with_inner(Spec(**{"options": {}, **i}) for i in inner)
