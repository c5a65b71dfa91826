"""The controller's side of a run on several hosts.

There is one controller: it traces the step, feeds the data, and writes the
files. The others run what TensorFlow sends them, on their devices.

A device may hang while the Python of its host lives. Where no step ends for a
while, a thread asks each device of a host for a small operation: a device that
computes has it done in the end. A step may take minutes, and an operation may
wait for all of it: so what is waited for is a minute, or three times the
longest step, if that is more. The first step, which traces and compiles, and
the second one, which shows how long steps take, are not looked at.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpipe.checks import checked_bool, checked_counts, checked_positive
from tfgpipe.devices import local
from tfgpipe.hosts import link, port_filter, secret
from tfgpipe.hosts.addresses import Host, Hosts, device_names, of_workers
from tfgpipe.hosts.link import Link

_RETRY = 0.2  # seconds
_SOON = 0.005


def connect(
    workers: str,
    num_devices: int = 1,
    *,
    timeout: float = 60.0,
    secret_file: str | None = None,
    allow_any_host: bool = False,
) -> "Cluster":
    """Connects this process, as the controller, to workers on other hosts.

    On each of the hosts runs `tfgpipe worker`, of the same versions and with
    the same secret. Cells, with their weights, optimizer slots and updates, are
    on the workers' devices then. This process traces the steps, feeds the data,
    and reads and writes the files; its accelerators are not used.

    To be called before TensorFlow runs anything. The result is a context
    manager: leaving it tells the workers that the work is done. They are free
    when this process has ended. If one is lost before, this process ends, with
    a message and exit code 3: what was on it cannot be had back.

    Args:
        workers: Where they listen, "host:port,host:port". Their devices are
            used in this order.
        num_devices: Devices that there have to be at least.
        timeout: Seconds to wait for all of them. Positive.
        secret_file: What only these hosts know, the same file on all of them.
            `None` for ~/.config/tfgpipe/secret, which is made if there is none.
        allow_any_host: Whether other hosts than these may use the port of
            TensorFlow. If so, `tfgpipe worker` must allow it, too.

    Returns:
        The workers. `devices` are the names of their devices, for `GPipe` and
        `PipelineStrategy`, of the first worker first. `progress` is a
        callback for `fit`, by which devices that hang are noticed.

    Raises:
        ValueError: If an argument is wrong; if a host cannot be reached, is no
            worker or in use, or has another secret or other versions; or if
            there are too few devices.
        RuntimeError: If TensorFlow has started its devices already.

    Example:

    ```python
    with tfgpipe.hosts.connect("host0:2222,host1:2222") as workers:
        model = tfgpipe.GPipe(layers, devices=workers.devices)
        model.compile("adam", "mse")
        model.fit(x, y, callbacks=[workers.progress])
    ```
    """
    hosts = of_workers(workers)
    (num_devices,) = checked_counts(num_devices=num_devices)
    timeout = checked_positive("timeout", timeout, "in seconds")
    allow_any_host = checked_bool("allow_any_host", allow_any_host)
    known = secret.read(secret_file)
    local.hide_accelerators()
    return Cluster(
        hosts, num_devices, timeout, known=known, closes_port=not allow_any_host
    )


class Cluster:
    """The workers of a run, connected: a context manager, see `connect`.

    TensorFlow lists their devices then, under names such as
    "/job:worker/replica:0/task:1/device:CPU:0".

    Args:
        hosts: The hosts. This process must be the controller. See `connect`.
        num_devices: Devices that there have to be at least.
        timeout: Seconds to wait for all of the hosts.
        program: What this process runs, to begin its messages with.
        advice: What to do when one is lost, after it was started again.
        known: The secret of all hosts; `None` for what `secret.read` returns.
        closes_port: Whether TensorFlow's port is closed to other hosts than
            these. Says to whom it is open.

    Attributes:
        devices: Full names of all devices, of the first host first.
        progress: A callback that has to be told of the steps, so that devices
            that hang are noticed.

    Raises:
        ValueError: If a host cannot be reached, is no worker or in use, or
            has other versions; or if there are too few devices.

    Example:

    ```python
    with tfgpipe.hosts.connect("host0:2222,host1:2222") as cluster:
        model = tfgpipe.GPipe(layers, devices=cluster.devices)
        model.compile("adam", "mse")
        model.fit(x, y, callbacks=[cluster.progress])
    ```
    """

    def __init__(
        self,
        hosts: Hosts,
        num_devices: int = 1,
        timeout: float = 60.0,
        program: str = "tfgpipe",
        advice: str = "Run the program again.",
        known: bytes | None = None,
        closes_port: bool = True,
    ) -> None:
        self._hosts = hosts
        self._closes_port = closes_port
        self._program = program
        self._advice = advice
        self._known = secret.read() if known is None else known
        self._links: dict[Host, Link] = {}
        self.progress = Progress()
        self._has_ended = False
        try:
            self._start_tensorflow(
                self._connect(time.monotonic() + timeout, timeout)
            )
            names = {
                kind: [d.name for d in tf.config.list_logical_devices(kind)]
                for kind in ("TPU", "GPU", "CPU")
            }
            self.devices = device_names(hosts, names, num_devices)
        except ValueError:
            self.end(2)
            for connection in self._links.values():
                connection.close()
            raise
        self._watch(self._devices_followed)

    # ------------------------------------------------------------- connecting
    def _connect(self, until: float, timeout: float) -> dict[Host, str]:
        """Reaches all workers; returns where TensorFlow's servers are."""
        name = f"process {os.getpid()} on {socket.gethostname()}"
        name = str(self._hosts.controller or name)
        addresses = {}
        problems = []
        for host in self._hosts.others:
            try:
                answer = self._dial(host, name, until)
            except OSError as error:
                problems.append(
                    f"Cannot reach {host} within {timeout:g} s: {error}. Start "
                    "`tfgpipe worker` there, or this same command with the "
                    "host's TF_CONFIG, with a copy of this host's secret; or "
                    "wait longer."
                )
                continue
            theirs, ours = answer["fingerprint"], link.fingerprint()
            problems += [
                f"All hosts must have the same {what}. Received: "
                f"{theirs.get(what)} on {host}, and {ours[what]} here. Install "
                "the same there, and start the worker again."
                for what in ours
                if ours[what] != theirs.get(what)
            ]
            addresses[host] = f"{host.name}:{answer['port']}"
        if not problems:
            problems = self._try_ways(addresses)
        if problems:
            raise ValueError("\n".join(problems))
        return addresses

    def _dial(self, host: Host, name: str, until: float) -> dict[str, Any]:
        """Connects to a worker; returns what it answers."""
        while True:
            left = max(2.0, until - time.monotonic())
            try:
                connection = Link(
                    socket.create_connection((host.name, host.port), left)
                )
                self._links[host] = connection
                return secret.introduce(
                    connection, self._known, name, min(left, link.ANSWER)
                )
            except OSError as error:
                if host in self._links:
                    self._links.pop(host).close()
                is_late = time.monotonic() + _RETRY >= until
                if is_late or isinstance(error, secret.Refused):
                    raise
            time.sleep(_RETRY)

    def _try_ways(self, addresses: dict[Host, str]) -> list[str]:
        """Lets workers reach each other and the controller; what fails."""
        here = self._hosts.controller
        name = here.name if here else _local_name(self._links.values())
        try:
            listener = socket.create_server(
                (name, here.port if here else 0),
                family=socket.AF_INET6 if ":" in name else socket.AF_INET,
            )
        except OSError as error:
            return [f"The port of {here}, this process, must be free: {error}."]
        with listener:  # TensorFlow listens there afterwards
            self._address = f"{name}:{listener.getsockname()[1]}"
            self._restrict_port()
            far = [connection.far_host for connection in self._links.values()]
            names = {name, *far, *(host.name for host in self._hosts.all)}
            for host in self._links:
                self._ask(host, link.ANSWER, hosts=sorted(names))
            problems: list[str] = []
            for host in self._links:
                others = {*addresses.values(), self._address}
                others -= {addresses[host]}
                ways = [_pair(a) for a in sorted(others)]
                answer = self._ask(host, len(ways) * link.ANSWER, reach=ways)
                problems += [
                    f"{host} cannot reach {why}. All hosts must reach each "
                    "other and the controller, on any port, under the names "
                    "that are given, and from addresses that these stand for. "
                    "Open the ports between them, or let any host connect, by "
                    "`allow_any_host` of all."
                    for why in answer["unreachable"]
                ]
        return problems

    def _ask(self, host: Host, seconds: float, **message: Any) -> Any:
        """Sends a worker a message; returns its answer."""
        try:
            self._links[host].send(**message)
            return self._links[host].receive(seconds)
        except OSError as error:
            raise ValueError(
                f"Lost {host}: {error}. Start it again."
            ) from error

    def _restrict_port(self) -> str:
        """Closes this process's port to strangers; says to whom it is open."""
        names = [host.name for host in self._hosts.others]
        names += [connection.far_host for connection in self._links.values()]
        return port_filter.restrict(
            _pair(self._address)[1],
            names,
            "the workers' hosts",
            self._closes_port,
        )

    def _start_tensorflow(self, addresses: dict[Host, str]) -> None:
        self._watch(lambda host: _followed(self._links[host]))
        here = self._hosts.controller
        jobs: dict[str, dict[int, str]] = {}
        for host, address in addresses.items():
            jobs.setdefault(host.job, {})[host.index] = address
        job, index = (here.job, here.index) if here else ("controller", 0)
        jobs.setdefault(job, {})[index] = self._address
        tf.config.experimental_connect_to_cluster(
            tf.train.ClusterSpec(jobs), job_name=job, task_index=index
        )
        starting = threading.Event()
        watch = threading.Thread(target=self._close_early, args=(starting,))
        watch.start()
        try:
            tf.config.list_logical_devices()  # starts the server
        finally:
            starting.set()
            watch.join()
        print(f"{self._program}: {self._restrict_port()}", file=sys.stderr)

    def _close_early(self, starting: threading.Event) -> None:
        """Closes the port while TensorFlow still connects to the workers."""
        while not starting.wait(_SOON):
            self._restrict_port()

    # --------------------------------------------------------------- the end
    def _watch(self, how: Callable[[Host], str]) -> None:
        """Ends this process when a worker is lost, as soon as `how` says how.

        TensorFlow would tell the same in other words, but only if something
        waits for that worker, and not if its host is cut off, or it is stopped.
        """

        def watch(host: Host) -> None:
            self._lose(host, how(host))

        for host in self._hosts.others:
            threading.Thread(target=watch, args=(host,), daemon=True).start()

    def _devices_followed(self, host: Host) -> str:
        """Waits until devices of a worker hang; returns how that shows."""
        names = [n for n in self.devices if n.startswith(f"{host.task}/")]
        seconds = wait_until_silent(self.progress, names)
        return (
            f"its devices have answered nothing for {seconds:g} s, though its "
            "process lives: a device or a connection hangs. End it"
        )

    def _lose(self, host: Host, why: str) -> None:
        """Ends this process, unless it ends anyway."""
        if self._has_ended:  # and so may the worker
            return
        print(
            f"\n{self._program}: Lost {host}: {why}. Start it again. "
            f"{self._advice}",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(link.LOST)  # the other threads may wait for the worker

    def __enter__(self) -> "Cluster":
        """Inside, a worker may be the one that failed."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.end(0)
            return
        if issubclass(kind, Exception):
            # If so, the thread that watches it says which, and ends all.
            time.sleep(link.ANSWER / 4)
        self._has_ended = True  # it was something else, and is to be told

    def end(self, code: int) -> int:
        """Tells the workers the exit code, once, and returns it."""
        if self._has_ended:
            return code
        self._has_ended = True
        for connection in self._links.values():
            with contextlib.suppress(OSError):  # it is gone
                connection.send(end=code)
        return code


def _followed(connection: Link) -> str:
    """Listens to a worker until it is lost; returns how that shows.

    Its silence is measured in waits of this thread, not by a clock: so the
    time does not count in which this process was stopped itself.
    """
    silent = 0
    while silent < link.BEATS:
        try:
            connection.receive(link.BEAT)
        except TimeoutError:
            silent += 1
        except OSError as error:
            return str(error)
        else:
            silent = 0
    return (
        f"it has given no sign of life for {link.BEATS * link.BEAT:g} s, so it "
        "is stopped, or hangs. End it, if it is still there"
    )


def _local_name(links: Iterable[Link]) -> str:
    """Returns the address of this host on the way to the workers."""
    names = [connection.near_host for connection in links]
    far = [name for name in names if not name.startswith("127.")]
    return (far or names)[0]


def _pair(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    return name, int(port)


# ------------------------------------------------------ devices that hang
class Progress(keras.callbacks.Callback):
    """Counts the steps that have ended.

    Attributes:
        count: Their number.
        is_training: Whether more are to come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.is_training = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """From here on, steps are expected."""
        self.is_training = True

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """They are no more: what comes then is not told."""
        self.is_training = False

    def on_train_batch_end(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Counts one."""
        self.count += 1

    on_test_batch_end = on_train_batch_end


def wait_until_silent(progress: Progress, names: Sequence[str]) -> float:
    """Returns when no step ends and devices do not answer: after how many s.

    Its waits are counted, not the time: that in which this process was stopped
    does not count.
    """
    seen, waits, longest, silent = 0, 0, link.BEATS, 0
    asked: threading.Event | None = None
    while silent < longest:
        time.sleep(link.BEAT)
        waits += 1
        if progress.count != seen or not progress.is_training:
            if seen:
                longest = max(longest, 3 * waits)
            seen, waits, silent, asked = progress.count, 0, 0, None
        elif asked is not None and not asked.is_set():
            silent += 1
        elif seen > 1:
            asked, silent = ask_devices(names), 0
    return silent * link.BEAT


def ask_devices(names: Sequence[str]) -> threading.Event:
    """Asks devices for a sign of life."""
    answered = threading.Event()

    def ask() -> None:
        try:
            for name in names:
                with tf.device(name):
                    (tf.constant(1.0) + 1.0).numpy()
        except tf.errors.OpError:
            pass  # the host is lost, which others notice and tell
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered
