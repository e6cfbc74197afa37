"""Metrics: what is counted, each thing once, and how it is read."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from symcomm.errors import BadArgumentError, ResourceError
from symcomm.observe.top.metrics import Meter, Spans
from symcomm.observe.top.model import Live
from symcomm.observe.top.simulate import SimulatedFeed

prometheus_parser = pytest.importorskip("prometheus_client.parser")

pytestmark = pytest.mark.without_torch
SECOND = 1_000_000_000


def values(meter: Meter) -> dict[tuple, float]:
    """(name, labels in order) -> value, as a Prometheus server would parse it."""
    _, text = meter.render()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in prometheus_parser.text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")  # when a counter was made
    }


def played(ranks: int, seconds: float, **options) -> tuple[Live, Meter]:
    now = [100 * SECOND]
    live, meter = Live(SimulatedFeed(ranks, clock=lambda: now[0], history=0, **options)), Meter()
    for _ in range(int(seconds * 2)):
        now[0] += SECOND // 2
        live.refresh()
        meter.add(live)
    return live, meter


def test_every_operation_is_counted_once():
    live, meter = played(3, 8)
    found = values(meter)
    counted = sum(v for (name, _), v in found.items() if name == "symcomm_operations_total")
    finished = sum(len(m.ends) for m in [*live.over, *live.running.values()])
    assert counted == finished > 50
    kind = (("collective", "all_reduce"), ("group", "world"))
    assert found["symcomm_latency_seconds_count", kind] == found["symcomm_operations_total", kind]
    assert found["symcomm_latency_seconds_bucket", (kind[0], kind[1], ("le", "+Inf"))] > 0
    nbytes = sum(
        m.first.nbytes * len(m.ends) for m in [*live.over, *live.running.values()] if m.first.call == "all_reduce"
    )
    assert found["symcomm_bytes_total", kind] == nbytes
    assert found["symcomm_waited_seconds_total", kind] > 0
    ways = (*kind, ("thread", "inline"), ("way", "short"))
    assert found["symcomm_calls_total", ways] == found["symcomm_operations_total", kind]
    copied = [
        v for (name, labels), v in found.items() if name == "symcomm_path_bytes_total" and set(kind) <= set(labels)
    ]
    assert sum(copied) == nbytes
    for rank in "012":
        assert found["symcomm_rank_up", (("rank", rank),)] == 1
        assert found["symcomm_recorded_operations_total", (("rank", rank),)] >= counted // 3
        assert found["symcomm_arena_bytes", (("rank", rank),)] >= 160 << 20
    assert found["symcomm_stuck", ()] == 0


def test_a_stuck_job_shows():
    _, meter = played(4, 14, stuck=2, stuck_after=3)
    found = values(meter)
    assert found["symcomm_stuck", ()] == 1
    assert [found["symcomm_rank_lag", (("rank", str(r)),)] for r in range(4)] == [0, 0, 1, 0]


def test_a_text_file(tmp_path):
    _, meter = played(2, 3)
    target = tmp_path / "symcomm.prom"
    meter.write(target)
    assert target.read_bytes() == meter.render()[1] and list(tmp_path.iterdir()) == [target]
    with pytest.raises(ResourceError, match="cannot be written"):
        meter.write(tmp_path / "missing" / "file.prom")


def test_two_meters_do_not_mix():
    assert values(played(2, 3)[1]) == values(played(2, 3)[1])


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ResourceError, match=r"'prometheus_client' is not installed; `pip install symcomm\[metrics\]`"):
        Meter()
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ResourceError, match=r"`pip install symcomm\[otel\]`"):
        Spans()


def test_spans():
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    memory, provider = export.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    now = [100 * SECOND]
    live, spans = Live(SimulatedFeed(2, clock=lambda: now[0], history=0)), Spans(provider.get_tracer("test"))
    now[0] += 2 * SECOND
    live.refresh()
    spans.add(live)
    told = memory.get_finished_spans()
    ended = [o for operations in live.sample.operations.values() for o in operations if o.finished_ns is not None]
    assert len(told) == len(ended) > 10
    assert {s.name for s in told} == {f"symcomm.{o.call}" for o in ended}
    lengths = sorted(o.finished_ns - o.created_ns for o in ended)
    assert sorted(s.end_time - s.start_time for s in told) == lengths
    assert told[0].attributes["symcomm.group"] == "world" and "train.py" in told[0].attributes["code.location"]


def tell(spans: Spans, finish: Callable[[], None]) -> None:
    """One second of two ranks."""
    now = [100 * SECOND]
    live = Live(SimulatedFeed(2, clock=lambda: now[0], history=0))
    now[0] += SECOND
    live.refresh()
    spans.add(live)
    finish()


def test_spans_go_where_the_environment_says(monkeypatch, capsys):
    """Here to the console. The ordinary way, OTLP, needs its exporter and a place to send to."""
    pytest.importorskip("opentelemetry.sdk.trace")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
    spans, finish = Spans.from_environment()
    tell(spans, finish)
    said = capsys.readouterr().out
    assert '"symcomm.all_reduce"' in said and '"service.name": "my-training"' in said
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(BadArgumentError, match="OTEL_TRACES_EXPORTER must be otlp or console, got 'zipkin'"):
        Spans.from_environment()


def test_spans_over_otlp(monkeypatch):
    """What a collector gets: the exporter's own requests, at the address in the environment."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.headers["Content-Type"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
        spans, finish = Spans.from_environment()
        tell(spans, finish)
        server.shutdown()
        thread.join(10)
    assert got and {(path, kind) for path, kind, _ in got} == {("/v1/traces", "application/x-protobuf")}
    assert b"symcomm.all_reduce" in b"".join(body for _, _, body in got)
