"""Two processes do not write to one folder."""

import os
import signal
import subprocess
import sys

import pytest
from processes import ROOT

from tools.train import folder_lock

HOLDER = """
import pathlib, signal, sys
from tools.train import folder_lock
folder_lock.claim(pathlib.Path(sys.argv[1]))
print("claimed", flush=True)
signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout.readline() == b"claimed\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_folder_in_use_is_refused_with_its_holder(tmp_path, holder):
    with pytest.raises(ValueError, match=f"by process {holder.pid} on .* sinc"):
        folder_lock.claim(tmp_path)
    with pytest.raises(ValueError, match="Wait until that one has ended"):
        folder_lock.claim(tmp_path / "." / "")


def test_lock_of_a_killed_process_does_not_block(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    folder_lock.claim(tmp_path)
    assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_process_may_claim_its_folder_again(tmp_path):
    folder_lock.claim(tmp_path)
    folder_lock.claim(tmp_path)


def test_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(OSError, match="lock"):
        folder_lock.claim(tmp_path)
