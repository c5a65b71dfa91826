"""The cost that each layer states, beside XLA's count of its operations."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import pytest
from stacks import no_weights_allocated

import tfgpipe
from models import amoebanet, transformer_lm, translation
from tfgpipe.cells import outline
from tfgpipe.graphs import operation_flops

ROOT = pathlib.Path(__file__).parents[2]
# Runs in an interpreter of its own, where Keras uses JAX, whose compiler is
# XLA. It prints pairs of a layer's own count and XLA's, of a batch of one.
COUNT = """
import json
import jax
import keras
from models import amoebanet, transformer_lm, translation

def one(nest):
    return jax.tree.map(lambda t: jax.ShapeDtypeStruct(
        tuple(n or 1 for n in t.shape), t.dtype), nest)

def xla_flops(layer, spec):
    variables = layer.trainable_variables, layer.non_trainable_variables
    call = jax.jit(lambda a, b, x: layer.stateless_call(a, b, x)[0])
    analysis = call.lower(*map(one, variables), one(spec)).cost_analysis()
    return analysis["flops"]

def count(model, layers, spec):
    found = {}
    for layer in layers:
        with keras.StatelessScope(initialize_variables=False):
            after = layer(spec)
        found[f"{model} {layer.name}"] = (
            layer.flops(spec), xla_flops(layer, spec))
        spec = after
    return found

ids = lambda n: keras.KerasTensor((None, n), "int32")
image = keras.KerasTensor((None, 64, 64, 3))
print(json.dumps({
    **count("amoebanet", amoebanet.amoebanet_d(3, 128, 100), image),
    **count("lm", transformer_lm.transformer_lm(
        1, 128, 512, 4, 1000, max_length=64, logit_limit=9.0), ids(64)),
    **count("translation", translation.translation(
        1, 128, 512, 4, 1000, max_length=64, head_dim=64), (ids(64), ids(48))),
}))
"""


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the JAX of the tests needs Python 3.11"
)
def test_flops_are_those_of_xla():
    result = subprocess.run(
        [sys.executable, "-c", COUNT],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "KERAS_BACKEND": "jax",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout.splitlines()[-1])
    assert len(counts) == 9 + 3 + 5  # every layer of the three models
    own, xla = ({n: c[i] for n, c in counts.items()} for i in range(2))
    assert own == pytest.approx(xla, rel=0.05)


# ------------------------------------------------------------- as the costs
def specs(*shapes, dtype="float32"):
    found = tuple(keras.KerasTensor((None, *s), dtype) for s in shapes)
    return found if len(found) > 1 else found[0]


def costs(layers, spec):
    found = []
    with no_weights_allocated():
        for layer in layers:
            output = layer(spec)
            found.append(layer.flops(spec))
            spec = output
    return found


MODELS = {
    "amoebanet": (
        lambda: amoebanet.amoebanet_d(3, 16, 5, stem_reductions=0),
        specs((32, 32, 3)),
    ),
    "lm": (
        lambda: transformer_lm.transformer_lm(
            2, 64, 256, 2, 500, max_length=40
        ),
        specs((32,), dtype="int32"),
    ),
    "translation": (
        lambda: translation.translation(1, 64, 256, 2, 500, max_length=40),
        specs((32,), (24,), dtype="int32"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_near_those_that_the_library_estimates(name):
    make, spec = MODELS[name]
    layers = make()
    own = costs(layers, spec)
    for layer, cost in zip(layers, own, strict=True):
        with no_weights_allocated():
            spec, before = layer(spec), spec

        def call(x, training, layer=layer):
            return layer(x, training=training)

        found = outline(call, [layer], before, operation_flops)
        assert cost == pytest.approx(sum(found.flops), rel=0.2, abs=20_000)


@pytest.mark.parametrize("name", MODELS)
def test_balance_is_by_a_models_own_flops(name):
    make, spec = MODELS[name]
    layers = make()
    model = tfgpipe.GPipe(
        [(layer, type(layer).flops) for layer in layers], num_partitions=2
    )
    model.build(keras.tree.map_structure(lambda s: s.shape, spec))
    found = sum(cell.cost for cell in model.cells())
    assert found == pytest.approx(sum(costs(make(), spec)))
