"""A release is built, checked and trained with, and not uploaded."""

import shutil
import tarfile
import zipfile

import pytest

from tfgpipe.versions import VERSION
from tools import release

URL = "https://forge.example/name/tfgpipe"


def test_all_files_name_the_same_version(tmp_path):
    assert release.version_of(release.ROOT) == VERSION
    (tmp_path / "tfgpipe").mkdir()
    for name in ("tfgpipe/versions.py", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(release.ROOT / name, tmp_path / name)
    citation = tmp_path / "CITATION.cff"
    text = citation.read_text().replace(f"version: {VERSION}", "version: 9.8")
    citation.write_text(text)
    with pytest.raises(ValueError, match=r"'CITATION\.cff': '9\.8'"):
        release.version_of(tmp_path)


def test_files_for_a_forge_follow_their_schemas(monkeypatch, tmp_path):
    pytest.importorskip("check_jsonschema")
    release.check_forge_files()
    shutil.copytree(release.ROOT / ".github", tmp_path / ".github")
    shutil.copy(release.ROOT / "CITATION.cff", tmp_path)
    workflow = tmp_path / ".github" / "workflows" / "tests.yml"
    workflow.write_text(workflow.read_text().replace("runs-on", "runs-at"))
    monkeypatch.setattr(release, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="'runs-on' is a required property"):
        release.check_forge_files()


@pytest.mark.slow
def test_release_is_built_and_trained_with(tmp_path):
    pytest.importorskip("build")
    sdist, wheel = release.release(URL, tmp_path / "dist")
    (name,) = (
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith("/METADATA")
    )
    metadata = zipfile.ZipFile(wheel).read(name).decode()
    page = f"{URL}/blob/v{VERSION}/docs"
    assert f"[Do I need a pipeline?]({page}/when.md)" in metadata
    assert "](docs/" not in metadata
    assert f"Project-URL: Documentation, {page}/guide.md" in metadata
    with tarfile.open(sdist) as packed:
        assert f"tfgpipe-{VERSION}/README.md" in packed.getnames()
