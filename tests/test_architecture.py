"""The house rules, checked on the source."""

import ast
import functools
import pathlib

import keras
import pytest

import tfgpipe

PACKAGE = pathlib.Path(tfgpipe.__file__).parent
# A module imports only from modules below it.
ORDER = (
    "__init__",
    "gpipe",
    "tpu",
    "timeline",
    "stepping",
    "saving",
    "files",
    "random_state",
    "described",
    "arguments",
    "layer_list",
    "layer_graph",
    "strategy",
    "device_list",
    "inference",
    "restrictions",
    "objective",
    "direct",
    "loss",
    "row_wise",
    "pipeline",
    "turns",
    "results",
    "seeds",
    "state_flow",
    "weights",
    "trace",
    "added_losses",
    "cell_tasks",
    "eager_cell",
    "traced_cell",
    "differentiate",
    "stages",
    "subgraph",
    "subfunction",
    "bundle",
    "likeness",
    "code_reading",
    "code_facts",
    "cell_function",
    "moments",
    "cell",
    "cell_values",
    "stateful_ops",
    "state_scope",
    "state",
    "single_values",
    "gradients",
    "sparse",
    "update",
    "placement",
    "inputs",
    "micro_batch",
    "failures",
    "cell_record",
    "cost",
    "flops",
    "internals",
    "partition",
    "replicas",
    "named_schedules",
    "schedule",
    "tasks",
    "ideal",
    "counts",
)
WITHOUT_TENSORFLOW = {
    "cell_record",
    "counts",
    "ideal",
    "named_schedules",
    "partition",
    "replicas",
    "schedule",
    "tasks",
}
# Longer than it should be: to be cut when it is next worked on. The list of
# private names is one list, however long.
LONG = {"internals"}
PRIVATE = ("keras.src", "tensorflow.python")
MODULES = {path.stem: path for path in sorted(PACKAGE.glob("*.py"))}


@functools.cache
def parsed(module):
    return ast.parse(MODULES[module].read_text())


def imports(module):
    """Full names of all modules and names that a module imports."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module):
    """The modules of this package that a module imports."""
    for name in imports(module):
        package, *rest = name.split(".")
        if package == "tfgpipe" and rest:
            yield rest[0]


def test_every_module_has_its_place_in_the_order():
    assert set(MODULES) == set(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module):
    below = ORDER[ORDER.index(module) + 1 :]
    assert set(own_imports(module)) <= set(below)


@pytest.mark.parametrize("module", sorted(WITHOUT_TENSORFLOW))
def test_module_knows_no_tensorflow(module):
    packages = {name.split(".")[0] for name in imports(module)}
    assert not packages & {"tensorflow", "keras"}
    assert set(own_imports(module)) <= WITHOUT_TENSORFLOW


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def defined_names():
    """Private names that the package itself defines."""
    names = {"_asdict", "_replace"}  # of named tuples, and public
    for module in MODULES:
        for node in ast.walk(parsed(module)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(
                node.ctx, ast.Store
            ):
                names.add(node.attr)
    return names


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"internals"}))
def test_private_names_of_others_stay_in_internals(module):
    own = defined_names()
    names = list(imports(module))
    found = []
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.append(node.value)
        elif isinstance(node, ast.Attribute) and (
            node.attr == "__internal__"
            or (is_private(node.attr) and node.attr not in own)
        ):
            found.append(ast.unparse(node))
    found += [name for name in names if name.startswith(PRIVATE)]
    assert not found


def test_model_overrides_no_private_name_of_keras_by_accident():
    model = tfgpipe.GPipe([keras.Input((3,)), keras.layers.Dense(2)], 1)
    plain = keras.Model()
    own = {
        name
        for cls in type(model).__mro__
        if cls.__module__.startswith("tfgpipe")
        and cls.__module__ != "tfgpipe.internals"
        for name in vars(cls)
        if is_private(name)
    }
    own |= {name for name in vars(model) if is_private(name)} - set(vars(plain))
    # What the automatic tracking of any Keras model may add.
    allowed = {"_api_export_path", "_api_export_symbol_id"}
    assert not own & set(dir(plain)) - allowed


@pytest.mark.parametrize("module", MODULES)
def test_library_asserts_nothing(module):
    asserts = [n for n in ast.walk(parsed(module)) if isinstance(n, ast.Assert)]
    assert not asserts  # they vanish under -O


@pytest.mark.parametrize("module", MODULES)
def test_module_says_what_it_is_for(module):
    text = ast.get_docstring(parsed(module))
    assert text and text.splitlines()[0].endswith(".")


@pytest.mark.parametrize("module", MODULES)
def test_module_is_short(module):
    lines = MODULES[module].read_text().count("\n")
    assert (lines < 300) == (module not in LONG)


@pytest.mark.parametrize("module", MODULES)
def test_module_names_no_store_of_odds_and_ends(module):
    assert module not in {"common", "helpers", "misc", "util", "utils"}
