r"""Lends this host's devices to a training run on another host.

    tfgpipe worker --port=2222
    tfgpipe worker --port=2222 --num_virtual_devices=2
    tfgpipe worker --port=2222 --bind=10.0.0.7

On the other host, a script that calls `tfgpipe.hosts.connect("HOST:2222")` is
the controller: cells, with their weights, optimizer state and updates, are on
the workers' devices, and nothing is written to their disks. A worker has one
controller at a time. When that ends, or dies, the worker forgets everything,
and waits for the next, in the same process but as if it had just been started.

Workers do what a controller asks that knows the --secret_file. TensorFlow's
port, which it chooses, asks for no secret: on Linux, it is closed to all but
this host, and the hosts that a controller with the secret names. Users of these
hosts are not kept out. Workers must reach each other and the controller.
"""

import contextlib
import os
import pathlib
import sys

from absl import flags

from tfgpipe.commands import command_line
from tfgpipe.hosts import secret, worker

FLAGS = command_line.new_flags()
flags.DEFINE_integer(
    "port",
    2222,
    "Where to wait for the controller; 0 for any.",
    0,
    2**16 - 1,
    flag_values=FLAGS,
)
command_line.define_count(
    FLAGS, "num_virtual_devices", "Split the CPU into so many devices."
)
flags.DEFINE_string(
    "bind",
    "127.0.0.1",
    "The address of this host to listen on, in a network that only your hosts "
    "are in. Default: this machine alone.",
    flag_values=FLAGS,
)
flags.DEFINE_boolean(
    "allow_any_host",
    False,
    "Let --bind be all addresses of this host, and any host use TensorFlow's "
    "port.",
    flag_values=FLAGS,
)
flags.DEFINE_string(
    "secret_file",
    None,
    "What only your hosts know; the same file on all. Default: "
    "~/.config/tfgpipe/secret, made if there is none.",
    flag_values=FLAGS,
)


def run(values: flags.FlagValues) -> None:
    """Serves one controller, and then begins again."""
    is_any = values.bind in ("", "*", "0", "0.0.0.0", "::")
    if is_any and not values.allow_any_host:
        raise ValueError(
            "--bind must be one address of this host, in a network that the "
            "hosts of the run have to themselves. Received: "
            f"--bind={values.bind!r}. Give one, or add --allow_any_host."
        )
    server = worker.start(
        values.port,
        values.num_virtual_devices,
        secret.read(values.secret_file),
        values.bind,
        not values.allow_any_host,
    )
    print(f"tfgpipe worker: ready on port {server.port}", flush=True)
    code = server.serve()
    how = "is gone" if code is None else f"has ended with exit code {code}"
    print(
        f"tfgpipe worker: The controller, {server.controller}, {how}. "
        "Waiting for the next.",
        flush=True,
    )
    _start_again(server.port)


def _start_again(port: int) -> None:
    """Replaces this process by a new one, which has no memory of this run."""
    for entry in pathlib.Path("/proc/self/fd").glob("*"):
        if int(entry.name) > 2:  # such as devices, and TensorFlow's sockets
            with contextlib.suppress(OSError):  # the loop has opened it
                os.set_inheritable(int(entry.name), False)
    flag = f"--port={port}"  # the last one counts
    arguments = [word for word in sys.orig_argv[1:] if word != flag]
    os.execv(sys.executable, [sys.executable, *arguments, flag])
