"""Tags of cases that are known to fail: a mend takes its own out."""

OPEN: dict[str, str] = {}
