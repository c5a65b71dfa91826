"""The line between two hosts: what must be the same at both ends."""

from tfgpipe.hosts import link


def test_fingerprint_is_of_the_code_of_every_package(tmp_path, monkeypatch):
    """Wherever it is installed, with whatever beside it."""
    module = tmp_path / "tfgpipe" / "sub" / "module.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(link, "__file__", tmp_path / "tfgpipe/hosts/link.py")
    found = []
    for text in ("x = 1", "x = 2", "x = 1"):
        module.write_text(text)
        found.append(link.fingerprint.__wrapped__())
    assert found[0] == found[2] != found[1]
