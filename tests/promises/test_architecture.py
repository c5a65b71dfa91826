"""Rules for the source, checked on it."""

import ast
import functools
import graphlib
import importlib
import pathlib

import keras
import pytest

import tfgpipe

PACKAGE = pathlib.Path(tfgpipe.__file__).parent
# Packages, and modules that are in none. Imports only go down this list.
ORDER = (
    "__main__",
    "commands",
    "hosts",
    "__init__",
    "callbacks",
    "checkpoints",
    "exactness",
    "large_models",
    "model",
    "generation",
    "monitor",
    "timeline",
    "plans",
    "arguments",
    "profiles",
    "sequence",
    "costs",
    "partition",
    "loss",
    "run",
    "trial",
    "cells",
    "state",
    "graphs",
    "inputs",
    "devices",
    "schedules",
    "files",
    "failures",
    "internals",
    "checks",
    "versions",
)
WITHOUT_TENSORFLOW = {
    "checkpoints/folder",
    "checks",
    "costs/sizes",
    "files",
    "partition",
    "plans/prediction",
    "plans/search",
    "plans/workload",
    "profiles/profile_record",
    "schedules",
    "versions",
}
PRIVATE = ("keras.src", "tensorflow.python")
MODULES = {
    str(path.relative_to(PACKAGE).with_suffix("")): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
SUBPACKAGES = {module.split("/")[0] for module in MODULES if "/" in module}


@functools.cache
def parsed(module):
    return ast.parse(MODULES[module].read_text())


def subpackage_of(module):
    return module.split("/")[0]


def module_of(path):
    """The module that a path leads to: the longest; or None."""
    for end in range(len(path), 0, -1):
        name = "/".join(path[:end])
        for module in (name, f"{name}/__init__"):
            if module in MODULES:
                return module
    return None


def imports(module, nodes=None):
    """Full names of all modules and names that a module imports."""
    for node in nodes or ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module, nodes=None):
    """What a module imports of tfgpipe, as paths: package, module, name."""
    for name in imports(module, nodes):
        package, *rest = name.split(".")
        if package == "tfgpipe" and rest:
            yield rest


def test_every_package_has_its_place_in_the_order():
    assert {subpackage_of(module) for module in MODULES} == set(ORDER)


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_go_down(module):
    below = ORDER[ORDER.index(subpackage_of(module)) :]
    assert {package for package, *_ in own_imports(module)} <= set(below)


def test_import_of_the_library_leaves_programs_out():
    """It is quick, and needs no sockets."""
    loaded, waiting = set(), ["__init__"]
    while waiting:
        module = waiting.pop()
        loaded.add(module)
        for path in own_imports(module, parsed(module).body):
            waiting += {module_of(path), f"{path[0]}/__init__"} & set(MODULES)
        waiting = [module for module in waiting if module not in loaded]
    packages = {subpackage_of(module) for module in loaded}
    assert "model" in packages
    assert not packages & {"__main__", "commands", "hosts"}


@pytest.mark.parametrize("package", sorted(SUBPACKAGES))
def test_package_exports_what_others_use(package):
    """They import names of it, and none of its modules."""
    interface = importlib.import_module(f"tfgpipe.{package}")
    used = {
        ".".join(path[1:])
        for module in MODULES
        if subpackage_of(module) != package
        for path in own_imports(module)
        if path[0] == package and len(path) > 1
    }
    # That of the private names lets all through.
    assert used <= set(getattr(interface, "__all__", vars(interface)))


@pytest.mark.parametrize("package", sorted(SUBPACKAGES))
def test_modules_of_a_package_need_no_circle(package):
    """Each module can be imported when those it imports have been."""
    graph = {
        module: {
            module_of(path)
            for path in own_imports(module)
            if path[0] == package and module_of(path) != f"{package}/__init__"
        }
        for module in MODULES
        if subpackage_of(module) == package and module != f"{package}/__init__"
    }
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", sorted(WITHOUT_TENSORFLOW))
def test_module_knows_no_tensorflow(module):
    own = [m for m in MODULES if m == module or subpackage_of(m) == module]
    assert own
    packages = {name.split(".")[0] for m in own for name in imports(m)}
    assert not packages & {"tensorflow", "keras"}
    below = {path[0] for m in own for path in own_imports(m)}
    # One of these modules, though its package may import TensorFlow.
    assert below <= set(map(subpackage_of, WITHOUT_TENSORFLOW))


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


@functools.cache
def defined_names():
    """Private names that the package itself defines."""
    # Public ones: of named tuples, and of `os`.
    names = {"_asdict", "_exit", "_replace"}
    for module in MODULES:
        for node in ast.walk(parsed(module)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(
                node.ctx, ast.Store
            ):
                names.add(node.attr)
    return names


@pytest.mark.parametrize(
    "module", [m for m in MODULES if subpackage_of(m) != "internals"]
)
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
        and not cls.__module__.startswith("tfgpipe.internals")
        for name in vars(cls)
        if is_private(name)
    }
    own |= {name for name in vars(model) if is_private(name)} - set(vars(plain))
    # What the automatic tracking of any Keras model may add.
    allowed = {"_api_export_path", "_api_export_symbol_id"}
    assert not own & set(dir(plain)) - allowed


# What these write is a folder's that has no name yet, or gets its name last.
WRITERS = {
    "tfgpipe/checkpoints/folder.py",
    "tfgpipe/files.py",
    "params/tokenizer.py",
    "tools/bench/memory_worker.py",  # to /proc
    "tfgpipe/hosts/secret.py",
}


def test_files_are_written_whole():
    """By `files.write_text`, or beside `files.put_in_place`."""
    found = set()
    for folder in ("tfgpipe", "tools", "params", "models"):
        for path in (PACKAGE.parent / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and writes(node):
                    found.add(path.relative_to(PACKAGE.parent).as_posix())
    assert found == WRITERS


def writes(call):
    """Whether a call opens a file to write to it, under its own name."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name in ("write_text", "write_bytes"):
        is_whole = isinstance(call.func, ast.Name)
        is_log = "_log" in ast.unparse(call.func)  # of TensorBoard
        return not is_whole and not is_log
    modes = [a.value for a in call.args[1:2] if isinstance(a, ast.Constant)]
    return name in ("open", "fdopen") and any("w" in str(m) for m in modes)
