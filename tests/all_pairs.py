"""Points that cover all pairs of values, instead of all combinations."""

import itertools


def all_pairs(**values):
    """Few points, in which any two values of two factors meet somewhere.

    Most faults need one factor or two: Kuhn et al., "Software Fault
    Interactions and Implications for Software Testing", 2004.
    """
    points = [
        dict(zip(values, point))
        for point in itertools.product(*values.values())
    ]
    left = set().union(*map(pairs, points))
    found = []
    while left:
        point = max(points, key=lambda point: len(pairs(point) & left))
        found.append(point)
        left -= pairs(point)
    return found


def pairs(point):
    """The pairs of values in a point."""
    return set(itertools.combinations(point.items(), 2))
