"""Which versions are refused, warned of, and named by setup.py."""

import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from tfgpipe import versions
from tfgpipe.versions import KERAS, TENSORFLOW, check_versions

SETUP = pathlib.Path(__file__).parents[2] / "setup.py"


@pytest.mark.parametrize(
    ("tensorflow", "keras_"),
    [
        ("2.18.0", "3.10.0"),
        ("2.18.1", "3.15.1"),
        ("2.21.0", "3.12.4"),
        ("2.21.0-rc1", "3.15.99"),
    ],
)
def test_tested_versions_are_taken_without_a_word(tensorflow, keras_):
    check_versions({TENSORFLOW: tensorflow, KERAS: keras_})


@pytest.mark.parametrize(
    ("tensorflow", "keras_", "message"),
    [
        (
            "2.17.1",
            "3.15.0",
            r"needs TensorFlow 2\.18 to 2\.21\. Received: TensorFlow 2\.17\.1\."
            r" Install it: `pip install --upgrade 'tensorflow>=2\.18'`, or",
        ),
        (
            "2.22.0",
            "3.9.2",
            r"needs Keras 3\.10 to 3\.15\. Received: Keras 3\.9\.2\. Install "
            r"it: `pip install --upgrade 'keras>=3\.10'`",
        ),
        ("1.99.0", "3.15.0", "Received: TensorFlow 1.99.0"),
    ],
)
def test_older_version_is_refused_with_the_cure(tensorflow, keras_, message):
    with pytest.raises(ImportError, match=message):
        check_versions({TENSORFLOW: tensorflow, KERAS: keras_})


@pytest.mark.parametrize(
    ("tensorflow", "keras_", "received"),
    [
        ("2.22.0", "3.15.0", "TensorFlow 2.22.0"),
        ("2.21.0", "3.16.0", "Keras 3.16.0"),
        (
            "2.23.0-dev20261026",
            "4.0.0",
            "TensorFlow 2.23.0-dev20261026 and Keras 4.0.0",
        ),
        ("head", "3.15.0", "TensorFlow head"),
    ],
)
def test_newer_versions_give_one_warning(tensorflow, keras_, received):
    with pytest.warns(UserWarning, match="has been tested") as warned:
        check_versions({TENSORFLOW: tensorflow, KERAS: keras_})
    (message,) = (str(w.message) for w in warned)
    assert message.startswith(
        "tfgpipe has been tested with TensorFlow 2.18 to 2.21 and Keras 3.10 "
        f"to 3.15. Received: {received}. "
    )


NEWER = """
import warnings, keras, tensorflow
keras.__version__ = "3.99.0"
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    import tfgpipe
told = [w for w in warned if "has been tested" in str(w.message)]
assert len(told) == 1, warned
print(told[0].filename)
"""
MISSING = """
import sys
sys.modules["tensorflow"] = None  # so that it cannot be found
try:
    import tfgpipe
except ImportError as error:
    print(error)
"""


def run(script):
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=SETUP.parent,
    ).stdout.strip()


def test_import_warns_once_where_it_is_imported():
    assert run(NEWER) == "<string>"


def test_import_without_tensorflow_names_the_cure():
    assert run(MISSING).startswith(
        "tfgpipe needs TensorFlow 2.18 to 2.21. Received: no module named "
        "'tensorflow'. Install it: `pip install --upgrade 'tensorflow>=2.18'`"
    )


def test_package_that_lacks_another_one_says_so_itself(monkeypatch):
    def failing(name, *args):
        raise ModuleNotFoundError("No module named 'gast'", name="gast")

    monkeypatch.setattr(importlib, "import_module", failing)
    with pytest.raises(ModuleNotFoundError, match="gast"):
        versions.check()


def test_setup_requires_the_oldest_versions():
    source = SETUP.read_text()
    bounds = re.findall(
        r'"(tensorflow|keras)(?!-hub)[^"=>;]*>=([^",]*)"', source
    )
    oldest = {
        "tensorflow": ".".join(map(str, TENSORFLOW.oldest)),
        "keras": ".".join(map(str, KERAS.oldest)),
    }
    assert {name for name, _ in bounds} == set(oldest)
    assert all(bound == oldest[name] for name, bound in bounds)
    assert f"'keras>={oldest['keras']}'" in KERAS.cure
    assert f"'tensorflow>={oldest['tensorflow']}'" in TENSORFLOW.cure
