"""throughput."""

from absl import flags

from tools.bench_flags import BadFlags, new_flags
from tools.bench_report import Report

FLAGS = new_flags(rounds=5)


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures."""
    raise BadFlags("Not there yet.")
