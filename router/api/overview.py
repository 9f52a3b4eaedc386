"""What the live page asks for: the cluster at a glance, and one request's waterfall. Under the cluster secret, like all of /internal."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Query, Request
from prometheus_client.parser import text_string_to_metric_families

from pd_serve.errors import NotFoundError
from pd_serve.protocol.control import RecentRequests, RequestTimeline
from pd_serve.protocol.overview import OVERVIEW_PATH, WATERFALL_PATH, HistogramView, Overview, RequestRow, Waterfall
from pd_serve.protocol.siblings import Topic
from router.api.internal import authorized, recent_requests
from router.api.ops import own_metrics
from router.metrics_sum import summed
from router.pairs import pair_statuses
from router.services import Services
from router.timeline import NUM_KEPT
from router.waterfall import waterfall
from router.worker_traces import boot_id, noted_by, workers_of

router = APIRouter()


@router.get(OVERVIEW_PATH)
async def overview(request: Request, limit: Annotated[int, Query(ge=0, le=NUM_KEPT)] = 50) -> Overview:
    """`limit`: of recent requests."""
    services = authorized(request)
    figures = await _figures(services)
    recent = await recent_requests(services)
    now = time.monotonic()
    return Overview(
        router_id=services.router_id,
        model=services.model_name,
        not_ready=services.why_not_ready(),
        open_requests=services.occupancy.num_open,
        queued_requests=services.occupancy.num_queued,
        requests_ended=figures.total("pd_serve_requests_total"),
        moves=figures.total("pd_serve_moves_total"),
        rejections=figures.total("pd_serve_rejections_total"),
        prompt_tokens=figures.total("pd_serve_prompt_tokens_total"),
        generated_tokens=figures.total("pd_serve_generated_tokens_total"),
        ttft=figures.histogram("pd_serve_time_to_first_token_seconds"),
        itl=figures.histogram("pd_serve_inter_token_latency_seconds"),
        tpot=figures.histogram("pd_serve_time_per_output_token_seconds"),
        e2e=figures.histogram("pd_serve_request_seconds"),
        workers=services.pool.statuses(),
        pairs=pair_statuses(services.pool.workers, services.pool.refused()),
        requests=tuple(row_of(told, now) for told in recent.requests[:limit]),
    )


@router.get(WATERFALL_PATH)
async def request_waterfall(request: Request, name: str) -> Waterfall:
    """`name`: the id of one of its attempts, of its response or of its client (x-request-id), or the choice's number in the log."""
    services = authorized(request)
    found = find(await recent_requests(services), name)
    if found is None:
        raise NotFoundError(f"no recent request is called {name!r}: this router remembers the last {NUM_KEPT}", "name")
    return waterfall(found, await noted_by(services, workers_of((found,))), boot_id())


def find(recent: RecentRequests, name: str) -> RequestTimeline | None:
    """The newest that fits, ids of attempts first."""
    for told in recent.requests:
        if any(str(attempt.attempt_id) == name for attempt in told.attempts):
            return told
    return next((told for told in recent.requests if name in (told.response_id, told.request_id, str(told.choice))), None)


def row_of(told: RequestTimeline, now: float) -> RequestRow:
    """`now`: monotonic seconds."""
    last = told.attempts[-1] if told.attempts else None
    first_tokens = [attempt.first_token_s for attempt in told.attempts if attempt.first_token_s is not None]
    return RequestRow(
        id=str(told.choice) if last is None else str(last.attempt_id),
        choice=told.choice,
        request_id=told.request_id,
        response_id=told.response_id,
        prompt_tokens=told.prompt_tokens,
        output_tokens=0 if last is None else last.output_tokens,
        prefill=None if last is None else last.prefill,
        decode=None if last is None else last.decode,
        moves=max(0, len(told.attempts) - 1),
        age_s=max(0.0, now - told.arrived_at_s),
        queue_s=told.attempts[0].began_s if told.attempts else None,
        ttft_s=first_tokens[0] if first_tokens else None,
        total_s=told.ended_s,
        outcome=told.outcome,
    )


class Figures:
    """Samples of an exposition by name."""

    def __init__(self, exposition: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str) -> int:
        """Over all labels."""
        return int(sum(value for _, value in self._samples.get(name, ())))

    def histogram(self, name: str) -> HistogramView:
        buckets = [(labels["le"], int(value)) for labels, value in self._samples.get(f"{name}_bucket", ())]
        cumulative = [count for _, count in buckets]
        counts = tuple(count - below for count, below in zip(cumulative, [0, *cumulative], strict=False))
        bounds = tuple(float(bound) for bound, _ in buckets if bound != "+Inf")
        return HistogramView(bounds=bounds, counts=counts, sum=sum(value for _, value in self._samples.get(f"{name}_sum", ())))


async def _figures(services: Services) -> Figures:
    """Of all processes of the router that answer: a page that shows less is better than none."""
    texts = [own_metrics(services)]
    if services.siblings is not None:
        texts += [answer.decode() for answer in (await services.siblings.ask(Topic.METRICS)).data]
    return Figures(summed(texts) if len(texts) > 1 else texts[0])
