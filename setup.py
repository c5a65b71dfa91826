"""Package metadata of tfgpipe."""

import pathlib
import re

import setuptools

# Pinned: another version formats, checks or warns differently.
TEST_TOOLS = [
    # Counts FLOPs as XLA does, to compare with.
    "jax==0.10.2; python_version >= '3.11'",
    "mypy==2.4.1",
    "pytest==9.2.0",
    "pytest-xdist==3.8.0",  # a worker a core: tracing takes most of the time
    "ruff==0.17.5",
    "tensorboard==2.21.0",  # for the test of its callback
]
# What only the programs under tools/ need, beyond the library's own.
TOOLS = [
    "matplotlib>=3.8",  # draws timelines
    "tqdm>=4.67",  # progress bars of the benchmarks
]
# What experiments on texts need.
TEXT = [
    "sacrebleu>=2.4",  # scores translations
    "sentencepiece>=0.2",  # cuts words into pieces
]
# What two of the examples need.
EXAMPLES = ["keras-hub>=0.32"]
# What `make docs` needs. MkDocs ends with warnings that other versions lack.
DOCS = [
    "mdx-truly-sane-lists==1.3",
    "mkdocs==1.6.1",
    "mkdocs-material==9.8.1",
    "mkdocstrings[python]==1.0.8",
    "ruff==0.17.5",  # formats signatures
]

ROOT = pathlib.Path(__file__).parent
README = ROOT / "README.md"
(VERSION,) = re.findall(
    r'^__version__ = "(.*)"$',
    (ROOT / "tfgpipe" / "__init__.py").read_text("utf-8"),
    re.MULTILINE,
)

setuptools.setup(
    name="tfgpipe",
    version=VERSION,
    description="GPipe pipeline parallelism for TensorFlow and Keras 3",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    # The library alone: the programs beside it run in the checkout, and have
    # names that other people's packages have, too.
    packages=setuptools.find_packages(include=["tfgpipe", "tfgpipe.*"]),
    package_data={"tfgpipe": ["py.typed"]},
    python_requires=">=3.10,<3.14",
    # Both are held to one minor version: the library uses private names of
    # both, all in tfgpipe/internals/, each with a test.
    install_requires=[
        "tensorflow>=2.21,<2.22",
        "keras>=3.15,<3.16",
        "h5py",
        "numpy>=1.26",
        "absl-py>=2.1",
    ],
    extras_require={
        "docs": DOCS,
        "examples": EXAMPLES,
        "text": TEXT,
        "tools": TOOLS,
        "test": TEST_TOOLS + TOOLS + TEXT,
    },
)
