"""What hosts know in common."""

import stat
import threading

import pytest

from tfgpipe.hosts import secret


def test_default_file_is_made_once_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(secret, "_DEFAULT", tmp_path / "a" / "secret")
    found = set()
    threads = [
        threading.Thread(target=lambda: found.add(secret.read()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    path = tmp_path / "a" / "secret"
    assert [p.name for p in path.parent.iterdir()] == ["secret"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.read(str(path)) == found.pop()


def written(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("short\n", 0o600, "at least 16 bytes.* Received: .* with 5 and"),
        ("a" * 40, 0o640, "by its owner alone.*the mode 640.*chmod 600"),
        ("a" * 40, 0o604, "by its owner alone"),
    ],
)
def test_bad_file_is_an_error(tmp_path, text, mode, message):
    with pytest.raises(ValueError, match=message):
        secret.read(written(tmp_path / "secret", text, mode))


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="Copy the file of another"):
        secret.read(str(tmp_path / "secret"))


def test_proof_is_of_secret_role_and_both_numbers():
    proofs = {
        secret.proof(known, role, one, other)
        for known in (b"a", b"b")
        for role in ("controller", "worker")
        for one, other in (("1", "2"), ("2", "1"))
    }
    assert len(proofs) == 8
    one = secret.proof(b"a", "worker", "1")
    assert secret.is_proof(one, one)
    for other in (one[:-1], one + "0", "\xe9", "\ud800", None, 3, one.encode()):
        assert not secret.is_proof(other, one)
    assert secret.nonce() != secret.nonce()
