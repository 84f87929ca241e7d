"""Metrics and health of a worker or a store writer, in Prometheus' text form, over HTTP on this machine's address."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tensorrt_llm_ext.errors import InputError, MissingExtra

_FILL = (0.1, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
_WAITS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)


class Metrics:
    """The counters, each registered once for one process part. Raises MissingExtra without prometheus-client."""

    def __init__(self) -> None:
        try:
            import prometheus_client as prometheus
        except ImportError as error:
            raise MissingExtra(
                "metrics need the extra 'worker'",
                expected="the package prometheus-client",
                found=error,
                fix="pip install 'tensorrt_llm_ext[worker]'",
            ) from error
        self.registry = registry = prometheus.CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()):
            return prometheus.Counter(f"extract_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str):
            return prometheus.Gauge(f"extract_{name}", text, registry=registry)

        self.tokens = counter("tokens", "Tokens of work items that were answered; its rate is tokens/s.")
        self.items = counter("items", "Work items by what became of them.", ("outcome",))
        self.refusals = counter("refusals", "Refused and failed work items by reason.", ("code",))
        self.given_back = counter("given_back", "Work items given back to the broker by reason.", ("reason",))
        self.backpressure_s = counter("backpressure_seconds", "Seconds spent waiting for the store to make room.")
        self.reopened = counter("engine_reopened", "Times the engine was opened again after a batch failed.")
        self.commits = counter("commits", "Commits of the store.")
        self.waiting_tokens = gauge("waiting_tokens", "Tokens taken from the broker that wait for a batch.")
        self.tokens_in_flight = gauge("tokens_in_flight", "Tokens taken from the broker and not settled.")
        self.connected = gauge("connected", "Whether the broker can be reached.")
        self.batch_fill = prometheus.Histogram(
            "extract_batch_fill", "Tokens of a batch over its budget.", buckets=_FILL, registry=registry
        )
        self.doorbell_wait_s = prometheus.Histogram(
            "extract_doorbell_wait_seconds", "Seconds waited for a batch to come back.", buckets=_WAITS_S, registry=registry
        )

    def value(self, name: str, **labels: str) -> float:
        """A sample by its name (``extract_tokens_total``); 0 where there is none yet."""
        return self.registry.get_sample_value(name, labels) or 0.0


class MetricsServer:
    """Serves ``/metrics`` and ``/health`` (200 while at work, 503 otherwise). A context manager."""

    def __init__(self, metrics: Metrics, health: Callable[[], dict], port: int, address: str = "127.0.0.1") -> None:
        from prometheus_client import make_wsgi_app

        prometheus = make_wsgi_app(metrics.registry)

        def app(environ, start_response):
            if environ["PATH_INFO"] == "/metrics":
                return prometheus(environ, start_response)
            is_health = environ["PATH_INFO"] == "/health"
            state = health() if is_health else {"error": "no such path: /metrics, /health"}
            status = "404 Not Found" if not is_health else "200 OK" if state["healthy"] else "503 Service Unavailable"
            start_response(status, [("Content-Type", "application/json")])
            return [json.dumps(state).encode()]

        try:
            self._server = make_server(address, port, app, WSGIServer, _Quiet)
        except OSError as error:
            raise InputError(
                f"metrics cannot be served at {address}:{port}",
                expected="a free port",
                found=error,
                fix="name another with --metrics-port",
            ) from error
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Quiet(WSGIRequestHandler):
    def log_message(self, *message: object) -> None:
        """Say nothing of each request."""
