"""A `GPipe` of a task of KerasHub takes what the task takes: texts.

A task prepares data by its preprocessor, in methods of its own, which then call
those of Keras. Here these are the pipeline's:

    pipeline.fit(texts) -> task.fit(texts) -> keras.Model.fit(pipeline, tokens)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfgpipe import internals
from tfgpipe.checks import checked_counts
from tfgpipe.model.hooks import Hooks
from tfgpipe.sequence import prepares_data


def _prepared(name: str) -> Callable:
    """A method of Keras, which the model that has the layers is asked first."""
    plain = internals.Replaceable(keras.Model, name)

    @functools.wraps(plain.original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        task = self._source.model
        if not prepares_data(task):
            return plain.original(self, *args, **kwargs)

        def of_pipeline(model: Any, *args: Any, **kwargs: Any) -> Any:
            model = self if model is task else model
            return plain.original(model, *args, **kwargs)

        with plain.by(of_pipeline):
            return getattr(task, name)(*args, **kwargs)

    return method


class Texts(Hooks):
    """The part of `GPipe` that a user hands data to."""

    fit = _prepared("fit")
    evaluate = _prepared("evaluate")
    predict = _prepared("predict")
    train_on_batch = _prepared("train_on_batch")
    test_on_batch = _prepared("test_on_batch")
    predict_on_batch = _prepared("predict_on_batch")

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
