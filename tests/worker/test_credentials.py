"""The verbs at a server in operator mode and at one that speaks TLS: let in by files, and nothing secret is ever said."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from fleet import COMMAND
from nats_server import MISSING, PROGRAM, NatsServer
from operator_mode import Key, OperatorMode, secrets_of

from tensorrt_llm_ext.store import open_vectors

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)


@pytest.fixture
def operator_mode(tmp_path):
    return OperatorMode(tmp_path)


@pytest.fixture
def server(operator_mode, tmp_path):
    server = NatsServer(tmp_path, "-c", str(operator_mode.config)).start()
    yield server
    server.stop()


@pytest.fixture
def prompts(tmp_path):
    rows = [{"id": f"r{n}", "ids": [n + 1] * (n % 7 + 1)} for n in range(30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "prompts.jsonl"


def verb(*words, url, access, timeout=120):
    """Run a verb; what it and its arguments say, and how it ended."""
    words = [*COMMAND, *map(str, words), "--broker", url, "--stream", "s", *map(str, access)]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout)


def whole_job(engine, prompts, out, url, access):
    """Submit, work, store and look; everything that was printed, and the arguments of the processes while they ran."""
    said = []
    fields = ("--ids-field", "ids", "--id-field", "id")
    for words in (
        ("submit", prompts, "--engine", engine, *fields),
        ("work", engine, "--leave-when-idle", "1", "--threads", "1"),
        ("store", "--out", out, "--leave-when-idle", "2"),
        ("broker-status", "--json"),
    ):
        result = verb(*words, url=url, access=access)
        assert result.returncode == 0, result.stdout + result.stderr
        said += [result.stdout, result.stderr]
    assert json.loads(said[-2])["done"] and len(open_vectors(out / "part-0")) == 30
    return "".join(said)


def test_a_whole_job_with_a_credentials_file(tiny_engine, prompts, server, operator_mode, tmp_path):
    creds = operator_mode.creds("right")
    said = whole_job(tiny_engine, prompts, tmp_path / "out", server.url, ("--creds", creds))
    said += (tmp_path / "server.log").read_text()
    said += "".join(path.read_text(errors="replace") for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert len(secrets_of(creds)) == 2 and not any(secret in said for secret in secrets_of(creds))


def test_a_worker_s_arguments_and_environment_hold_no_secret(tiny_engine, prompts, server, operator_mode):
    creds = operator_mode.creds("right")
    words = ("submit", prompts, "--engine", tiny_engine, "--ids-field", "ids")
    assert verb(*words, url=server.url, access=("--creds", creds)).returncode == 0
    words = [*COMMAND, "work", str(tiny_engine), "--broker", server.url, "--stream", "s", "--creds", str(creds)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert any('"joined"' in line for line in process.stderr)
            for name in ("cmdline", "environ"):
                text = Path(f"/proc/{process.pid}/{name}").read_text(errors="replace")
                assert text and not any(secret in text for secret in secrets_of(creds))
        finally:
            process.kill()


def test_wrong_credentials_are_an_error_at_once_with_what_to_do(server, operator_mode, tmp_path):
    stranger = operator_mode.creds("stranger", account=Key("account"))
    other = operator_mode.creds("other")
    forged = tmp_path / "forged.creds"
    forged.write_text(stranger.read_text().replace(secrets_of(stranger)[0], secrets_of(other)[0]))
    (tmp_path / "empty.creds").write_text("")
    (tmp_path / "text.creds").write_text("just some text\n" * 5)
    for access in ((), *(("--creds", path) for path in (stranger, forged, tmp_path / "empty.creds", tmp_path / "text.creds"))):
        start = time.monotonic()
        result = verb("broker-status", url=server.url, access=access)
        assert result.returncode in (1, 2) and "Traceback" not in result.stderr, result.stderr
        assert "--creds" in result.stderr and time.monotonic() - start < 15  # mostly the start of Python
        said = result.stdout + result.stderr
        assert not any(secret in said for path in (stranger, other) for secret in secrets_of(path))


@pytest.mark.parametrize("denied", ["$JS.API.CONSUMER.MSG.NEXT.>", "$JS.ACK.>", "$KV.s_leases.>", "s.results.>"])
def test_a_user_who_may_not_do_it_is_told_what_he_may_not(tiny_engine, prompts, server, operator_mode, denied):
    words = ("submit", prompts, "--engine", tiny_engine, "--ids-field", "ids")
    assert verb(*words, url=server.url, access=("--creds", operator_mode.creds("right"))).returncode == 0
    poor = operator_mode.creds("poor", pub={"deny": [denied]})
    start = time.monotonic()
    result = verb("work", tiny_engine, "--leave-when-idle", "20", url=server.url, access=("--creds", poor))
    assert result.returncode == 1 and "Traceback" not in result.stderr and time.monotonic() - start < 50
    assert "permissions violation for publish" in result.stderr.lower() and denied.rstrip(">").lower() in result.stderr.lower()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here, which makes the certificates")
def test_a_whole_job_over_tls_with_both_sides_certificates(tiny_engine, prompts, tmp_path):
    ca, server_pair, client_pair = certificates(tmp_path)
    options = ("--tlsverify", "--tlscacert", ca, "--tlscert", server_pair[0], "--tlskey", server_pair[1])
    server = NatsServer(tmp_path, *map(str, options)).start()
    try:
        url = server.url.replace("nats://", "tls://")
        access = ("--tls-ca", ca, "--tls-cert", client_pair[0], "--tls-key", client_pair[1])
        said = whole_job(tiny_engine, prompts, tmp_path / "out", url, access)
        assert "PRIVATE KEY" not in said
        for wrong in (access[:2], access[2:], ()):  # no certificate of our own; nobody who vouches for the server's
            start = time.monotonic()
            result = verb("broker-status", url=url, access=wrong)
            assert time.monotonic() - start < 15
            assert result.returncode == 1 and "the broker does not let us in" in result.stderr and "Traceback" not in result.stderr
    finally:
        server.stop()


def certificates(folder):
    """A certificate authority, and a certificate and key of a server and of a client which it has signed."""

    def openssl(*words):
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=folder)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-subj", "/CN=ours", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-days", 2, *signing, "-out", f"{name}.pem")
    return folder / "ca.pem", *((folder / f"{name}.pem", folder / f"{name}.key") for name in ("server", "client"))
