import json

import pytest

from tfgpipe.checkpoints import folder as manifest_lib
from tfgpipe.checkpoints.folder import Damaged, Manifest, Position


def written(folder, **changed):
    (folder / "values").write_bytes(b"some values")
    content = {
        "position": Position(7, 1, 2),
        "variables": {"model": [["a/kernel", [2, 3], "float32"]]},
        "files": {"values": manifest_lib.file_record(folder / "values")},
        "monitored": {"name": "val_loss", "value": 0.1},
        "optimizer": ["Adam"],
        "versions": {"keras": "3"},
    }
    found = Manifest(**{**content, **changed})
    found.write(folder)
    return found


def test_manifest_is_read_as_it_was_written(tmp_path):
    expected = written(tmp_path)
    found = manifest_lib.read_manifest(tmp_path)
    assert found == expected
    manifest_lib.check_files(tmp_path, found)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[1, 2]", "cannot be read"),
        (lambda text: text.replace('"step": 7', '"step": 8'), "not as it was"),
        (lambda text: text.replace("kernel", "kernfl"), "not as it was"),
    ],
)
def test_damaged_manifest_is_told(tmp_path, damage, reason):
    written(tmp_path)
    path = tmp_path / manifest_lib.NAME
    path.write_text(damage(path.read_text()))
    with pytest.raises(Damaged, match=reason):
        manifest_lib.read_manifest(tmp_path)


def test_missing_manifest_is_told(tmp_path):
    with pytest.raises(Damaged, match="FileNotFoundError"):
        manifest_lib.read_manifest(tmp_path)


def test_manifest_of_another_format_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_lib, "FORMAT", 2)
    written(tmp_path)
    monkeypatch.setattr(manifest_lib, "FORMAT", 1)
    with pytest.raises(Damaged, match="newer version"):
        manifest_lib.read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "values is missing"),
        (lambda path: path.write_bytes(b"some"), "has 4 bytes instead of 11"),
        (lambda path: path.write_bytes(b"some valuet"), "not as it was writt"),
    ],
)
def test_damaged_file_is_told(tmp_path, damage, reason):
    found = written(tmp_path)
    damage(tmp_path / "values")
    with pytest.raises(Damaged, match=reason):
        manifest_lib.check_files(tmp_path, found)


def test_file_says_what_it_holds(tmp_path):
    written(tmp_path)
    found = json.loads((tmp_path / manifest_lib.NAME).read_text())
    assert found["content"]["position"] == {"step": 7, "epoch": 1, "batch": 2}
