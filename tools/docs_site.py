"""What the site of the documentation has besides the files in docs/.

MkDocs calls these functions, see `mkdocs.yml`: the README becomes the start
page, the names that `tfgpipe` exports become the reference, and links to files
beside docs/ lead to copies of them.
"""

from __future__ import annotations

import ast
import pathlib
import re
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]
# By their paths in the repository, those on the site.
_COPIES = {
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "LICENSE": "LICENSE.txt",
    "data/NOTICE.md": "data/NOTICE.md",
    **{
        f"{path.parent.name}/{path.name}": f"{path.parent.name}/{path.name}"
        for kind in ("notebooks/*.ipynb", "examples/*.py")
        for path in sorted(ROOT.glob(kind))
    },
}
# Lines of an example, up to an empty one.
_EXAMPLE = re.compile(r"^(>{3} .*(?:\n.+)*)", re.MULTILINE)
_REFERENCE = """\
# Reference

Every public name of `tfgpipe`. How they are used together is in the
[guide](guide.md).

"""
# Public names that `import tfgpipe` alone does not have.
_BESIDE = ["hosts.connect", "hosts.Cluster"]
# What classes do by themselves; the rest of `GPipe` is that of `keras.Model`.
_MEMBERS = {
    "GPipe": [
        "num_partitions",
        "num_micro_batches",
        "num_replicas",
        "cells",
        "summary",
        "build",
    ],
}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are no files of docs/."""
    pages = {"index.md": _text("README.md"), "reference.md": _reference()}
    for source, target in _COPIES.items():
        pages[target] = _text(source)
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lets links lead to where things are on the site."""
    path = page.file.src_uri
    if path in ("index.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        markdown = markdown.replace("](docs/", "](")
    up = "../" * path.count("/")
    for source, target in _COPIES.items():
        for link in (source, f"../{source}"):
            markdown = markdown.replace(f"]({link})", f"]({up}{target})")
    return markdown.replace("](../README.md", "](index.md")


def _text(path: str) -> str:
    return (ROOT / path).read_text("utf-8")


def _reference() -> str:
    """A page that has mkdocstrings show each exported name."""
    tree = ast.parse(_text("tfgpipe/__init__.py"))
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "__all__"
    )
    return _REFERENCE + "\n".join(map(_shown, [*names, *_BESIDE]))


def _shown(name: str) -> str:
    lines = [f"::: tfgpipe.{name}"]
    if name in _MEMBERS:
        members = ", ".join(_MEMBERS[name])
        lines += ["    options:", f"      members: [{members}]"]
    return "\n".join(lines) + "\n"


class Examples(griffe.Extension):
    """Has examples of docstrings, which are text to others, shown as code."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Puts fences around the examples of an object."""
        if obj.docstring is not None:
            text = _EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
            text = re.sub(
                r"^Example:\n\n", "**Example:**\n\n", text, flags=re.M
            )
            obj.docstring.value = text
