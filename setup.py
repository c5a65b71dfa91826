"""Package metadata of tfgpipe."""

import os
import pathlib
import re

import setuptools

# No requirement of the library by itself: TensorFlow comes in several packages,
# `tensorflow`, `tensorflow-cpu`, `tensorflow-tpu` and builds of vendors, which
# write to the same folder, and none is taken for another by pip. If one were
# required, the others could be used with `--no-deps` alone. So the user names
# one, by an extra or by hand, as for Keras and TensorFlow Probability, and
# tfgpipe/versions.py says so where there is none.
#
# No upper bounds: what is newer than was tested is warned of on import, and pip
# can go on to resolve. The lower ones are those of tfgpipe/versions.py.
TENSORFLOW = {
    "tensorflow": ["tensorflow>=2.18"],
    "cpu": ["tensorflow-cpu>=2.18"],
    "gpu": ["tensorflow[and-cuda]>=2.18"],
    "tpu": ["tensorflow-tpu>=2.18"],
}
# Pinned: another version formats, checks or warns differently, and measures
# and trains differently, too. See `make test-versions` for others.
TEST_TOOLS = [
    # The newest Keras for Python 3.10 is 3.12.
    "keras==3.15.*; python_version >= '3.11'",
    "tensorflow==2.21.*",
    # Counts FLOPs as XLA does, to compare with.
    "jax==0.10.2; python_version >= '3.11'",
    # Its models are trained beside plain Keras. For Python 3.10, the newest.
    "keras-hub==0.32.0; python_version >= '3.11'",
    "keras-hub==0.25.1; python_version < '3.11'",
    "mypy==2.4.1",
    "pydot==4.0.1",  # for the test of `keras.utils.model_to_dot`
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",  # a worker a core: tracing takes most of the time
    "ruff==0.17.5",
    "safetensors==0.8.*",  # presets that KerasHub converts
    "tensorboard==2.21.0",  # for the test of its callback
]
# What only the programs under tools/ need, beyond the library's own.
TOOLS = [
    "matplotlib>=3.8",  # draws timelines
]
# What experiments on texts need.
TEXT = [
    "sacrebleu>=2.4",  # scores translations
    "sentencepiece>=0.2",  # cuts words into pieces
]
# What two of the examples need.
EXAMPLES = ["keras-hub>=0.32"]
# What `make docs` and the test of the notebooks need. MkDocs ends with warnings
# that other versions lack.
DOCS = [
    "ipykernel>=6.29",  # runs notebooks
    "mdx-truly-sane-lists==1.3",
    "mike==2.2.0",  # publishes a site for each version
    "mkdocs==1.6.1",
    "mkdocs-material==9.8.1",
    "mkdocstrings[python]==1.0.8",
    "nbclient>=0.10",  # runs notebooks
    "ruff==0.17.5",  # formats signatures
]

# What `make release` needs, beside the tests.
RELEASE = [
    "build==1.6.1",
    "check-jsonschema==0.39.0",  # knows the files of forges
    "setuptools==80.9.0",
    "twine==7.0.0",
    "wheel==0.45.1",
]
# Where the project is published, such as https://forge.example/name/tfgpipe.
# Without it, links of the README stay those of a checkout.
URL = os.environ.get("TFGPIPE_URL", "").rstrip("/")

ROOT = pathlib.Path(__file__).parent
README = ROOT / "README.md"
(VERSION,) = re.findall(
    r'^VERSION = "(.*)"$',
    (ROOT / "tfgpipe" / "versions.py").read_text("utf-8"),
    re.MULTILINE,
)


def described() -> str:
    """The README, with links that lead there from a package index, too."""
    if not README.exists():
        return ""
    text = README.read_text("utf-8")
    if not URL:
        return text

    def absolute(match: re.Match[str]) -> str:
        mark, name, path = match.groups()
        kind = "raw" if mark else "blob"
        return f"{mark}[{name}]({URL}/{kind}/v{VERSION}/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)", absolute, text)


setuptools.setup(
    name="tfgpipe",
    version=VERSION,
    description="GPipe pipeline parallelism for TensorFlow and Keras 3",
    long_description=described(),
    long_description_content_type="text/markdown",
    author="The tfgpipe authors",
    url=URL or None,
    project_urls={
        "Documentation": f"{URL}/blob/v{VERSION}/docs/guide.md",
        "Changes": f"{URL}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    }
    if URL
    else {},
    keywords=[
        "GPipe",
        "Keras",
        "TensorFlow",
        "gradient accumulation",
        "micro-batches",
        "model parallelism",
        "pipeline parallelism",
        "re-materialisation",
    ],
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    # The library alone: the programs beside it run in the checkout, and have
    # names that other people's packages have, too.
    # With the folder named, an editable install puts the checkout at the end of
    # the path. Else it leaves a hook that comes after the path, and beside a
    # checkout named tfgpipe, `import tfgpipe` takes that folder for a package,
    # one without a `GPipe`.
    package_dir={"": "."},
    packages=setuptools.find_packages(include=["tfgpipe", "tfgpipe.*"]),
    package_data={"tfgpipe": ["py.typed"]},
    entry_points={"console_scripts": ["tfgpipe = tfgpipe.__main__:main"]},
    python_requires=">=3.10",
    install_requires=[
        "keras>=3.10",
        "h5py",
        "numpy>=1.26",
        "absl-py>=2.1",
    ],
    extras_require={
        **TENSORFLOW,
        "docs": DOCS,
        "examples": EXAMPLES,
        "release": RELEASE,
        "text": TEXT,
        "tools": TOOLS,
        "test": TEST_TOOLS + RELEASE + TOOLS + TEXT,
    },
)
