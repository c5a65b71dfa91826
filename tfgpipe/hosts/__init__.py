"""Several hosts: `connect` to workers, and train on their devices.

`addresses` says which hosts take part. The `controller` connects to the others
over a `link`, after a handshake by a `secret`; on them a `worker` serves it.
A `port_filter` keeps strangers out. `import tfgpipe` alone does not import it:
`import tfgpipe.hosts` does.
"""

from tfgpipe.hosts import secret, worker
from tfgpipe.hosts.controller import Cluster, connect

__all__ = ["Cluster", "connect", "secret", "worker"]
