"""The work in torchgpipe, on devices that all are the CPU.

    python3 -m venv TORCH
    TORCH/bin/pip install torch==2.13.0 numpy torchgpipe==0.0.7

Torch's smaller build without CUDA, 2.13.0+cpu, does as well. Then
`python -m tools.bench peers --torch_python=TORCH/bin/python` runs this program
there. By itself, in a checkout of tfgpipe:

    TORCH/bin/python -m tools.bench.peer_programs.torchgpipe_worker --work=A

Cells cannot overlap: torchgpipe has one thread for all CPU devices, and torch
has one for the backward pass.

Reference: [Kim et al., 2020](https://arxiv.org/abs/2004.09910)
"""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # type: ignore[import-not-found]
import torchgpipe  # type: ignore[import-not-found]

from tools.bench.peer_programs import protocol, torch_layers, work


def train_step(order: protocol.Order) -> Callable[[], float]:
    """Makes a function that does a step and returns its loss."""
    cuts = work.cuts(order.work, order.k)
    model = torchgpipe.GPipe(
        torch_layers.layers(order.work, 0, cuts[-1][1]),
        balance=[stop - start for start, stop in cuts],
        devices=["cpu"] * order.k,
        chunks=order.m,
        checkpoint="always" if order.remat else "never",
    )
    model.train()
    optimizer = torch.optim.SGD(
        model.parameters(), work.LEARNING_RATES[order.work]
    )
    x = torch_layers.inputs(order.work, order.m)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    """Does what the command line says."""
    torch_layers.use_one_thread()
    protocol.serve(
        train_step(protocol.order()),
        version=f"torchgpipe {torchgpipe.__version__}, "
        f"torch {torch.__version__}",
    )


if __name__ == "__main__":
    main()
