"""Reads the scalars that event files for TensorBoard have."""

import tensorflow as tf


def read(folder):
    """For each name its steps and values, by step."""
    scalars, kinds = {}, {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            for value in event.summary.value:
                kind = value.metadata.plugin_data.plugin_name
                kinds.setdefault(value.tag, kind)  # told the first time
                if kinds[value.tag] == "scalars":
                    number = float(tf.make_ndarray(value.tensor))
                    scalars.setdefault(value.tag, []).append(
                        (event.step, number)
                    )
    return {tag: sorted(points) for tag, points in scalars.items()}
