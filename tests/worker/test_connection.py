"""The connection: let in by files, nothing secret said, and back by itself when the server is."""

import json
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest
from nats_server import MISSING, PROGRAM, NatsServer
from toy_streams import answers_of, items, make_stream, work_message, work_messages

from tensorrt_llm_ext.errors import BrokerError, InputError
from tensorrt_llm_ext.worker import Access, JetStreamBroker, Metrics, MetricsServer, Published, Worker, WorkerSettings, connection

SECRET = "s3cr3t-t0ken"


@pytest.fixture
def server_with(tmp_path):
    """Start a server with more options."""
    if PROGRAM is None:
        pytest.skip(MISSING)
    started = []

    def start(*options):
        started.append(NatsServer(tmp_path, *options).start())
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize(
    "options, what",
    [
        ({"url": f"nats://{SECRET}@host:4222"}, "holds a password or a token"),
        ({"url": f"nats://a:{SECRET}@host:4222"}, "holds a password or a token"),
        ({"url": "http://host:4222"}, "not the address of a NATS server"),
        ({"url": "host:4222"}, "not the address of a NATS server"),
        ({"creds": "absent"}, "--creds names no file"),
        ({"token_file": "absent"}, "--token-file names no file"),
        ({"tls_cert": __file__}, "a TLS certificate needs its key"),
    ],
)
def test_an_access_that_cannot_be_is_refused_and_no_secret_is_said(options, what):
    with pytest.raises(InputError, match=what) as caught:
        Access(**{"url": "nats://host:4222", **options})
    assert SECRET not in str(caught.value)


@pytest.fixture
def server_of(server_with, tmp_path):
    """Start a server whose messages are at most so large."""

    def start(max_payload):
        (tmp_path / "nats.conf").write_text(f"max_payload: {max_payload}\n")
        return server_with("-c", str(tmp_path / "nats.conf"))

    return start


def test_a_server_whose_messages_are_too_small_for_any_item_is_refused_at_the_door(server_of):
    with pytest.raises(BrokerError, match="largest message is too small") as caught:
        JetStreamBroker.open(Access(server_of(4200).url), "s", name="test")
    assert (caught.value.expected, caught.value.found) == ("a max_payload of at least 5,120 bytes", "4,200 bytes")
    assert caught.value.fix.startswith("raise max_payload")


def test_the_smallest_messages_that_are_let_in_carry_short_items_and_no_contract_too_large_for_them(server_of, wanted):
    with JetStreamBroker.open(Access(server_of(5120).url), "s", name="test") as broker:
        broker.create(wanted)
        outcomes = broker.publish(work_messages(wanted, items(3)))
        assert all(isinstance(outcome, Published) for outcome in outcomes)
        with pytest.raises(BrokerError, match="'wanted' is too large for the server") as caught:
            make_stream(broker, wanted)
    assert caught.value.expected.startswith("at most 1,024 bytes: the server's max_payload of 5,120")
    assert caught.value.found == f"{len(wanted.to_json()):,} bytes" and caught.value.fix.startswith("raise max_payload")


def test_a_certificate_that_is_none_is_an_error():
    with pytest.raises(InputError, match="a TLS file cannot be read"):
        Access("tls://host:4222", tls_ca=__file__).options()


def test_a_server_that_is_not_there_is_an_error_with_its_address(monkeypatch):
    monkeypatch.setattr(connection, "_CONNECT_S", 0.5)
    with pytest.raises(BrokerError, match="the broker cannot be reached") as caught:
        JetStreamBroker.open(Access("nats://127.0.0.1:1"), "s", name="test")
    assert "127.0.0.1:1" in caught.value.expected


def test_a_token_comes_from_its_file_and_is_never_said(server_with, wanted, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(connection, "_CONNECT_S", 2.0)
    server = server_with("--auth", SECRET)
    (tmp_path / "token").write_text(SECRET + "\n")
    (tmp_path / "wrong").write_text("another-secret\n")
    access = Access(server.url, token_file=tmp_path / "token")
    with JetStreamBroker.open(access, "s", name="test") as broker:
        broker.create(wanted)
    assert SECRET not in repr(access)
    for wrong in (Access(server.url), Access(server.url, token_file=tmp_path / "wrong")):
        with pytest.raises(BrokerError) as caught:
            JetStreamBroker.open(wrong, "s", name="test")
        assert "another-secret" not in str(caught.value) and SECRET not in str(caught.value)
    assert SECRET not in caplog.text and "another-secret" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here, which makes the certificates")
def test_tls_is_spoken_and_an_unknown_certificate_is_not_trusted(server_with, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "_CONNECT_S", 2.0)
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*words.split(), "-keyout", key, "-out", cert], check=True, capture_output=True)
    server = server_with("--tls", "--tlscert", str(cert), "--tlskey", str(key))
    url = server.url.replace("nats://", "tls://")
    with JetStreamBroker.open(Access(url, tls_ca=cert), "s", name="test") as broker:
        broker.create(wanted)
    assert isinstance(Access(url).options()["tls"], ssl.SSLContext)
    with pytest.raises(BrokerError):
        JetStreamBroker.open(Access(url), "s", name="test")


def test_calls_wait_for_a_server_that_restarts_and_nothing_is_lost(own_nats_server, wanted):
    events = []
    with JetStreamBroker.open(Access(own_nats_server.url), "s", name="test", on_event=events.append) as broker:
        make_stream(broker, wanted)
        broker.publish([work_message(wanted, "a")])
        own_nats_server.stop(kill=True)
        restart = threading.Timer(1.0, own_nats_server.start)
        restart.start()
        assert broker.publish([work_message(wanted, "b")]) == [Published(2)]
        restart.join()
        assert broker.put("leases", "part-0", b"x", revision=0) is not None
        assert broker.counts().num_work == 2 and broker.get("facts", "wanted") is not None
    assert events == ["disconnected", "reconnected"]  # and none for the end that we made ourselves


def test_a_worker_goes_on_when_the_broker_was_restarted_under_it(own_nats_server, wanted, session):
    with JetStreamBroker.open(Access(own_nats_server.url), "s", name="test") as broker:
        make_stream(broker, wanted)
        broker.publish(work_messages(wanted, items(30)))
        worker, reports = Worker(session, broker, settings=WorkerSettings(name="w", leave_when_idle_s=4.0)), []
        thread = threading.Thread(target=lambda: reports.append(worker.run()))
        thread.start()
        while worker.metrics.value("extract_tokens_total") == 0:
            time.sleep(0.02)
        own_nats_server.stop(kill=True)
        own_nats_server.start()
        broker.publish(work_messages(wanted, items(60, seed=1)[30:]))
        thread.join(60)
        assert reports[0].answered >= 60  # a killed server may have forgotten some acknowledgements
        assert sorted(answers_of(broker, wanted)) == list(range(1, 61))  # each answer once all the same


def test_a_closed_broker_is_an_error_and_closing_twice_is_none(nats_server):
    broker = JetStreamBroker.open(Access(nats_server.url), "s", name="test")
    broker.close()
    broker.close()
    with pytest.raises(BrokerError, match="the connection was closed"):
        broker.counts()


def test_metrics_and_health_are_served():
    metrics, state = Metrics(), {"healthy": True}
    metrics.refusals.labels("too_long").inc(3)
    with MetricsServer(metrics, lambda: state, 0) as server:
        place = f"http://127.0.0.1:{server.port}"
        text = urllib.request.urlopen(f"{place}/metrics").read().decode()
        for name in ("tokens_total", "batch_fill_bucket", "waiting_tokens", "doorbell_wait_seconds_bucket"):
            assert f"extract_{name}" in text
        assert 'extract_refusals_total{code="too_long"} 3.0' in text
        assert json.loads(urllib.request.urlopen(f"{place}/health").read()) == {"healthy": True}
        state["healthy"] = False
        for path, status in (("health", 503), ("other", 404)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{place}/{path}")
            assert caught.value.code == status
        with pytest.raises(InputError, match="metrics cannot be served"):
            MetricsServer(metrics, lambda: state, server.port)
