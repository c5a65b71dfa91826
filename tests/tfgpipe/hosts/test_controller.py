"""How controller and workers find each other, without TensorFlow's servers."""

import contextlib
import socket
import struct
import threading
import time

import pytest

from tfgpipe.hosts import addresses, controller, link, secret, worker


@pytest.fixture
def server():
    """What would be TensorFlow's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


SECRET = b"what only these tests know"


def connect(*ports, timeout=60, known=SECRET):
    return controller.Cluster(named(*ports), timeout=timeout, known=known)


def named(*ports):
    named = ",".join(f"127.0.0.1:{port}" for port in ports)
    return addresses.of_workers(named)


def refused(*parts):
    return pytest.raises(ValueError, match="(?s)" + ".*".join(parts))


@pytest.fixture
def make():
    """Makes workers, that are closed at the end."""
    made = []

    def new(port, server):
        made.append(worker.Worker(port, server, SECRET))
        return made[-1]

    yield new
    for one in made:
        one.close()


@contextlib.contextmanager
def running(function, *arguments):
    """Runs it in another thread; gives the list its result will be in."""
    results = []
    thread = threading.Thread(
        target=lambda: results.append(function(*arguments)), daemon=True
    )
    thread.start()
    yield results
    thread.join(60)
    assert not thread.is_alive()


def linked(port):
    return link.Link(socket.create_connection(("127.0.0.1", port)))


def hello(port):
    """What a controller says first, and what it gets."""
    connection = linked(port)
    try:
        answer = secret.introduce(connection, SECRET, "me:1", 60)
    except OSError:
        connection.close()
        raise
    return connection, answer


@pytest.fixture
def free_port():
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
    return port


# ------------------------------------------------------------------ the worker
def test_worker_serves_until_the_controller_is_gone_and_knows_how(server, make):
    one = make(0, server)
    for end in (None, 0, 7):
        with running(one.serve) as results:
            connection, answer = hello(one.port)
            assert answer["fingerprint"] == link.fingerprint()
            assert answer["port"] == server
            if end is not None:
                connection.send(end=end)
            connection.close()
        assert results == [end]
        assert one.controller == "me:1"


def test_worker_has_one_controller_at_a_time(server, make):
    one = make(0, server)
    with running(one.serve):
        connection, _ = hello(one.port)
        with refused("works for another controller, me:1", "or wait longer"):
            connect(one.port, timeout=1)
        connection.close()


def test_idle_strangers_keep_no_controller_waiting(server, make):
    """150 of them kept one with the secret waiting for 33 of its 60 s."""
    one = make(0, server)
    with running(one.serve), contextlib.ExitStack() as idle:
        for _ in range(150):
            idle.enter_context(
                socket.create_connection(("127.0.0.1", one.port))
            )
        start = time.monotonic()
        connection, _ = hello(one.port)
        assert time.monotonic() - start < 2
        connection.close()


def test_worker_opens_the_port_to_hosts_that_a_controller_names(
    server, make, monkeypatch
):
    opened = []
    monkeypatch.setattr(
        worker.port_filter,
        "close_to_strangers",
        lambda port, friends=(): opened.append((port, friends)),
    )
    one = make(0, server)
    told = one.restrict_port()
    assert f"port {server} is open to users of this host and of" in told
    with running(one.serve):
        connection, _ = hello(one.port)
        connection.send(hosts=["10.9.0.1", "127.0.0.2"])
        assert connection.receive(60) == {"told": told}
        connection.close()
    friends = ["10.9.0.1", "127.0.0.1", "127.0.0.2"]
    assert opened == [(server, []), (server, friends)]
    open_one = worker.Worker(0, server, SECRET, closes=False)
    assert (
        "open to everybody who can reach this host" in open_one.restrict_port()
    )
    open_one.close()
    assert len(opened) == 2


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[1]\n",
    b"{}\n",
    b"[" * 100_000 + b"\n",
    b'{"nonce": 1, "controller": []}\n',
    b'{"nonce": "a", "controller": "b", "proof": 3}\n',
    b'{"nonce": "\\ud800", "controller": "b", "proof": "\\ud800"}\n',
    b'{"nonce": "a", "controller": "b", "proof": "\xff"}\n',
    b'{"reach": [["127.0.0.1", 1]], "end": 0}\n',
    b"x" * (2**20 + 2),
]


def strange(port, text):
    """Says something, until the worker hangs up."""
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.settimeout(60)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(text)
            while stranger.recv(1000):
                pass


@pytest.mark.parametrize("text", STRANGE)
def test_stranger_does_not_disturb_a_worker(text, server, make):
    one = make(0, server)
    with running(one.serve) as results:
        strange(one.port, text)
        connection, _ = hello(one.port)
        strange(one.port, text)  # while it works
        connection.send(reach=[["127.0.0.1", server]])
        assert connection.receive(60) == {"unreachable": []}
        connection.send(end=0)
        connection.close()
    assert results == [0]


def test_slow_stranger_is_sent_away(server, make, monkeypatch):
    """Though it goes on sending."""
    monkeypatch.setattr(link, "HELLO", 0.3)
    one = make(0, server)

    def trickle(stranger):
        for _ in range(300):
            stranger.sendall(b" ")
            time.sleep(0.02)

    with (
        socket.create_connection(("127.0.0.1", one.port)) as stranger,
        pytest.raises(ConnectionError),
    ):
        trickle(stranger)


def test_closed_worker_listens_no_more(server, make):
    """Its thread would take what comes to the next socket of this number."""
    before = {*threading.enumerate()}
    make(0, server).close()
    assert {*threading.enumerate()} <= before


def test_other_secret_is_refused_and_told(server, make):
    one = make(0, server)
    with refused(
        f"Cannot reach worker 0 at 127.0.0.1:{one.port} within 60 s: it has "
        "another secret",
        "a copy of this host's secret",
    ):
        connect(one.port, known=b"what others know")


def test_worker_without_the_secret_is_refused(server):
    """It cannot show that it knows it, whatever it answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            theirs = link.Link(listener.accept()[0])
            theirs.send(nonce="mine")
            hello = theirs.receive(60)
            theirs.send(
                fingerprint=link.fingerprint(),
                port=server,
                proof=hello["proof"],  # its own
            )
            theirs.close()

        with running(answer), refused("it has another secret"):
            connect(listener.getsockname()[1])


def test_controller_that_goes_away_at_once_leaves_the_worker_free(
    server, make, monkeypatch
):
    one, admit = make(0, server), secret.admit

    def late(*arguments):
        admitted = admit(*arguments)
        time.sleep(0.3)
        return admitted

    monkeypatch.setattr(secret, "admit", late)
    gone = linked(one.port)
    theirs = gone.receive(60)["nonce"]
    gone.send(
        nonce="mine",
        controller="gone",
        proof=secret.proof(SECRET, "controller", theirs, "mine"),
    )
    reset = struct.pack("ii", 1, 0)  # by a reset, not in order
    gone._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    gone.close()
    time.sleep(0.6)
    with running(one.serve) as results:
        connection, _ = hello(one.port)
        connection.send(end=0)
        connection.close()
    assert results == [0]


def test_worker_listens_where_it_is_told_or_not_at_all(server, make):
    assert make(0, server)._listener.getsockname()[0] == "127.0.0.1"
    with refused("one of this host", "bind='192.0.2.1'"):
        worker.Worker(0, server, SECRET, "192.0.2.1")
    with refused("must be free", f"port={server}"):
        worker.Worker(server, server, SECRET)


# ------------------------------------------------------------- signs of life
@pytest.fixture
def quick(monkeypatch):
    """Half a second of silence is too long."""
    monkeypatch.setattr(link, "BEAT", 0.05)
    monkeypatch.setattr(link, "BEATS", 10)


@pytest.fixture
def line():
    """The controller's end and the worker's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = linked(listener.getsockname()[1])
        theirs = link.Link(listener.accept()[0])
    yield ours, theirs
    ours.close()
    theirs.close()


@pytest.mark.usefixtures("quick")
def test_worker_gives_signs_of_life(server, make):
    one = make(0, server)
    with running(one.serve) as results:
        connection, _ = hello(one.port)
        connection.send(reach=[])
        assert connection.receive(60) == {"unreachable": []}
        with running(controller._followed, connection) as lost:
            time.sleep(1)  # longer than the silence that is allowed
            assert lost == []
            connection.send(end=0)
            connection._socket.shutdown(socket.SHUT_RDWR)
        # A socket that is closed while something is under way is reset.
        (why,) = lost
        assert why == "the connection was closed" or "reset by peer" in why
        connection.close()
    assert results == [0]


@pytest.mark.usefixtures("quick")
def test_worker_that_is_silent_is_lost(line):
    ours, theirs = line
    theirs.send(beat={})
    why = controller._followed(ours)
    assert why.startswith("it has given no sign of life for 0.5 s")


# -------------------------------------------------------------- the controller
def test_hosts_that_cannot_be_reached_are_all_named(free_port):
    found = addresses.of_workers(
        f"127.0.0.1:{free_port},no.such.host.invalid:1"
    )
    with refused(
        f"Cannot reach worker 0 at 127.0.0.1:{free_port} within 1 s: ",
        "Start `tfgpipe worker` there",
        "Cannot reach worker 1 at no.such.host.invalid:1 within 1 s",
    ):
        controller.Cluster(found, timeout=1, known=SECRET)


def test_host_that_is_no_worker_is_named(server):
    """It takes the connection, and says nothing."""
    with refused(f"Cannot reach worker 0 at 127.0.0.1:{server} within 1 s"):
        connect(server, timeout=1)


@pytest.mark.parametrize("what", sorted(link.fingerprint()))
def test_worker_of_another_version_is_refused_and_told(
    what, server, monkeypatch, make
):
    own = link.fingerprint()
    # Asked for in this order, by worker and controller.
    answers = iter([{**own, what: "other"}, own])
    one = make(0, server)
    monkeypatch.setattr(link, "fingerprint", lambda: next(answers))
    with (
        running(one.serve) as results,
        refused(
            f"must have the same {what}",
            f"other on worker 0 at 127.0.0.1:{one.port}, and {own[what]} here",
        ),
    ):
        connect(one.port)
    assert results == [2]


def test_worker_that_cannot_reach_another_is_named(free_port, server, make):
    """The second worker's TensorFlow does not answer."""
    first, second = make(0, server), make(0, free_port)
    with (
        running(first.serve),
        running(second.serve),
        refused(
            f"worker 0 at 127.0.0.1:{first.port} cannot reach "
            f"127.0.0.1:{free_port}",
            "Open the ports",
        ),
    ):
        connect(first.port, second.port)


def test_host_that_is_cut_off_is_noticed(server):
    with contextlib.closing(linked(server)) as near:
        options = [
            near._socket.getsockopt(level, option)
            for level, option in (
                (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
                (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL),
                (socket.IPPROTO_TCP, socket.TCP_KEEPCNT),
                (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
            )
        ]
    is_on, idle, interval, count, unacknowledged = options
    assert is_on and idle + interval * count == link.SILENCE == 25
    assert unacknowledged == 25_000


def test_fingerprint_is_of_the_code_of_every_package(tmp_path, monkeypatch):
    """Wherever it is installed, with whatever beside it."""
    module = tmp_path / "tfgpipe" / "sub" / "module.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(link, "__file__", tmp_path / "tfgpipe/hosts/link.py")
    prints = []
    for text in ("x = 1", "x = 2", "x = 1"):
        module.write_text(text)
        prints.append(link.fingerprint.__wrapped__())
    assert prints[0] == prints[2] != prints[1]
    assert set(prints[0]) == {"TensorFlow", "Keras", "code of tfgpipe"}
