"""The command that writes text."""

import pytest
import runs

from models import sampling
from tools import generate
from tools.generate import text_of
from tools.train import trained_run


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path_factory):
    runs.use(monkeypatch, tmp_path_factory)


@pytest.fixture
def folder(tmp_path_factory):
    return runs.saved(runs.LM, tmp_path_factory)


def run(*words):
    return generate.main(["generate", *words])


def written(capsys, *words):
    assert run(*words) == 0
    return capsys.readouterr().out


def test_text_is_what_the_model_draws(folder, capsys):
    flags = ["--prompt=kalo mi", "--num_tokens=6", "--top_k=9", "--seed=3"]
    out = written(capsys, f"--train_dir={folder}", "--temperature=0.7", *flags)
    loaded = trained_run.load(str(folder))
    ids = sampling.generate(
        loaded.model.layers,
        loaded.source.encode_prompt("kalo mi"),
        6,
        temperature=0.7,
        top_k=9,
        seed=3,
    )
    assert out == text_of(loaded.source, ids[0]) + "\n"
    assert out.startswith("kalo mi")


def test_text_is_the_same_of_a_model_in_several_cells(folder, capsys):
    flags = [f"--train_dir={folder}", "--num_tokens=6"]
    expected = written(capsys, *flags)
    assert written(capsys, *flags, "--num_partitions=3") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_tokens=99"], "ask for fewer tokens"),
        (["--temperature=-1"], "temperature"),
        (["--train_dir="], "tools.train --params=NAME"),
    ],
)
def test_bad_flags_are_refused(folder, words, message, capsys):
    assert run(f"--train_dir={folder}", *words) == 2
    assert message.lower() in capsys.readouterr().err.lower()
