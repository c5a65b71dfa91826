"""The work in torch.distributed.pipelining, a process for each device.

    python3 -m venv TORCH
    TORCH/bin/pip install torch==2.13.0 numpy

Torch's smaller build without CUDA, 2.13.0+cpu, does as well. Then
`python -m tools.bench peers --torch_python=TORCH/bin/python` runs this program
there. By itself, in a checkout of tfgpipe:

    TORCH/bin/python -m tools.bench.peer_programs.torch_worker --variant=1f1b

A variant is "gpipe", "1f1b" or "interleaved", which has two cells on a device;
with ",compile=yes" the layers of each cell are compiled by `torch.compile`,
which needs a C++ compiler. A cell is recomputed as a whole, by `checkpoint`;
with ",checkpoint=selective", all but what products and convolutions made.

Processes talk by gloo. The first does as the protocol says, and starts the
others, which follow it: it sends each a question, answers it, too, and waits
for the answers of all.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

import torch  # type: ignore[import-not-found]
import torch.distributed as dist  # type: ignore[import-not-found]
from torch import nn  # type: ignore[import-not-found]
from torch.distributed import pipelining  # type: ignore[import-not-found]
from torch.utils.checkpoint import (  # type: ignore[import-not-found]
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tools.bench.memory_worker import peak_of
from tools.bench.peer_programs import protocol, torch_layers, work

_HOST = "127.0.0.1"
_PATIENCE = datetime.timedelta(hours=2)  # others have their turns meanwhile


class Cell(nn.Module):
    """Consecutive layers.

    Args:
        layers: The layers.
        remat: Whether to recompute them in the backward pass.
        is_selective: Whether to keep what products have made.
    """

    def __init__(
        self, layers: nn.Module, remat: bool, is_selective: bool
    ) -> None:
        super().__init__()
        self.layers = layers
        self._remat = remat
        self._contexts = _keeping_products if is_selective else None

    def forward(self, x: Any) -> Any:
        """Calls one after the other."""
        if self._remat:
            given = {"context_fn": self._contexts} if self._contexts else {}
            return checkpoint(self.layers, x, use_reentrant=False, **given)
        return self.layers(x)


def _keeping_products() -> Any:
    aten = torch.ops.aten
    products = [aten.mm, aten.addmm, aten.bmm, aten.convolution]
    kept = [product.default for product in products]
    return create_selective_checkpoint_contexts(kept)


def cells(order: protocol.Order, rank: int) -> list[pipelining.PipelineStage]:
    """The cells of one device, which stand `order.k` apart."""
    per_device = 2 if order.schedule == "interleaved" else 1
    cuts = work.cuts(order.work, order.k * per_device)
    made = []
    for index in range(rank, len(cuts), order.k):
        layers = torch_layers.layers(
            order.work, *cuts[index], share=1 / per_device
        )
        if order.options.get("compile") == "yes":
            layers = torch.compile(layers, dynamic=False)
        is_selective = order.options.get("checkpoint") == "selective"
        cell = Cell(layers, order.remat, is_selective).train()
        made.append(
            pipelining.PipelineStage(
                cell, index, len(cuts), torch.device("cpu")
            )
        )
    return made


def loss_of(outputs: Any, _: Any) -> Any:
    """The loss of a micro-batch; it has no labels."""
    return outputs.square().mean()


def train_step(order: protocol.Order, rank: int) -> Callable[[], float]:
    """Makes a function that does one device's part of a step.

    It returns the loss in the process that has the last cell, else 0.
    """
    stages = cells(order, rank)
    kind, stage = {
        "gpipe": (pipelining.ScheduleGPipe, stages[0]),
        "1f1b": (pipelining.Schedule1F1B, stages[0]),
        "interleaved": (pipelining.ScheduleInterleaved1F1B, stages),
    }[order.schedule]
    schedule = kind(stage, order.m, loss_fn=loss_of)
    optimizer = torch.optim.SGD(
        [p for each in stages for p in each.submod.parameters()],
        work.LEARNING_RATES[order.work],
    )
    x = torch_layers.inputs(order.work, order.m)
    given = (x,) if rank == 0 else ()
    is_last = rank == order.k - 1
    labels = torch.zeros(len(x), 1) if is_last else None  # asked for, not used

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Any] | None = [] if is_last else None
        schedule.step(*given, target=labels, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0

    return step


def meet(rank: int, size: int, port: int = 0) -> dist.TCPStore:
    """Where the processes find each other; the first one chooses the port."""
    return dist.TCPStore(
        _HOST, port, size, rank == 0, _PATIENCE, wait_for_workers=False
    )


def answers(
    order: protocol.Order, rank: int, store: dist.TCPStore
) -> dict[str, Callable[[], float]]:
    """Joins the others; returns what answers each question."""
    torch_layers.use_one_thread()
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=order.k, timeout=_PATIENCE
    )
    step = train_step(order, rank)
    return {"step": step, "mem": lambda: peak_of(step)}


def follow(connection: Connection, order: protocol.Order, *at: int) -> None:
    """Answers what the first process asks, until it closes the connection."""
    rank, port = at
    own = answers(order, rank, meet(rank, order.k, port))
    with contextlib.suppress(EOFError):
        while True:
            connection.send(own[connection.recv()]())
    dist.destroy_process_group()


def start(order: protocol.Order, port: int) -> list[tuple[Any, Connection]]:
    """Starts the other processes; returns them, and connections to them."""
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(1, order.k):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=follow, args=(theirs, order, rank, port), daemon=True
        )
        process.start()
        theirs.close()  # so that the end of the process is noticed
        started.append((process, ours))
    return started


def main() -> None:
    """Does what the command line says."""
    order = protocol.order()
    store = meet(0, order.k)
    followers = start(order, store.port)
    own = answers(order, 0, store)

    def ask(question: str) -> list[float]:
        for _, connection in followers:
            connection.send(question)
        return [own[question](), *(each.recv() for _, each in followers)]

    protocol.serve(
        lambda: ask("step")[-1],
        lambda: ask("mem"),
        version=f"torch {torch.__version__}, processes: {order.k}",
    )
    for process, connection in followers:
        connection.close()
        process.join(30)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
