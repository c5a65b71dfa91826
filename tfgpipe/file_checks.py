"""What a file says of a model that does not hold where it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tfgpipe import notices
from tfgpipe.devices import placement


def check_devices(names: Sequence[str] | None, is_given: bool) -> None:
    """Refuses devices of a file that are not here.

    Args:
        names: The devices of the model, or None for the first ones.
        is_given: Whether the user gave them, and not the file.

    Raises:
        ValueError: If TensorFlow does not list one of them.
    """
    if names is None or is_given:
        return
    missing = [n for n in names if placement.resolve_device(n) is None]
    if missing:
        raise ValueError(
            "The devices that the file names must be devices that TensorFlow "
            f"lists: {placement.all_devices()}. Received: the file's devices="
            f"{[*names]}, of which {missing} are not. Name others by "
            "`tfgpipe.load_model(path, devices=[...])`, or pass "
            "num_partitions=1 to load the model onto one device."
        )


def check_adapters(saved: int, loaded: int) -> None:
    """Warns of adapters (LoRA) that became part of the weights.

    Args:
        saved: How many layers had them when the model was saved.
        loaded: How many have them now.
    """
    if loaded >= saved:
        return
    notices.warn(
        f"The model was saved with adapters (LoRA) in {saved} layers, and has "
        f"them in {loaded} now: a layer that holds other layers is made "
        "without what `enable_lora` added to those. As in plain Keras, the "
        "file has the adapters added to the weights: outputs are the same, but "
        "the whole weights are trained now. Call `enable_lora` again, set "
        "`trainable = False` where nothing is to be trained, and `compile`."
    )
