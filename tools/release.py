r"""Builds a release into dist/, and checks it. Nothing is uploaded.

    make release URL=https://forge.example/name/tfgpipe

Links of the README and of the package's metadata lead to that address.
"""

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from absl import flags

from tfgpipe.commands import command_line
from tools.flags import define

ROOT = pathlib.Path(__file__).parent.parent
# What wheels take for the time of all their files: 2026-01-01.
EPOCH = "1767225600"
SMOKE = """
import keras, numpy as np, tfgpipe
layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
model = tfgpipe.GPipe(layers, num_partitions=1, num_micro_batches=2)
model.compile("sgd", "mse")
model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
print(tfgpipe.__version__)
"""
FLAGS = command_line.new_flags()
define(
    FLAGS,
    url=("", "Where the project is published."),
    output=("dist", "Folder of the release, made anew."),
)
FORGE = {
    "vendor.github-workflows": "workflows/*.yml",
    "vendor.github-issue-forms": "ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-issue-config": "ISSUE_TEMPLATE/config.yml",
}


def main(argv: list[str]) -> int:
    """Runs the command line; see `command_line.run`."""
    return command_line.run("tools.release", FLAGS, __doc__, _print, argv)


def _print(values: flags.FlagValues) -> None:
    for path in release(values.url, pathlib.Path(values.output)):
        print(f"{_digest(path)}  {path}")
    version = version_of(ROOT)
    print(f"\nTo publish: git tag v{version} && git push origin v{version}")
    print(f"            twine upload {values.output}/*")


def release(url: str, output: pathlib.Path) -> list[pathlib.Path]:
    """Builds and checks an sdist and a wheel."""
    if not re.fullmatch(r"https://[^/\s]+/\S*[^/\s]", url):
        raise ValueError(
            "`url` must be the address at which the project is published, "
            f"https://... without a slash at its end. Received: {url!r}. Pass "
            "it as in `make release URL=https://forge.example/name/tfgpipe`."
        )
    version = version_of(ROOT)
    check_forge_files()
    shutil.rmtree(output, ignore_errors=True)
    environment = {
        "TFGPIPE_URL": url,
        "SOURCE_DATE_EPOCH": EPOCH,
        "PYTHONHASHSEED": "0",
    }
    build = "-m", "build", "--no-isolation", "--outdir"
    _run(*build, output, ROOT, **environment)  # the wheel is of the sdist
    (sdist,), (wheel,) = output.glob("*.tar.gz"), output.glob("*.whl")
    with tempfile.TemporaryDirectory() as folder:
        again = pathlib.Path(folder)
        _run(*build, again, "--wheel", ROOT, **environment)
        if _digest(again / wheel.name) != _digest(wheel):
            raise ValueError(
                f"{wheel.name} must have the same bytes each time. Received: "
                "others from a second build."
            )
        _run("-m", "twine", "check", "--strict", sdist, wheel)
        for path in (sdist, wheel):
            check_trains(path, version, again / path.name.replace(".", "_"))
    return [sdist, wheel]


def version_of(root: pathlib.Path) -> str:
    """The version, which all files must name."""
    patterns = {
        "tfgpipe/versions.py": r'^VERSION = "(.*)"$',
        "CITATION.cff": r"^version: (.*)$",
        "CHANGELOG.md": r"^## (\d\S*)",
    }
    found = {}
    for name, pattern in patterns.items():
        text = (root / name).read_text("utf-8")
        match = re.search(pattern, text, re.MULTILINE)
        found[name] = match[1] if match else ""
    if len({*found.values()}) != 1:
        raise ValueError(
            f"All files must name the same version first. Received: {found}."
        )
    return found["CITATION.cff"]


def check_forge_files() -> None:
    """Checks workflows, issue forms and the citation by their schemas."""
    given = {
        schema: [*(ROOT / ".github").glob(pattern)]
        for schema, pattern in FORGE.items()
    }
    given["vendor.citation-file-format"] = [ROOT / "CITATION.cff"]
    for schema, paths in given.items():
        check = "-m", "check_jsonschema", "--builtin-schema", schema
        _run(*check, *paths)


def check_trains(
    path: pathlib.Path, version: str, folder: pathlib.Path
) -> None:
    """Installs a file of the release into a folder, and trains there."""
    pip = "-m", "pip", "install", "--quiet", "--disable-pip-version-check"
    options = "--no-deps", "--no-build-isolation", f"--target={folder}"
    _run(*pip, *options, path)
    printed = _run("-c", SMOKE, cwd=folder, PYTHONPATH=str(folder))
    if printed.split()[-1:] != [version]:
        raise ValueError(
            f"{path.name} must install version {version}. Received: {printed}."
        )


def _run(
    *command: str | pathlib.Path,
    cwd: pathlib.Path = ROOT,
    **environment: str,
) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        said = result.stdout + result.stderr
        raise ValueError(f"{' '.join(map(str, command))} failed:\n{said}")
    return result.stdout


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
