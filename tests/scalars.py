"""Reads what TensorBoard is given."""

import tensorflow as tf


def read_log(folder):
    """All scalars of a folder: for each name its steps and values.

    What a step that was done again says replaces what it said before.
    """
    found, kinds = {}, {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        # A killed process may have left a file without an end.
        records = tf.data.TFRecordDataset(str(path)).ignore_errors()
        for record in records.as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                kind = value.metadata.plugin_data.plugin_name
                # told the first time
                if kinds.setdefault(value.tag, kind) == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                    found.setdefault(value.tag, {})[event.step] = number
    return {name: sorted(points.items()) for name, points in found.items()}
