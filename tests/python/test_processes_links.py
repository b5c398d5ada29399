"""The connections over which memory is lent: what is no message, who is another user, and the thread that reads all."""

import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from companions import running, sharing
from ebbtide.errors import StateError
from ebbtide.processes import borrowed, links

WANT = {"what": "want", "version": links.VERSION, "id": 1, "generation": 0, "agrees": False}


@pytest.fixture(scope="module")
def variables():
    with sharing("links", 64) as found:
        yield found


@pytest.fixture(scope="module")
def owner(variables):
    with running(1, variables) as (one,):
        yield one


@pytest.fixture
def shared(owner):
    """A share of the owner's, and the path of its socket."""
    return owner.run("""
        from dataclasses import astuple
        with saver.region("weights", exportable=True):
            tensor = torch.arange(10, device=saver.device)
        answer = astuple(saver.share(tensor))
    """)


def connect(variables, shared):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(5)
    made.connect(f"{variables['EBBTIDE_SHARED_FOLDER']}/{shared[0]}{links.ENDING}")
    return made


def ask(connected, **changes):
    connected.send(json.dumps({**WANT, **changes}).encode())
    return json.loads(connected.recv(1 << 17))


def is_whole(owner, variables, shared):
    """The owner lends on."""
    with connect(variables, shared) as connected:
        return ask(connected, nonce=shared[1], generation=shared[2])["problem"] == ""


@pytest.mark.parametrize(
    "message",
    [
        b"\0\xff",
        b"[]",
        b"1",
        b"{" * 50_000,
        b'{"what": "want"}',
        b'{"what": 5}',
        b'{"what": "drop", "key": "0"}',
        b'{"what": "done", "id": -1, "problem": ""}',
        json.dumps({**WANT, "nonce": ["0"]}).encode(),
        json.dumps({**WANT, "nonce": "0" * 5000}).encode(),
        json.dumps({**WANT, "nonce": "0", "id": 1 << 70}).encode(),
        json.dumps({**WANT, "nonce": "0", "id": True}).encode(),
        b" " * (1 << 17) + b"{}",
    ],
    ids=range(13),
)
def test_what_is_no_message_ends_its_connection_alone(owner, variables, shared, message):
    with connect(variables, shared) as connected:
        connected.send(message)
        assert connected.recv(100) == b""
    assert is_whole(owner, variables, shared)


def test_another_version_and_an_unknown_word(owner, variables, shared):
    with connect(variables, shared) as connected:
        answer = ask(connected, nonce=shared[1], version=links.VERSION + 1)
        assert answer["problem"] == "the two programs have different versions of ebbtide"
        connected.send(b'{"what": "later"}')
        assert ask(connected, nonce="0")["problem"].startswith("this share is stale")


def test_descriptors_that_come_uninvited_are_closed(owner, variables, shared):
    before = owner.run("import os; answer = len(os.listdir('/proc/self/fd'))")
    with connect(variables, shared) as connected, tempfile.TemporaryFile() as file:
        socket.send_fds(connected, [b'{"what": "hello", "name": "me"}'], [file.fileno()] * 20)
        assert ask(connected, nonce="0")["problem"]
    assert owner.run_until("answer = len(os.listdir('/proc/self/fd'))", before) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_answered(owner, variables, shared):
    place = Path(variables["EBBTIDE_SHARED_FOLDER"])
    for file in (place.parent, place, place / f"{shared[0]}{links.ENDING}"):
        file.chmod(0o777)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setuid(12345)
            with connect(variables, shared) as connected:
                connected.send(json.dumps({**WANT, "nonce": shared[1]}).encode())
                os.write(writer, b"answered" if connected.recv(100) else b"closed")
        except OSError as error:
            os.write(writer, repr(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    place.chmod(0o700)
    assert os.read(reader, 100) in (
        b"closed",
        b"BrokenPipeError(32, 'Broken pipe')",
        b"ConnectionResetError(104, 'Connection reset by peer')",
    )
    assert is_whole(owner, variables, shared)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_users_socket_is_not_trusted():
    with tempfile.TemporaryDirectory() as folder:
        place = f"{folder}/socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        child_is_ready, ready = os.pipe()
        Path(folder).chmod(0o777)
        child = os.fork()
        if child == 0:
            os.setuid(12345)
            listener.bind(place)
            listener.listen()
            os.write(ready, b"!")
            time.sleep(30)
            os._exit(0)
        os.read(child_is_ready, 1)
        try:
            with pytest.raises(StateError, match="is another user's"):
                links.connect(Path(place))
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_the_overflow_user_is_nobody(monkeypatch):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        assert links._is_this_user(one)
        monkeypatch.setattr(links, "_overflow_user", os.geteuid)
        assert not links._is_this_user(one)


def test_names_that_lead_elsewhere_are_not_followed(variables, monkeypatch):
    monkeypatch.setenv("EBBTIDE_SHARED_FOLDER", variables["EBBTIDE_SHARED_FOLDER"])
    for name in ("../place/x", "/etc/passwd", ""):
        with pytest.raises(StateError, match="is gone"):
            borrowed.borrow(name, "0", 0, False)


# --- the thread ---


def test_the_thread_answers_and_fails_for_who_asks():
    assert links.ask(lambda: links.ask(threading.get_ident, 5), 5) != threading.get_ident()
    with pytest.raises(KeyError, match="planted"):
        links.ask(lambda: {}["planted"], 5)
    with pytest.raises(StateError, match=r"no answer came in 0\.05 seconds"):
        links.ask(lambda: time.sleep(0.3), 0.05)


def test_what_fails_in_it_is_one_line_and_ends_nothing(capfd):
    def fail():
        raise StateError("planted")

    links.post(fail)
    done = threading.Event()
    links.ask(lambda: links.later(0.05, done.set), 5)
    assert done.wait(5)
    assert capfd.readouterr().err == "ebbtide: memory of several processes: planted\n"


def test_no_message_is_too_long_or_has_too_many_descriptors():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        link = links.Link(one)
        with pytest.raises(StateError, match="too much for one message"):
            link.send({"text": "x" * (1 << 18)})
        with pytest.raises(StateError, match="too much for one message"):
            link.send({}, [0] * 254)
        other.close()
        with pytest.raises(StateError, match="can't be told"):
            link.send({})
