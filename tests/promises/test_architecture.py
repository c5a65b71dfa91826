"""Rules for the source, checked on it."""

import ast
import collections
import functools
import graphlib
import importlib
import inspect
import pathlib
import subprocess
import sys

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


def imports(module):
    """Full names of all modules and names that a module imports."""
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(module):
    """What a module imports of tfgpipe, as paths: package, module, name."""
    for name in imports(module):
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
    code = "import sys, tfgpipe; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {".".join(name.split(".")[:2]) for name in done.stdout.split()}
    assert "tfgpipe.model" in loaded
    assert not loaded & {"tfgpipe.commands", "tfgpipe.hosts", "tools"}


@pytest.mark.parametrize("module", MODULES)
def test_packages_are_imported_as_a_whole(module):
    """Names of another package come from its `__init__`, not its modules."""
    passed = [
        ".".join(path)
        for path in own_imports(module)
        if path[0] in SUBPACKAGES - {subpackage_of(module)} and len(path) > 2
    ]
    assert not passed


@pytest.mark.parametrize("package", sorted(SUBPACKAGES))
def test_package_exports_what_others_use(package):
    interface = importlib.import_module(f"tfgpipe.{package}")
    used = {
        path[1]
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


# Where what is copied is the engine's: values of variables and of cells, data
# before any layer runs, sizes. What hangs on it is none, or hung on it again.
COPIES = {
    "cells/model_trace",
    "cells/tracer",
    "checkpoints/writer",
    "devices/placement",
    "exactness/check",
    "generation",
    "graphs/cut",
    "inputs",
    "internals/keras",
    "loss/objective",
    "model/gradients",
    "run/chain",
    "run/clock",
    "run/mini_batch",
    "run/pipeline",
    "state/flow",
}


def test_tensors_of_users_are_copied_with_what_hangs_on_them():
    """By `internals.copies_of`: a mask was lost where a layer was sharded."""
    copying = {
        str(module)
        for module in MODULES
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node) in ("tf.identity", "tf.identity_n")
    }
    assert copying == COPIES


@pytest.mark.parametrize("module", MODULES)
def test_library_sets_nothing_on_handles(module):
    """`test_bugs.py` tells why."""
    found = []
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Assign):
            set_on = [t.value for t in node.targets if hasattr(t, "value")]
        elif isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func):
            set_on = node.args[:1]
        else:
            continue
        found += [one for one in set_on if ast.unparse(one).endswith("handle")]
    assert not [ast.unparse(one) for one in found]


def names_of_the_model():
    """By module, of the parts of `GPipe`: what they define, and refer to."""
    defined = collections.defaultdict(set)
    referred = collections.defaultdict(set)
    for cls in tfgpipe.GPipe.__mro__:
        if not cls.__module__.startswith("tfgpipe.model."):
            continue
        module = cls.__module__.removeprefix("tfgpipe.").replace(".", "/")
        for node in ast.walk(ast.parse(inspect.getsource(cls))):
            if isinstance(node, ast.FunctionDef):
                defined[module].add(node.name)
            elif isinstance(node, ast.Attribute):
                is_set = isinstance(node.ctx, ast.Store)
                if ast.unparse(node.value) == "self":
                    (defined if is_set else referred)[module].add(node.attr)
    return defined, referred


def with_imported(module):
    """A module of `model`, and those of it that it imports, one by another."""
    found = {module}
    for package, *rest in own_imports(module):
        if package == "model":
            found |= with_imported(f"model/{rest[0]}")
    return found


def test_parts_of_the_model_refer_to_what_is_below():
    defined, referred = names_of_the_model()
    everything = set().union(*defined.values())
    upward = {
        (module, name)
        for module, names in referred.items()
        for name in names & everything
        if not any(name in defined[m] for m in with_imported(module))
    }
    assert len(defined) > 4
    assert not upward


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
