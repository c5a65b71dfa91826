"""Overrides of every field: what was meant, or an error that helps."""

import dataclasses

import pytest

import params

TEXTS = [
    *("", " ", "wrong", "-1", "0", "1.5", "nan", "inf", "-inf", "True", "None"),
    *(
        "[]",
        "[1",
        "{}",
        "1e400",
        "9" * 30,
        "a.b",
        "'x'",
        "1,2",
        "é",
        "=",
        "0x10",
    ),
]
EXPERIMENTS = ["image.amoebanet_d_demo", "lm.austen", "mt.bilingual_so"]


def paths(value, before=""):
    """Names of all fields, those of fields as "model.num_layers"."""
    for field in dataclasses.fields(value):
        path, own = f"{before}{field.name}", getattr(value, field.name)
        if dataclasses.is_dataclass(own):
            yield from paths(own, f"{path}.")
        else:
            yield path


def at(value, path):
    for name in path.split("."):
        value = getattr(value, name)
    return value


def meant(text):
    """What a text can stand for."""
    found = [text.strip(), tuple(text.strip().split(","))]
    for kind in (int, float):
        try:
            found.append(kind(text))
            found.append((kind(text),))
        except ValueError:
            pass
    known = {"true": True, "none": None, "1,2": (1, 2)}
    if text.lower() in known:
        found.append(known[text.lower()])
    return found


def overridden(experiment, assignment):
    """A changed experiment, or what the error says."""
    try:
        return params.override(experiment, [assignment]), None
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_override_is_what_was_meant_or_an_error_that_helps(name):
    experiment = params.get(name)
    for path in paths(experiment):
        for text in TEXTS:
            changed, said = overridden(experiment, f"{path}={text}")
            if said is None:
                assert at(changed, path) in meant(text), (path, text)
            else:
                assert path.split(".")[-1] in said and "Received" in said


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("schedule=gpip", "Did you mean 'gpipe'"),
        ("remat=allways", "Did you mean 'always'"),
        ("seed=-1", "`seed` must not be negative"),
        ("optimizer.learning_rate=inf", "`learning_rate` must be positive and"),
        ("optimizer.clip_norm=inf", "`clip_norm` must be finite"),
        ("layers_per_cell=0,5", "`layers_per_cell` must be positive"),
    ],
)
def test_value_that_no_run_could_have_is_refused(assignment, message):
    with pytest.raises(ValueError, match=message):
        params.override(params.get(EXPERIMENTS[0]), [assignment])
