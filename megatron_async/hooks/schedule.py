"""Megatron's pipeline schedules, and what crosses stages around them."""

import functools
from typing import Any

from megatron_async.hooks.row import TRAINING, hook, row

__all__ = ["ROWS", "asynchronous", "embedding_gradients", "forward_pre_hook", "timed_receive"]


@hook
def asynchronous(original: Any) -> Any:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        forward_backward = original(*args, **kwargs)
        if run.engine is not None:
            forward_backward = functools.partial(run.engine.forward_backward, forward_backward)
        return _timing_data(forward_backward)

    return get_forward_backward_func


def _timing_data(forward_backward: Any) -> Any:
    """Count the time that a training step waits for data, if the bubble is measured."""
    from megatron_async.runtime.run import run

    measured = run.bubble
    if measured is None:
        return forward_backward

    from megatron_async.runtime.counters.bubble import TimedIterator

    def timed(*, data_iterator: Any, forward_only: bool = False, **kwargs: Any) -> Any:
        if not forward_only:
            if isinstance(data_iterator, list):
                data_iterator = [TimedIterator(it, measured.meter) for it in data_iterator]
            elif data_iterator is not None:
                data_iterator = TimedIterator(data_iterator, measured.meter)
        return forward_backward(data_iterator=data_iterator, forward_only=forward_only, **kwargs)

    return timed


@hook
def embedding_gradients(original: Any) -> Any:
    @functools.wraps(original)
    def allreduce_word_embedding_grads(*args: Any, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        if run.deferring:
            return None
        if run.bubble is not None:
            run.bubble.wait_for_stages()
        return original(*args, **kwargs)

    return allreduce_word_embedding_grads


@hook
def timed_receive(original: Any) -> Any:
    @functools.wraps(original)
    def communicate(self: Any, *, recv_prev: bool, recv_next: bool, **kwargs: Any) -> Any:
        from megatron_async.runtime.run import run

        measured = run.bubble
        if measured is None or not (recv_prev or recv_next):
            return original(self, recv_prev=recv_prev, recv_next=recv_next, **kwargs)
        from megatron_async.runtime.counters.bubble import TimedRequest

        with measured.meter.waiting():
            *received, requests = original(self, recv_prev=recv_prev, recv_next=recv_next, **kwargs)
        if isinstance(requests, dict):  # of an interleaved schedule, which waits for them itself
            requests = {
                name: TimedRequest(request, measured.meter) if name.startswith("recv") else request
                for name, request in requests.items()
            }
        return *received, requests

    return communicate


@hook
def forward_pre_hook(original: Any) -> Any:
    @functools.wraps(original)
    def should_disable_forward_pre_hook(args: Any) -> Any:
        from megatron_async.runtime.run import run

        return False if run.engine is not None else original(args)

    return should_disable_forward_pre_hook


ROWS = (
    *(
        row(module, "get_forward_backward_func", asynchronous, "the pipeline schedule")
        for module in (
            "megatron.core.pipeline_parallel.schedules",
            "megatron.core.pipeline_parallel",
            TRAINING,
        )
    ),
    row(
        "megatron.core.distributed.finalize_model_grads",
        "_allreduce_word_embedding_grads",
        embedding_gradients,
        "waits for the other end of the pipeline; the deferred update sums the copies",
    ),
    row(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
        "_communicate",
        timed_receive,
        "the time spent in receives, for --log-pipeline-bubble",
    ),
    row(
        TRAINING,
        "should_disable_forward_pre_hook",
        forward_pre_hook,
        "--overlap-param-gather works without Megatron's forward hooks, which do not know of "
        "weight versions",
    ),
)
