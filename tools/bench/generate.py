"""Tokens a second of `generate`, with groups of prompts.

Cells of one layer wait, for each token of a group as long, however many prompts
it has, as an accelerator that reads its weights does. Every group has as many
prompts; `ratio` is that of the tokens a second to those of one group, `bound`
what it would be if nothing but the waiting took time, and `ms each` what a
token of one group takes in a cell besides.
"""

import time
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
from absl import flags
from keras import ops

import tfgpipe
from tfgpipe.devices import local
from tools import devices
from tools.bench.waiting_layers import sleep
from tools.flags import define, new_flags
from tools.report import Report, Table, columns, median_of, progress

FLAGS = new_flags(rounds=3)
define(
    FLAGS,
    k=(4, "Cells."),
    groups=([1, 2, 4], "Groups of prompts."),
    rows=(4, "Prompts of a group."),
    tokens=(64, "Tokens to make.", 2),
    cell_ms=([20.0], "Milliseconds of a token in a cell."),
)

TIMED_COLUMNS = columns(
    "k: K | cell_ms: cell ms: .0f | groups | tokens_per_s: tokens/s: .1f | "
    "ratio: ratio: .2f | bound: bound: .2f | ms_each: ms each: .2f"
)
_PROMPT = 4


def run(values: flags.FlagValues, report: Report) -> None:
    """Measures what the flags ask for."""
    local.split_cpu(values.k)
    table = report.add(
        Table("timed", "Cells that wait, by groups of prompts", TIMED_COLUMNS)
    )
    k, turns = values.k, values.tokens
    for ms in progress(list(dict.fromkeys(values.cell_ms)), "timed"):
        task = WaitingTask(k, ms / 1000)
        pipeline = tfgpipe.GPipe(
            task,
            k,
            devices=devices.cpu_names(k),
            layers_per_cell=_one_block_each(k),
        )
        rates = []
        for groups in dict.fromkeys(values.groups):
            x = _prompts(groups * values.rows, turns)
            seconds = median_of(
                _generating(pipeline, x, num_groups=groups), values.rounds
            )
            made = groups * values.rows * turns
            rates.append(made / seconds)
            fill = k + (turns - 1) * max(k, groups) + groups - 1
            table.rows.append(
                {
                    "k": k,
                    "cell_ms": ms,
                    "groups": groups,
                    "tokens_per_s": rates[-1],
                    "ratio": rates[-1] / rates[0],
                    "bound": groups * turns * k / fill,
                    "ms_each": 1000 * seconds / turns / max(k, groups) - ms,
                }
            )


def _one_block_each(k: int) -> list[int]:
    """The embedding is in the first cell, and logits in the last."""
    counts = [1] * k
    counts[0] += 1
    counts[-1] += 1
    return counts


def _prompts(rows: int, turns: int) -> dict[str, np.ndarray]:
    mask = np.arange(_PROMPT + turns) < np.full((rows, 1), _PROMPT)
    return {
        "token_ids": mask.astype("int32"),
        "padding_mask": mask.astype("int32"),
    }


def _generating(model: Any, x: Any, **kwargs: Any) -> Callable[[], float]:
    def step() -> float:
        start = time.perf_counter()
        model.generate(x, stop_token_ids=None, **kwargs)
        return time.perf_counter() - start

    return step


class WaitingBlock(keras.layers.Layer):
    """Waits where it is given a cache, as a layer of a language model is.

    Args:
        seconds: How long.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def build(self, input_shape: Any) -> None:
        """Creates a weight."""
        self._scale = self.add_weight((), "ones")

    def call(self, x: Any, cache: Any = None) -> Any:
        """Returns the inputs; and the cache, if there is one."""
        x = x * self._scale
        if cache is None:
            return x
        x = sleep(self._seconds, x)
        return x, cache + ops.mean(x)


class WaitingTask(keras_hub.models.CausalLM):
    """Generates tokens of no meaning, after a wait in each block.

    Args:
        num_blocks: Its blocks.
        seconds: Of a block.
    """

    def __init__(self, num_blocks: int, seconds: float) -> None:
        names = ("token_ids", "padding_mask")
        inputs = {n: keras.Input((None,), dtype="int32", name=n) for n in names}
        embedding = keras.layers.Embedding(50, 8)
        blocks = [WaitingBlock(seconds) for _ in range(num_blocks)]
        logits = keras.layers.Dense(50)
        x = embedding(inputs["token_ids"])
        for block in blocks:
            x = block(x)
        super().__init__(inputs=inputs, outputs=logits(x))
        self._parts = embedding, blocks, logits
        self.compile(sampler="greedy")

    def call_with_cache(self, token_ids: Any, cache: Any, index: Any) -> Any:
        """Logits, hidden states and the cache, as of tasks of KerasHub."""
        embedding, blocks, logits = self._parts
        x, caches = embedding(token_ids), []
        for i, block in enumerate(blocks):
            x, own = block(x, cache=cache[:, i, ...])
            caches.append(own)
        return logits(x), x, ops.stack(caches, axis=1)

    def generate_step(self, inputs: Any, stop_token_ids: Any = None) -> Any:
        """Tokens for one batch of prompts."""
        ids, mask = inputs["token_ids"], inputs["padding_mask"]
        shape = [ids.shape[0], len(self._parts[1]), 2, ids.shape[1], 1, 4]
        _, hidden, cache = self.call_with_cache(ids, ops.zeros(shape), 0)

        def step(prompt: Any, cache: Any, index: Any) -> Any:
            token = ops.slice(prompt, [0, index - 1], [prompt.shape[0], 1])
            logits, hidden, cache = self.call_with_cache(token, cache, index)
            return ops.squeeze(logits, 1), ops.squeeze(hidden, 1), cache

        ids = self.sampler(
            next=step,
            prompt=ids,
            cache=cache,
            index=ops.min(ops.sum(mask, -1)),
            mask=mask,
            stop_token_ids=stop_token_ids,
            hidden_states=hidden,
            model=self,
        )
        return {"token_ids": ids, "padding_mask": mask}
