"""Links between processes of this machine that take time, as networks do.

TensorFlow's servers are told addresses of relays, one in front of each worker.
A relay hands on every byte, in both directions, some time after it came; it
does not limit how many are on their way.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from tfgpipe.hosts import controller
from tfgpipe.hosts.addresses import Host, Hosts

_CHUNK = 2**16  # bytes


class DelayedLinks:
    """Relays, in a thread of their own.

    Args:
        seconds: How long a byte takes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def to(self, address: str) -> str:
        """A new address, of this machine, that leads to another one."""
        return self._run(self._relay(address))

    def _run(self, work: Coroutine[Any, Any, str]) -> str:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _relay(self, address: str) -> str:
        host, _, port = address.rpartition(":")

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            try:
                there, back = await asyncio.open_connection(host, int(port))
            except OSError:
                writer.close()
                return
            await asyncio.gather(
                self._hand_on(reader, back), self._hand_on(there, writer)
            )

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _hand_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Writes what it reads, later, until one of the ends closes."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(due - self._loop.time())
                if not data:
                    writer.close()
                    return
                writer.write(data)

        writing = asyncio.create_task(write())
        data = b"-"
        while data:
            try:
                data = await reader.read(_CHUNK)
            except OSError:
                data = b""
            waiting.put_nowait((self._loop.time() + self._seconds, data))
        await writing


class DelayedCluster(controller.Cluster):
    """Workers that are reached, and reach each other, over such links.

    Args:
        hosts: As those of `Cluster`.
        num_devices: As those of `Cluster`.
        seconds: How long each way takes.
    """

    def __init__(self, hosts: Hosts, num_devices: int, seconds: float) -> None:
        self._delayed = DelayedLinks(seconds)
        super().__init__(hosts, num_devices)

    def _start_tensorflow(self, addresses: dict[Host, str]) -> None:
        super()._start_tensorflow(
            {host: self._delayed.to(own) for host, own in addresses.items()}
        )
