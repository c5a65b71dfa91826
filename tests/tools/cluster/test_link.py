"""The line between two hosts: what must be the same at both ends."""

import pytest

from tools.cluster import link


@pytest.mark.parametrize("package", ["tfgpipe", "tools"])
def test_fingerprint_is_of_the_code_of_every_package(
    package, tmp_path, monkeypatch
):
    module = tmp_path / package / "sub" / "module.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(link, "__file__", tmp_path / "tools/cluster/link.py")
    found = []
    for text in ("x = 1", "x = 2", "x = 1"):
        module.write_text(text)
        found.append(link.fingerprint.__wrapped__())
    assert found[0] == found[2] != found[1]
