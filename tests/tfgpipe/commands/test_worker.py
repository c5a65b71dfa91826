"""The command that lends devices: what it refuses."""

import pytest

from tfgpipe.commands import worker
from tfgpipe.commands.main import main


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "*", "", "0"])
def test_all_addresses_must_be_asked_for(bind, capsys):
    assert main(["tfgpipe", "worker", f"--bind={bind}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tfgpipe worker: --bind must be one address")
    assert "add --allow_any_host" in error
    worker._check_bind(bind, True)
    worker._check_bind("127.0.0.1", False)


def test_secret_that_cannot_be_read_is_named(tmp_path, capsys):
    file = tmp_path / "secret"
    assert main(["tfgpipe", "worker", f"--secret_file={file}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tfgpipe worker: `secret_file` must be a file")
    assert str(file) in error
