"""The public interface: nothing more, nothing less."""

import inspect

import keras
import pytest

import tfgpipe
from tfgpipe import hosts


def test_all_is_the_public_interface():
    assert tfgpipe.__all__ == [
        "MACHINES",
        "GPipe",
        "Machine",
        "PipelineStrategy",
        "Profile",
        "Schedule",
        "TPUPipelineStrategy",
        "callbacks",
        "check",
        "connect_to_tpu",
        "deferred",
        "layers_of",
        "load_model",
        "load_preset",
        "plan",
        "plot_cells",
        "profile",
        "restore",
        "timeline",
        "tpu_device_assignment",
    ]


def test_every_public_name_has_an_example():
    docs = {
        name: inspect.getdoc(getattr(module, name))
        for module in (tfgpipe, tfgpipe.callbacks, tfgpipe.timeline)
        for name in module.__all__
        if name not in ("callbacks", "timeline", "MACHINES")  # no callables
    }
    docs |= {"connect": hosts.connect.__doc__, "Cluster": hosts.Cluster.__doc__}
    assert not [n for n, text in docs.items() if "Example:\n" not in text]


def parameters(function):
    """Names and defaults; those after the star are in braces."""
    shown = []
    for name, p in inspect.signature(function).parameters.items():
        text = name if p.default is p.empty else f"{name}={p.default!r}"
        if p.kind is p.KEYWORD_ONLY:
            text = f"{{{text}}}"
        shown.append("**" + text if p.kind is p.VAR_KEYWORD else text)
    return shown


ARGUMENTS = {
    tfgpipe.GPipe.__init__: """
        self layers num_partitions=None num_micro_batches=None {devices=None}
        {layers_per_cell=None} {schedule='gpipe'} {remat='except_last'}
        {remat_groups=None} {gradient_dtype=None} {skip_nonfinite=False}
        {skip_outliers=None} {costs='flops'} {trial='warn'}
        {weights_on='devices'} {head_parts=1} {shards=None} {name=None}
        **kwargs
    """,
    tfgpipe.GPipe.loss_and_gradients: """
        self x y=None sample_weight=None {update_metrics=True}
    """,
    tfgpipe.check: "model x y=None sample_weight=None",
    tfgpipe.load_model: """
        path num_partitions=None num_micro_batches=None devices=None **changes
    """,
    tfgpipe.plot_cells: "model to_file='cells.png'",
    tfgpipe.profile: """
        layers x y=None {loss=None} {micro_batch_sizes=None} {device=None}
        {seconds=30.0} {jit_compile='auto'} {optimizer='adam'} {verbose='auto'}
    """,
    hosts.connect: """
        workers num_devices=1 {timeout=60.0} {secret_file=None}
        {allow_any_host=False}
    """,
    tfgpipe.PipelineStrategy.__init__: """
        self num_replicas num_partitions devices=None
    """,
    tfgpipe.PipelineStrategy.from_strategy: "strategy num_partitions",
    tfgpipe.TPUPipelineStrategy.from_strategy: "strategy num_partitions",
}


@pytest.mark.parametrize(
    "function", ARGUMENTS, ids=lambda function: function.__qualname__
)
def test_functions_take_the_arguments_they_promise(function):
    assert parameters(function) == ARGUMENTS[function].split()


def test_cells_are_plain_records():
    model = tfgpipe.GPipe(
        [keras.Input((3,)), keras.layers.Dense(2, name="a")], 1
    )
    (cell,) = model.cells()
    assert vars(cell) == {
        "index": 0,
        "layers": ("a",),
        "device": "/device:CPU:0",
        "cost": 14.0,
        "num_params": 8,
        "devices": ("/device:CPU:0",),
        "unit": "FLOPs",
        "weight_bytes": 32,
    }
