"""Metrics for Prometheus and spans for OpenTelemetry, made from a feed.

Both libraries are optional: ``pip install 'symcomm[metrics]'``, ``'symcomm[otel]'``. A ``Meter`` or ``Spans`` is handed
the model after each refresh (``add``); it counts operations that have ended, each once. `symcomm top` does so for a
whole job; a rank's server does so for that rank alone, at each request for ``/api/v1/metrics``.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.observe.recorder.records import Operation
from symcomm.observe.server.handlers import route
from symcomm.observe.server.requests import Request, Response

if TYPE_CHECKING:
    from symcomm.observe.top.model import Live

# Seconds: from a small all_reduce in shared memory (about a microsecond) to a wait for a disk.
BUCKETS = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)

WAYS_TO_WAIT = ("looked", "yielded", "slept")


def _library(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        fix = f"`pip install symcomm[{extra}]`"
        raise errors.ResourceError(f"metrics: the library {name!r} is not installed; {fix}.") from None


class _Children:
    """Several metrics under the same labels, which are looked up once, since that is slow."""

    def __init__(self, **metrics: Any):
        self._metrics = metrics
        self._known: dict[tuple[str, ...], SimpleNamespace] = {}

    def __call__(self, *labels: str) -> SimpleNamespace:
        found = self._known.get(labels)
        if found is None:
            children = {name: metric.labels(*labels) for name, metric in self._metrics.items()}
            found = self._known[labels] = SimpleNamespace(**children)
        return found


class Meter:
    """Counters of one job, in a registry of its own."""

    def __init__(self) -> None:
        self._prometheus = prometheus = _library("prometheus_client", "metrics")
        self.registry = registry = prometheus.CollectorRegistry()
        Counter, Gauge, Histogram = (
            functools.partial(kind, registry=registry)
            for kind in (prometheus.Counter, prometheus.Gauge, prometheus.Histogram)
        )
        kind, rank = ("collective", "group"), ("rank",)
        seconds = "From the call to its end, on each rank."
        self._kinds = _Children(
            operations=Counter("symcomm_operations", "Operations that ended.", kind),
            bytes=Counter("symcomm_bytes", "Bytes of their tensors.", kind),
            waited=Counter("symcomm_waited_seconds", "Slept until all had come.", kind),
            latency=Histogram("symcomm_latency_seconds", seconds, kind, buckets=BUCKETS),
        )
        ways = (*kind, "way", "thread")
        self._ways = _Children(calls=Counter("symcomm_calls", "Operations that ended, by the path they took.", ways))
        copies = Counter("symcomm_path_bytes", "Bytes by how they went, and why copied.", (*kind, "copies"))
        self._copies = _Children(bytes=copies)
        self._failures = Counter("symcomm_failures", "Operations that failed.", (*kind, "state"))
        self.arena = Gauge("symcomm_arena_bytes", "Memory the rank's arena takes.", rank)
        self._ranks = _Children(
            recorded=Counter("symcomm_recorded_operations", "Operations the rank has begun, seen or not.", rank),
            missed=Counter("symcomm_missed_operations", "Too many at once to be counted one by one.", rank),
            arena=self.arena,
            up=Gauge("symcomm_rank_up", "1 while the rank's process runs.", rank),
            lag=Gauge("symcomm_rank_lag", "Collectives behind the first rank.", rank),
        )
        waits = "Waits of more than 10 us: looked on, yielded the core, or slept."
        self._waits = Counter("symcomm_waits", waits, (*rank, "ended"))
        self._stuck = Gauge("symcomm_stuck", "1 while something is stuck.")
        self._before: dict[int, tuple[int, ...]] = {}  # by rank: recorded, missed, and waits, as counted so far

    def add(self, live: Live) -> None:
        """Count what ``live`` learned in its last refresh."""
        for operations in live.sample.operations.values():
            for operation in operations:
                if operation.finished_ns is not None:
                    self._count(operation)
        for fact, lag in zip(live.ranks, live.lags(), strict=True):
            rank = self._ranks(str(fact.rank))
            waits = (self._waits.labels(str(fact.rank), way) for way in WAYS_TO_WAIT[: len(fact.waits)])
            now = (fact.operations, fact.missed, *fact.waits)
            before = self._before.get(fact.rank, (0,) * len(now))
            for counter, count, counted in zip((rank.recorded, rank.missed, *waits), now, before, strict=False):
                counter.inc(max(0, count - counted))
            self._before[fact.rank] = now
            rank.arena.set(fact.arena_bytes)
            rank.up.set(int(fact.alive))
            rank.lag.set(lag)
        self._stuck.set(int(live.verdict() is not None))

    def _count(self, operation: Operation) -> None:
        assert operation.finished_ns is not None
        kind = self._kinds(operation.call, operation.group)
        kind.operations.inc()
        kind.bytes.inc(operation.nbytes)
        kind.waited.inc(operation.waited_us / 1e6)
        self._ways(operation.call, operation.group, operation.way, operation.thread).calls.inc()
        self._copies(operation.call, operation.group, operation.copies).bytes.inc(operation.nbytes)
        if operation.state == "completed":
            kind.latency.observe(max(0, operation.finished_ns - operation.created_ns) / 1e9)
        else:
            self._failures.labels(operation.call, operation.group, operation.state).inc()

    def render(self) -> tuple[str, bytes]:
        """(content type, text), in Prometheus's format."""
        return "text/plain; version=0.0.4; charset=utf-8", self._prometheus.generate_latest(self.registry)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Replace the file at once, as node_exporter's textfile collector wants it."""
        target = Path(path)
        try:
            self._prometheus.write_to_textfile(str(target), self.registry)
        except OSError as error:
            fix = "name a file in a directory that is yours"
            raise errors.ResourceError(f"metrics: {target} cannot be written ({error.strerror}); {fix}.") from error


# --- of one rank, from its server ------------------------------------------------------------------------------------


class _RankMeter:
    """Counts one rank's operations between requests."""

    def __init__(self, arena: Any):
        from symcomm.observe.top.feed import attach_arena
        from symcomm.observe.top.model import Live

        self.meter = Meter()
        feed = attach_arena(arena.fd)
        weakref.finalize(self, feed.close)
        self.live = Live(feed)
        self.lock = threading.Lock()

    def render(self) -> tuple[str, bytes]:
        with self.lock:
            self.live.refresh()
            self.meter.add(self.live)
            return self.meter.render()


_meters: weakref.WeakKeyDictionary[Any, _RankMeter] = weakref.WeakKeyDictionary()  # by arena
_meters_lock = threading.Lock()


@route("GET", "/api/v1/metrics")
def metrics(request: Request) -> Response:
    """This rank's metrics, in Prometheus's text format."""
    group = request.group
    try:
        with _meters_lock:
            if group.arena not in _meters:
                _meters[group.arena] = _RankMeter(group.arena)
            meter = _meters[group.arena]
    except errors.ResourceError as error:
        raise errors.CallerError(str(error)) from None
    kind, text = meter.render()
    return Response(text, kind)


class Spans:
    """One OpenTelemetry span for every operation that ended. ``tracer`` is the global provider's unless given."""

    def __init__(self, tracer: Any = None):
        self._trace = _library("opentelemetry.trace", "otel")
        self._tracer = tracer or self._trace.get_tracer("symcomm")

    @classmethod
    def from_environment(cls) -> tuple[Spans, Callable[[], None]]:
        """Spans that go where OpenTelemetry's own variables say, and a function to call at the end, which sends the
        last ones.

        ``OTEL_TRACES_EXPORTER`` is otlp (then ``OTEL_EXPORTER_OTLP_ENDPOINT`` says where to) or console."""
        sdk = _library("opentelemetry.sdk.trace", "otel")
        export = _library("opentelemetry.sdk.trace.export", "otel")
        resources = _library("opentelemetry.sdk.resources", "otel")
        kind = os.environ.get("OTEL_TRACES_EXPORTER", "otlp")
        if kind == "otlp":
            exporter = _library("opentelemetry.exporter.otlp.proto.http.trace_exporter", "otel").OTLPSpanExporter()
        elif kind == "console":
            exporter = export.ConsoleSpanExporter(out=sys.stdout)
        else:
            raise errors.bad_argument("symcomm top", "OTEL_TRACES_EXPORTER", kind, "otlp or console")
        named = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "symcomm")}
        provider = sdk.TracerProvider(resource=resources.Resource.create(named))
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
        return cls(provider.get_tracer("symcomm")), provider.shutdown

    def add(self, live: Live) -> None:
        offset = time.time_ns() - time.monotonic_ns()
        for rank, operations in live.sample.operations.items():
            for operation in operations:
                if operation.finished_ns is not None:
                    self._span(rank, operation, offset)

    def _span(self, rank: int, operation: Operation, offset: int) -> None:
        assert operation.finished_ns is not None
        facts = {
            "symcomm.rank": rank, "symcomm.group": operation.group, "symcomm.sequence": operation.seq,
            "symcomm.bytes": operation.nbytes, "symcomm.dtype": operation.dtype, "symcomm.plan": operation.plan,
            "symcomm.waited_us": operation.waited_us, "code.location": operation.site,
        }  # fmt: skip
        span = self._tracer.start_span(
            f"symcomm.{operation.call}", start_time=operation.created_ns + offset, attributes=facts
        )
        if operation.state != "completed":
            span.set_status(self._trace.StatusCode.ERROR, operation.state)
        span.end(end_time=operation.finished_ns + offset)
