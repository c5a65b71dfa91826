"""The work in torch.distributed.pipelining, a process for each device.

    python3 -m venv TORCH
    TORCH/bin/pip install torch==2.13.0 numpy

Torch's smaller build without CUDA, 2.13.0+cpu, does as well. Then
`python -m tools.bench peers --torch_python=TORCH/bin/python` runs this program
there.

A schedule is "gpipe", "1f1b" or "interleaved", which has two cells on a device;
if the order is compiled, the layers of each cell are, by `torch.compile`, which
needs a C++ compiler. A cell is recomputed as a whole, by `checkpoint`.
Attention is written out, without torch's fused kernel, as in TensorFlow.

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
from torch.nn import functional  # type: ignore[import-not-found]
from torch.utils.checkpoint import checkpoint  # type: ignore[import-not-found]

from tools.bench.memory_worker import peak_of
from tools.bench.peer_programs import work

_HOST = "127.0.0.1"
_PATIENCE = datetime.timedelta(hours=2)  # others have their turns meanwhile


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


class Cell(nn.Module):
    """Consecutive layers, which the backward pass recomputes."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        """Calls one after the other."""
        return checkpoint(self.layers, x, use_reentrant=False)


def cells(order: work.Order, rank: int) -> list[pipelining.PipelineStage]:
    """Returns the cells of one device, which stand `order.k` apart."""
    cuts, weights = order.cuts(), work.block_weights()
    stages = []
    for index in range(rank, len(cuts), order.k):
        start, stop = cuts[index]
        layers: Any = nn.Sequential(*map(Block, weights[start:stop]))
        if order.is_compiled:
            layers = torch.compile(layers, dynamic=False)
        stages.append(
            pipelining.PipelineStage(
                Cell(layers).train(), index, len(cuts), torch.device("cpu")
            )
        )
    return stages


def loss_of(outputs: Any, _: Any) -> Any:
    """The loss of a micro-batch; it has no labels."""
    return outputs.square().mean()


def train_step(order: work.Order, rank: int) -> Callable[[], float]:
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
        work.LEARNING_RATE,
    )
    x = torch.from_numpy(work.inputs())
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
    order: work.Order, rank: int, store: dist.TCPStore
) -> dict[str, Callable[[], float]]:
    """Joins the others; returns what answers each question."""
    torch.set_num_threads(1)  # a device is one thread
    torch.set_num_interop_threads(1)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=order.k, timeout=_PATIENCE
    )
    step = train_step(order, rank)
    return {"step": step, "mem": lambda: peak_of(step)}


def follow(connection: Connection, order: work.Order, *at: int) -> None:
    """Answers what the first process asks, until it closes the connection."""
    rank, port = at
    own = answers(order, rank, meet(rank, order.k, port))
    with contextlib.suppress(EOFError):
        while True:
            connection.send(own[connection.recv()]())
    dist.destroy_process_group()


def start(order: work.Order, port: int) -> list[tuple[Any, Connection]]:
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
    order = work.read_order()
    store = meet(0, order.k)
    followers = start(order, store.port)
    own = answers(order, 0, store)

    def ask(question: str) -> list[float]:
        for _, connection in followers:
            connection.send(question)
        return [own[question](), *(each.recv() for _, each in followers)]

    work.serve(
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
