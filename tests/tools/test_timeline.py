"""The timeline command: what it draws, prints and refuses."""

import pytest
from simulated import seconds

from tfgpipe import timeline as library
from tfgpipe.schedules import SCHEDULES
from tfgpipe.timeline import Event, simulated
from tools import timeline
from tools.bench import efficiency


@pytest.fixture
def measured(monkeypatch):
    """Steps take half as long again as they should."""
    calls = []

    def measure(model, x, y):
        calls.append((model.num_partitions, x.shape))
        program = SCHEDULES["1f1b"](2, model.num_micro_batches).program()
        made = simulated(program, lambda op: seconds(op) / 100)
        return [Event(t, d, 1.5 * a, 0.5 * a + b) for t, d, a, b in made]

    monkeypatch.setattr(library, "measure", measure)
    monkeypatch.setattr(efficiency, "make_devices", lambda *_: None)
    return calls


def test_step_is_beside_the_ideal_one(measured, tmp_path, capsys):
    path = tmp_path / "one.png"
    words = "--k=2 --m=4 --schedule=1f1b --remat=never --forward_ms=10"
    assert timeline.main(["timeline", *words.split(), f"--output={path}"]) == 0
    out = capsys.readouterr().out
    assert "1f1b: K = 2, M = 4, remat never" in out
    # The last task starts 1.5 times too late: 1.5 * 130 + 20 ms.
    assert "44.2% measured, 20.0% ideal; the tasks take 215 ms, 1.433" in out
    assert "\ndevice 1 " in out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert measured == [(2, (4, 1))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--forward_ms=0", "--forward_ms=0"),
        ("--output=step.json", "must end with .png or .svg"),
        ("--output=/dev/null/a.png", "in a folder that there is"),
    ],
)
def test_bad_flags_are_refused(words, message, measured, capsys):
    assert timeline.main(["timeline", words]) == 2
    assert message in capsys.readouterr().err
    assert not measured
