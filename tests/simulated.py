"""Steps whose tasks take whole seconds."""

from tfgpipe.schedules import SCHEDULES, CellFacts, Task
from tfgpipe.timeline import Event, simulated


def seconds(task):
    """Whole seconds, all different from a microsecond or a slot."""
    return 2.0 if task.kind == "backward" else 1.0


def events(name="gpipe", k=2, m=3, chunks=1, updates=False, remat=True):
    program = SCHEDULES[name](k, m, chunks).program(
        "except_last" if remat else "never", [CellFacts()] * k * chunks
    )
    made = simulated(program, seconds)
    ends = [max(e.end for e in made if e.device == d) for d in range(k)]
    for device, end in enumerate(ends if updates else []):
        made.append(Event(Task("update", device, -1), device, end, end + 1))
    return made
