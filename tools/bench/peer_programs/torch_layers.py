"""The layers of the work in torch, for torchgpipe and torch's pipelining.

Attention is written out, without torch's fused kernel, as it is in TensorFlow.
"""

from __future__ import annotations

import time
from typing import Any

import torch  # type: ignore[import-not-found]
from torch import nn  # type: ignore[import-not-found]
from torch.nn import functional  # type: ignore[import-not-found]

from tools.bench.peer_programs import work


class Block(nn.Module):
    """A Transformer block.

    Args:
        weights: The first ones, by the names of `work.block_shapes`.
    """

    def __init__(self, weights: work.Weights) -> None:
        super().__init__()
        units, hidden = work.TRANSFORMER.units, work.TRANSFORMER.hidden_units
        self.norm1, self.norm2 = (
            nn.LayerNorm(units, work.EPSILON) for _ in range(2)
        )
        self.query, self.key, self.value, self.output = (
            nn.Linear(units, units) for _ in range(4)
        )
        self.wide, self.narrow = (
            nn.Linear(units, hidden),
            nn.Linear(hidden, units),
        )
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                # Torch has kernels as (outputs, inputs).
                value = weights[name.replace(".", "_")].T
                parameter.copy_(torch.from_numpy(value))

    def forward(self, x: Any) -> Any:
        """Attention, then two dense layers, each around a shortcut."""
        x = x + self._attention(self.norm1(x))
        hidden = functional.relu(self.wide(self.norm2(x)))
        return x + self.narrow(hidden)

    def _attention(self, x: Any) -> Any:
        num_heads = work.TRANSFORMER.heads
        head_units = work.TRANSFORMER.units // num_heads

        def heads(projected: Any) -> Any:
            # (examples, positions, units) -> (examples, heads, positions, ...)
            split = projected.unflatten(-1, (num_heads, head_units))
            return split.transpose(1, 2)

        query = heads(self.query(x)) * head_units**-0.5
        scores = query @ heads(self.key(x)).transpose(-1, -2)
        attended = torch.softmax(scores, -1) @ heads(self.value(x))
        return self.output(attended.transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """A convolution, batch normalisation, and ReLU.

    Args:
        kernel: The first one, (3, 3, inputs, outputs).
        stride: Of the convolution.
    """

    def __init__(self, kernel: Any, stride: int) -> None:
        super().__init__()
        _, _, num_inputs, num_outputs = kernel.shape
        # TensorFlow pads images of an even size behind only, if it takes every
        # second position. Torch cannot, so that is a padding of its own.
        behind = nn.ZeroPad2d((0, 1, 0, 1))
        self.pad = behind if stride == 2 else nn.Identity()
        self.convolution = nn.Conv2d(
            num_inputs,
            num_outputs,
            3,
            stride,
            padding=int(stride == 1),
            bias=False,
        )
        self.norm = nn.BatchNorm2d(
            num_outputs, work.EPSILON, momentum=1 - work.MOMENTUM
        )
        with torch.no_grad():
            value = torch.from_numpy(kernel.transpose(3, 2, 0, 1))
            self.convolution.weight.copy_(value)

    def forward(self, x: Any) -> Any:
        """Calls one after the other."""
        return functional.relu(self.norm(self.convolution(self.pad(x))))


class Wait(nn.Module):
    """Returns its inputs, after a while.

    Args:
        share: Of the seconds of a cell of work C.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._share = share

    def forward(self, x: Any) -> Any:
        """Waits."""
        return _Wait.apply(x, self.weight, self._share)


class _Wait(torch.autograd.Function):
    """Waits, and again for the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, share: float) -> Any:
        ctx.share = share
        ctx.save_for_backward(x)
        time.sleep(share * work.FORWARD_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        # What is saved is recomputed when it is read.
        (_,) = ctx.saved_tensors
        time.sleep(ctx.share * work.BACKWARD_SECONDS)
        return dy.clone(), dy.sum().reshape(1), None


def layers(name: str, start: int, stop: int, share: float = 1.0) -> Any:
    """Some consecutive layers, as a `Sequential`."""
    if name == "A":
        made = [Block(weights) for weights in work.block_weights()[start:stop]]
    elif name == "B":
        both = list(zip(work.kernels(), work.CONVOLUTIONS.strides))
        made = [Convolution(*each) for each in both[start:stop]]
    else:
        made = [Wait(share) for _ in range(start, stop)]
    return nn.Sequential(*made)


def inputs(name: str, num_micro_batches: int) -> Any:
    """The mini-batch of every step; images are (examples, 3, rows, columns)."""
    x = work.inputs(name, num_micro_batches)
    if name == "B":
        x = x.transpose(0, 3, 1, 2).copy()
    return torch.from_numpy(x)


def use_one_thread() -> None:
    """Makes of this process a device, which is one thread."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
