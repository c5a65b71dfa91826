"""The version of the library; versions of TensorFlow and Keras that it takes.

It uses private names of both, all in `internals`, each with a test, and
`make test-versions` runs the tests at the corners of these ranges. An older
version is known to lack something, so it is refused. A newer one may well work:
it is used, with a warning.
"""

from __future__ import annotations

import importlib
import re
import warnings
from typing import NamedTuple

VERSION = "0.2.0"


class Range(NamedTuple):
    """The tested versions of a package, by their first two numbers.

    Attributes:
        name: What people call the package.
        oldest: The first version that works.
        newest: The last one that was tested.
        cure: What to do where there is an older one, or none.
    """

    name: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    cure: str

    def __str__(self) -> str:
        first, last = (
            ".".join(map(str, v)) for v in (self.oldest, self.newest)
        )
        return f"{self.name} {first} to {last}"


TENSORFLOW = Range(
    "TensorFlow",
    (2, 18),
    (2, 21),
    # No requirement of the package: see setup.py.
    "Install it: `pip install --upgrade 'tensorflow>=2.18'`, or a build of it "
    "for your hardware, such as `tensorflow-cpu` or `tensorflow-tpu`.",
)

KERAS = Range(
    "Keras",
    (3, 10),
    (3, 15),
    "Install it: `pip install --upgrade 'keras>=3.10'`.",
)


def check() -> None:
    """Imports TensorFlow and Keras, and looks at their versions.

    Raises:
        ImportError: If one is missing or too old.
    """
    installed = {}
    # Keras needs TensorFlow, and would say less of what is missing.
    for module, supported in (("tensorflow", TENSORFLOW), ("keras", KERAS)):
        try:
            package = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise  # it is there, but something that it needs is not
            raise ImportError(
                f"tfgpipe needs {supported}. Received: no module named "
                f"{module!r}. {supported.cure}",
                name=module,
            ) from error
        installed[supported] = package.__version__
    check_versions(installed)


def check_versions(installed: dict[Range, str]) -> None:
    """Refuses versions that are too old, and warns of those that are too new.

    Args:
        installed: The version of each package, such as "2.21.0", or
            "2.22.0-dev20260102".

    Raises:
        ImportError: If one is too old.
    """
    newer = []
    for supported, version in installed.items():
        numbers = first_two(version)
        if numbers is None or numbers > supported.newest:
            newer.append(f"{supported.name} {version}")
        elif numbers < supported.oldest:
            raise ImportError(
                f"tfgpipe needs {supported}. Received: {supported.name} "
                f"{version}. {supported.cure}"
            )
    if newer:
        warnings.warn(
            "tfgpipe has been tested with "
            f"{' and '.join(map(str, installed))}. Received: "
            f"{' and '.join(newer)}. If something fails that did not before, "
            "install a version that was tested.",
            stacklevel=4,  # where tfgpipe is imported
        )


def first_two(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version, or None if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match[1]), int(match[2]))
