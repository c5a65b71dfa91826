"""The scripts of examples/ run as they are, and reach what they are for."""

import os
import pathlib
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

ROOT = pathlib.Path(__file__).parent.parent
NEED_HUB = ("finetune_classifier", "large_preset", "lora")
# What the last line says, and the least or the most that it should say.
REACHED = {
    "finetune_classifier": (r"Accuracy of the task itself: (\d+)%", 80, 100),
    "large_preset": (r"Loss: \d\.\d+, then (\d\.\d+)", 0, 2.4),
    "lora": (r"Loss: 2.\d+, then (\d\.\d+)", 0, 2.6),
    "resnet": (r"Loss: \d\.\d+, then (\d\.\d+)", 0, 1),
    "unet": (r"Overlap: (\d+)%", 80, 100),
}


def test_every_script_is_short_and_has_a_test():
    scripts = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
    assert set(scripts) == set(REACHED)
    for path in scripts.values():
        assert len(path.read_text().splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize("name", REACHED)
def test_script_shows_two_cells_and_reaches_what_it_is_for(name):
    if name in NEED_HUB and find_spec("keras_hub") is None:
        pytest.skip("keras-hub is not installed: pip install '.[examples]'")
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "KERAS_BACKEND": "tensorflow",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "device:CPU:0" in result.stdout and "device:CPU:1" in result.stdout
    said, least, most = REACHED[name]
    found = re.fullmatch(said, result.stdout.splitlines()[-1])
    assert found, result.stdout
    assert least <= float(found[1]) <= most
