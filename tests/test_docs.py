"""What the documentation says is true: it is run, and its links followed."""

import ast
import copy
import doctest
import importlib
import json
import os
import pathlib
import pkgutil
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec

import keras
import pytest
import tiny
from test_architecture import MODULES, ORDER, SUBPACKAGES, parsed

import params
from tfgpipe import __main__ as tfgpipe_main
from tfgpipe.loss import row_wise
from tfgpipe.schedules import REMAT, SCHEDULES
from tools import notebooks
from tools.bench import __main__ as bench
from tools.results import __main__ as results

ROOT = pathlib.Path(__file__).parent.parent
PAGES = ["README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
READ_FIRST = ["README.md", "docs/guide.md"]


def text(page):
    return (ROOT / page).read_text("utf-8")


COMMANDS = {
    "tfgpipe": tfgpipe_main.COMMANDS,
    "tools.bench": bench.COMMANDS,
    "tools.results": results.COMMANDS,
}
DOCTEST_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page):
    """The fenced blocks of a page: (language, first line, text)."""
    found = re.finditer(
        r"^```(\w*)\n(.*?)^```$", text(page), re.DOTALL | re.MULTILINE
    )
    return [
        (m[1], text(page)[: m.start()].count("\n") + 2, m[2]) for m in found
    ]


def prose(page):
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.DOTALL | re.M)


# ----------------------------------------------------------------- examples
# Runs the blocks of a page in one namespace; errors name the page's line.
RUNNER = """
import contextlib, io, json, sys
page, blocks = json.load(sys.stdin)
namespace, printed = {"__name__": "__main__"}, []
for line, source in blocks:
    code = compile("\\n" * (line - 1) + source, page, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, namespace)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def run_blocks(page):
    """What each python block of a page prints, in an interpreter of its own:
    devices can be split once only."""
    sources = [block[1:] for block in blocks(page) if block[0] == "python"]
    result = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-W",  # Keras reads its variables by np.array(x, copy=False)
            "ignore:__array__ implementation:DeprecationWarning",
            "-W",  # of the machine, not of the page
            "ignore:Repeated measurements of a task must agree",
            "-c",
            RUNNER,
        ],
        input=json.dumps([str(ROOT / page), sources]),
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "KERAS_BACKEND": "tensorflow",
            "PYTHONPATH": str(ROOT),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page in READ_FIRST else pytest.mark.slow)
        for page in PAGES
        if "```python" in text(page)
    ],
)
def test_examples_of_page_run_and_print_what_is_shown(page):
    printed = iter(run_blocks(page))
    checker = doctest.OutputChecker()
    output, shown = "", 0
    for language, line, block in blocks(page):
        if language == "python":
            output = next(printed)
        elif language == "text":  # follows the block that prints it
            shown += 1
            assert checker.check_output(block, output, DOCTEST_FLAGS), (
                f"{page}, line {line}, shows:\n{block}\nbut it is:\n{output}"
            )
    assert shown


def test_page_is_read_at_once():
    """A page that grows longer is split by what a user looks for."""
    lines = {page: len(text(page).splitlines()) for page in PAGES}
    assert not {p: n for p, n in lines.items() if n > 250}


@pytest.mark.parametrize("package", ["models", "params", "tools"])
def test_docstring_examples_run(package):
    """Those of the library are run by pytest itself."""
    found = [
        module.name
        for module in pkgutil.walk_packages(
            [str(ROOT / package)], f"{package}."
        )
        if ">>> " in text(find_spec(module.name).origin)
    ]
    assert found
    for name in found:
        module = importlib.import_module(name)
        result = doctest.testmod(module, optionflags=DOCTEST_FLAGS)
        assert result.attempted and not result.failed, name


# -------------------------------------------------------------------- links
def anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
        for heading in headings
    }


def points_to_something(page, target):
    path, _, anchor = target.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    if not file.exists():
        return False
    return not anchor or anchor in anchors(file)


@pytest.mark.parametrize("page", [*PAGES, "data/NOTICE.md"])
def test_links_point_to_something(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", text(page))
    relative = [target for target in targets if "://" not in target]
    assert targets
    assert not [t for t in relative if not points_to_something(page, t)]


def test_every_example_is_shown():
    shown = re.findall(r"\]\(\.\./(examples/\w+\.py)\)", text("docs/guide.md"))
    scripts = sorted(map(str, (ROOT / "examples").glob("*.py")))
    assert sorted(str(ROOT / path) for path in shown) == scripts


# ----------------------------------------------------------------- the site
def test_site_has_every_page():
    pages = re.findall(r"^ +- .*: (\w+\.md)$", text("mkdocs.yml"), re.MULTILINE)
    # Made of the README and of docstrings.
    written = [p for p in pages if p not in ("index.md", "reference.md")]
    assert sorted(f"docs/{p}" for p in written) == PAGES[1:]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("mkdocs") is None,
    reason="MkDocs is not installed: pip install '.[docs]'",
)
def test_site_is_built_without_a_warning(tmp_path):
    build = "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"
    subprocess.run([sys.executable, *build], cwd=ROOT, check=True)
    names = importlib.import_module("tfgpipe").__all__
    names = [*names, "hosts.connect", "hosts.Cluster"]
    reference = (tmp_path / "reference.html").read_text("utf-8")
    assert not [n for n in names if f'id="tfgpipe.{n}"' not in reference]


@pytest.mark.parametrize("name", notebooks.NOTEBOOKS)
def test_notebooks_are_those_of_the_pages(name):
    """Their code is run as that of the page."""
    path = notebooks.FOLDER / f"{name}.ipynb"
    assert path.read_text("utf-8") == notebooks.written(name), (
        "python -m tools.notebooks"
    )
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    page = notebooks.NOTEBOOKS[name][0]
    sources = [block[2] for block in blocks(page) if block[0] == "python"]
    assert code[1:] == [source.strip() for source in sources]
    links = re.findall(r"\]\(([^)#]+)", path.read_text("utf-8"))
    assert all((notebooks.FOLDER / link).exists() for link in links)


# ----------------------------------------------------------------- commands
def commands(page):
    """Commands of the shell blocks, and those in backticks in the text."""
    shell = "".join(block[2] for block in blocks(page) if block[0] == "sh")
    found = shell.replace("\\\n", " ").splitlines()
    inline = re.findall(
        r"`((?:\.venv/bin/)?(?:make|python|pip|tfgpipe)\s[^`]*)`", prose(page)
    )
    return [command for command in [*found, *inline] if command]


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    check = {
        "make": check_make,
        "python": check_python,
        "pip": check_pip,
        "tfgpipe": lambda words: check_flags("tfgpipe", words),
    }
    for command in commands(page):
        program, *words = shlex.split(command)
        if command == "python3 -m venv .venv":  # what the others are from
            continue
        if program == "wc":
            assert all((ROOT / path).is_file() for path in words[1:])
            continue
        check[program.removeprefix(".venv/bin/")](words)


def check_make(words):
    makefile = text("Makefile")
    for word in words:
        variable, equals, value = word.partition("=")
        if not equals:
            assert re.search(rf"^{word}:", makefile, re.MULTILINE)
            continue
        assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE)
        if variable == "DEMO_FLAGS":
            check_flags("tools.train", value.split())


def check_python(words):
    if words[0].endswith(".py"):
        assert (ROOT / words[0]).is_file()
        return
    dash_m, module, *arguments = words
    assert dash_m == "-m"
    check_flags(module, arguments)


def check_flags(module, arguments):
    """The module has these flags, and takes their values."""
    if module in COMMANDS:
        name, *arguments = arguments
        assert name in COMMANDS[module]
        package = "tfgpipe.commands" if module == "tfgpipe" else module
        module = importlib.import_module(f"{package}.{name}")
        check_parsed(module, arguments)
    elif module == "tools.train":
        check_train(arguments)
    elif module == "pytest":
        assert arguments[:2] == ["-m", "slow"]
        assert all((ROOT / path).exists() for path in arguments[2:])
    else:
        if find_spec(module).submodule_search_locations:  # a package
            module = f"{module}.__main__"
        check_parsed(importlib.import_module(module), arguments)


def check_parsed(module, arguments):
    """The module's own flags take them, and nothing is left."""
    values = copy.deepcopy(module.FLAGS)
    assert values(["program", *arguments])[1:] == []


def check_train(arguments):
    source = text("tools/train/flags.py")
    flags = re.findall(r"flags\.DEFINE_\w+\(\s*\"(\w+)\"", source)
    flags += re.findall(r"^    (\w+)=\(", source, re.MULTILINE)
    for argument in arguments:
        flag, _, value = argument.removeprefix("--").partition("=")
        assert flag in flags
        if flag == "params":
            experiment = params.get(value)
        if flag == "set":
            params.override(experiment, [value])


def check_pip(words):
    """Of what `setup.py` requires, or of the checkout with its extras."""
    command, *what = words
    assert command == "install"
    what = " ".join(word for word in what if word not in ("-e", "--no-deps"))
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
    named = (extras[1] or "").split(",") if extras else what.split()
    assert all(f'"{name}"' in text("setup.py") for name in named if name)


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("docs/measurements.md", "tools.bench"),
        ("docs/results.md", "tools.results"),
    ],
)
def test_every_sub_command_is_shown(page, module):
    shown = {
        words[3]
        for words in map(shlex.split, commands(page))
        if words[1:3] == ["-m", module]
    }
    assert shown == set(COMMANDS[module])


# ----------------------------------------------------------------- the code
def code_chapter(name):
    return text("docs/code.md").split(f"\n## {name}\n")[1].split("\n## ")[0]


def named_functions(markdown):
    """Pairs of a module and what is named of it, in order."""
    return re.findall(r"`([\w/]+)\.py`: `([\w.]+)`", markdown)


def names_of(module):
    """What a module defines: names, and those of its classes."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name
            for inner in getattr(node, "body", []):
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}"


def test_modules_and_functions_that_are_named_exist():
    pages = text("docs/code.md") + text("docs/code_change.md")
    named = named_functions(pages)
    assert len(named) > 30
    for module, name in named:
        assert name in set(names_of(module)), (module, name)
    modules = set(re.findall(r"`([\w/]+)\.py`", pages))
    tests = {path.stem for path in (ROOT / "tests").rglob("*.py")}
    unknown = modules - set(MODULES) - tests
    assert not {m for m in unknown if not (ROOT / f"{m}.py").exists()}


def test_classes_in_the_table_of_words_exist():
    named = set(re.findall(r"`_?([A-Z]\w+)`", code_chapter("Words")))
    known = {name.lstrip("_") for m in MODULES for name in names_of(m)}
    assert {"Op", "Program", "Task"} <= named
    assert named - {"GPipe"} <= known


def test_functions_of_the_hour_exist():
    rows = re.findall(
        r"^\| `([\w/]+)\.py` (\|.*)$", code_chapter("An hour"), re.M
    )
    (words,) = map(shlex.split, commands_of_chapter("An hour"))
    assert [f"tfgpipe/{module}.py" for module, _ in rows] == words[2:]
    for module, row in rows:
        known = {name.split(".")[-1] for name in names_of(module)}
        assert set(re.findall(r"`(\w+)`", row)) <= known


def test_table_of_packages_has_all_modules_in_the_order_of_imports():
    rows = re.findall(
        r"^\| `(\w+)(?:/|\.py)` \|.*\|(.*)\|$", code_chapter("Packages"), re.M
    )
    assert [name for name, _ in rows] == list(ORDER)
    shown = [
        f"{name}/{module}" if name in SUBPACKAGES else name
        for name, modules in rows
        for module in re.findall(r"`([\w/]+)`", modules) or [""]
    ]
    interfaces = {f"{package}/__init__" for package in SUBPACKAGES}
    assert sorted(shown) == sorted(set(MODULES) - interfaces)


def commands_of_chapter(name):
    shell = re.findall(r"```sh\n(.*?)```", code_chapter(name), re.DOTALL)
    return "".join(shell).replace("\\\n", " ").splitlines()


def walk():
    """The table of what happens in a training step."""
    return code_chapter("One mini-batch").split("\nDifferences\n")[0]


def test_mini_batch_walks_in_the_order_in_which_it_is_trained():
    model = tiny.compiled(tiny.pipeline())
    x, y = tiny.data()
    names = {str(path): module for module, path in MODULES.items()}
    called = {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename in names:
            called.setdefault((names[code.co_filename], code.co_name))

    sys.setprofile(note)
    try:
        model.train_on_batch(x, y)
    finally:
        sys.setprofile(None)
    told = [
        (module, name.split(".")[-1])
        for module, name in named_functions(walk())
    ]
    # Classes of a module may each have an `__init__`.
    told = list(dict.fromkeys(told))
    assert [call for call in called if call in told] == told


# -------------------------------------------------------- names in the text
@pytest.mark.parametrize("page", PAGES)
def test_choices_that_are_shown_exist(page):
    for name, choices in (("remat", REMAT), ("schedule", [*SCHEDULES, "auto"])):
        shown = re.findall(rf"\b{name}=\"(\w+)\"", text(page))
        assert set(shown) <= set(choices)


def test_streaming_losses_of_the_guide_are_those_of_the_library():
    chapter = text("docs/exactness.md").split("## Losses and metrics")[1]
    classes, functions = chapter.split("* the functions")
    named = re.findall(r"`([A-Z]\w+)`", classes.split("* the loss classes")[1])
    assert named == sorted(loss.__name__ for loss in row_wise._LOSSES)
    named = re.findall(r"`\"(\w+)\"`", functions.split("* the metrics")[0])
    found = {keras.losses.get(name).__name__ for name in named}
    assert found == row_wise._LOSS_FUNCTIONS


def test_tests_of_promises_exist():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text("docs/code_change.md"))
    assert len(named) > 10
    for path, name in named:
        source = (ROOT / "tests" / path).read_text()
        assert f"\ndef {name}(" in source
