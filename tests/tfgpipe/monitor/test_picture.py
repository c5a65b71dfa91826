"""A picture of a measured step."""

import ast
import pathlib

from simulated import events

import tfgpipe
from tfgpipe.monitor import gantt
from tfgpipe.monitor.event_log import save_picture


def test_picture_has_the_numbers_and_the_advice(tmp_path, monkeypatch):
    captions = []
    save = gantt.save
    monkeypatch.setattr(
        gantt,
        "save",
        lambda made, caption, paths: (
            captions.append(caption) or save(made, caption, paths)
        ),
    )
    path = tmp_path / "a.png"
    advice = "move " + "layer 'a' " * 30 + "to cell 1"
    save_picture(events(), "Epoch 3", advice, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (caption,) = captions
    assert caption.title == "Epoch 3: bubble 21%, the tasks take 14.0 s"
    assert caption.subtitle == advice


def test_nothing_but_pictures_needs_matplotlib():
    """It is no requirement of the library."""
    package = pathlib.Path(tfgpipe.__file__).parent
    drawing = {"cell_bars", "gantt", "picture"}
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [alias.name for alias in getattr(node, "names", [])]
            names.append(getattr(node, "module", None) or "")
            parts = {part for name in names for part in name.split(".")}
            if parts & {*drawing, "matplotlib", "PIL"}:
                found.add(path.stem)
    assert found == drawing
