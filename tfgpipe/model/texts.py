"""A `GPipe` of a task of KerasHub takes what the task takes: texts.

A task prepares data by its preprocessor, in methods of its own, which then call
those of Keras. Here these are the pipeline's:

    pipeline.fit(texts) -> task.fit(texts) -> keras.Model.fit(pipeline, tokens)

So is `compile`, in which a task chooses what is not given, and a sampler.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import keras

from tfgpipe import internals
from tfgpipe.checks import checked_counts, checked_path
from tfgpipe.model.hooks import Hooks
from tfgpipe.sequence import is_task, prepares_data


def _by_task(name: str, does: Callable[[Any], bool]) -> Callable:
    """A method of Keras, which the model that has the layers is asked first.

    If it is a task that `does` something to what the method is given.
    """
    plain = internals.Replaceable(keras.Model, name)

    @functools.wraps(plain.original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = self._source.model
        if not does(task):
            return plain.original(self, *args, **kwargs)

        def of_pipeline(model: Any, *args: Any, **kwargs: Any) -> Any:
            model = self if model is task else model
            return plain.original(model, *args, **kwargs)

        with plain.by(of_pipeline):
            return getattr(task, name)(*args, **kwargs)

    return method


def _compiled(name: str) -> Callable:
    """A method of Keras that prepares data, and needs a compiled model."""
    prepared = _by_task(name, prepares_data)

    @functools.wraps(prepared)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.compile_as_task()
        return prepared(self, *args, **kwargs)

    return method


_compile = _by_task("compile", is_task)


class Texts(Hooks):
    """The part of `GPipe` that a user hands data to."""

    fit = _compiled("fit")
    evaluate = _compiled("evaluate")
    predict = _by_task("predict", prepares_data)
    train_on_batch = _compiled("train_on_batch")
    test_on_batch = _compiled("test_on_batch")
    predict_on_batch = _by_task("predict_on_batch", prepares_data)

    @functools.wraps(_compile)
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `keras.Model.compile`, or that of a task of KerasHub."""
        _compile(self, *args, **kwargs)
        self._notes.compiled_as = None

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles as a file says, in which a task has chosen all."""
        with contextlib.ExitStack() as stack:
            if type(self).compile is Texts.compile:  # Keras looks for its own
                own = internals.replaced(Texts, "compile", keras.Model.compile)
                stack.enter_context(own)
            super().compile_from_config(config)

    def save_to_preset(
        self,
        preset_dir: str | os.PathLike[str],
        max_shard_size: float | None = 10,
    ) -> None:
        """Writes a preset, as the task of KerasHub that it was made of.

        `tfgpipe.load_preset` loads it, and `from_preset` without tfgpipe. The
        weights are written one after the other.

        Args:
            preset_dir: The folder.
            max_shard_size: Size in GB from which on a backbone is written to
                several files, each of at most this size. None for one file.

        Raises:
            ValueError: If the `GPipe` was not made of a task or a backbone.
        """
        checked_path("preset_dir", preset_dir)
        self._check_storage()
        model = self._source.model
        if not hasattr(model, "save_to_preset"):
            raise ValueError(
                "`save_to_preset` needs a `GPipe` of a task or a backbone of "
                f"KerasHub. Received: '{self.name}', which was made of "
                f"{'layers' if model is None else f'{model.name!r}'}. Write a "
                "file by `pipeline.save('model.keras')` instead."
            )
        folder = os.fspath(preset_dir)
        model.save_to_preset(folder, max_shard_size=max_shard_size)

    def generate(
        self,
        inputs: Any,
        max_length: int | None = None,
        stop_token_ids: Any = "auto",
        num_groups: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Generates as the task of KerasHub that the `GPipe` was made of.

        Prompts go through the devices in groups, whose tokens do not depend on
        each other. The same tokens come out as of the task by itself, up to
        the one that stops a prompt. The caches of layers stay on the devices
        of the layers.

        Args:
            inputs: Prompts, as the task takes them: texts, if it has a
                preprocessor.
            max_length: Tokens of a prompt and what follows it, at most.
            stop_token_ids: Tokens at which to stop; None for none. Defaults to
                the end of a text.
            num_groups: In how many groups prompts go through, each of at least
                one prompt. Defaults to M, `num_micro_batches`, and to no more
                than there are devices: for each token of a group, a device
                reads its weights, which takes as long for few prompts as for
                many.
            **kwargs: Other arguments of the task's `generate`, such as
                `strip_prompt`.

        Returns:
            What the task's `generate` returns.

        Raises:
            ValueError: If the `GPipe` was not made of a task that generates.
        """
        self._check_storage()
        generation = self._notes.generation
        if generation is None:
            what = getattr(self._source.model, "name", None) or self.name
            raise ValueError(
                "`generate` needs a `GPipe` of a task of KerasHub, such as "
                "`keras_hub.models.CausalLM`: of a model with `generate`, and "
                "with a `generate_step` that calls its layers on a cache, as "
                "by `call_with_cache`, and its `sampler`. Received: "
                f"'{what}', which has none. Make `tfgpipe.GPipe(task, ...)` of "
                "the task itself, not of its backbone or its layers."
            )
        if num_groups is not None:
            (num_groups,) = checked_counts(num_groups=num_groups)
        with generation.in_groups(num_groups):
            return self._source.model.generate(
                inputs,
                max_length=max_length,
                stop_token_ids=stop_token_ids,
                **kwargs,
            )
