"""Streams and events that are recorded, in place of the CPU backend's, which do nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

from megatron_async.cpu_backend import torch_rows
from megatron_async.megatron.replaced import Replacement
from megatron_async.replay.recorder import Recorder
from megatron_async.replay.trace import RecordEvent, Synchronize, UseStream, WaitEvent

__all__ = ["stream_rows"]

_VERSIONS = ">=2.6"


def stream_rows(recorder: Recorder) -> list[Replacement]:
    """The rows for the streams and events of ``torch.cuda``."""
    stream_class, event_class = _classes(recorder)
    default = stream_class(number=0)
    current = [default]

    def current_stream(device: Any = None) -> Any:
        return current[0]

    def default_stream(device: Any = None) -> Any:
        return default

    def set_stream(stream: Any) -> None:
        if stream is not None:
            current[0] = stream
            recorder.stream = stream.number

    @contextlib.contextmanager
    def stream_context(stream: Any) -> Iterator[None]:
        before = current[0]
        set_stream(stream)
        try:
            yield
        finally:
            set_stream(before)

    def synchronize(device: Any = None) -> None:
        recorder.add(Synchronize(why="device", where=recorder.where()))

    def record_stream(original: Any) -> Any:
        def record(self: Any, stream: Any) -> None:
            storage = recorder.memory.find(self)
            if storage is not None and storage.on_device:
                recorder.add(UseStream(storage=storage.number, stream=stream.number))

        return record

    stream_class.entered = stream_context

    def row(attribute: str, value: Any, target: str = "torch.cuda") -> Replacement:
        make: Callable[[Any], Any] = lambda _original: value  # noqa: E731
        return Replacement(
            target=target, attribute=attribute, make=make, why="recorded", versions=_VERSIONS
        )

    return [
        row("Stream", stream_class),
        row("ExternalStream", stream_class),
        row("Event", event_class),
        row("stream", stream_context),
        row("current_stream", current_stream),
        row("default_stream", default_stream),
        row("set_stream", set_stream),
        row("synchronize", synchronize),
        Replacement(
            target="torch:Tensor",
            attribute="record_stream",
            make=record_stream,
            why="recorded",
            versions=_VERSIONS,
        ),
    ]


def _classes(recorder: Recorder) -> tuple[Any, Any]:
    class Event(torch_rows.Event):
        """Stands in for ``torch.cuda.Event``. Waiting for one that was not recorded does nothing,
        as on a GPU."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.number: int | None = None

        def record(self, stream: Any = None) -> None:
            super().record()
            self.number = recorder.next_event()
            recorder.add(RecordEvent(event=self.number, stream=_number(stream)))

        def wait(self, stream: Any = None) -> None:
            if self.number is not None:
                recorder.add(
                    WaitEvent(event=self.number, stream=_number(stream), where=recorder.where())
                )

        def synchronize(self) -> None:
            self._wait_on_host("event")

        def query(self) -> bool:
            # The program goes on as it does once the event has happened.
            self._wait_on_host("query of an event")
            return True

        def _wait_on_host(self, why: str) -> None:
            if self.number is not None:
                recorder.add(Synchronize(why=why, event=self.number, where=recorder.where()))

    class Stream(torch_rows.Stream):
        """Stands in for ``torch.cuda.Stream``; 0 is the default stream."""

        entered: Any = None
        """The context manager that makes a stream the current one."""

        def __init__(self, *_args: Any, number: int | None = None, **_kwargs: Any) -> None:
            self.number = recorder.next_stream() if number is None else number
            self._contexts: list[Any] = []

        @property
        def cuda_stream(self) -> int:  # type: ignore[override]
            return self.number

        @property
        def stream_id(self) -> int:  # type: ignore[override]
            return self.number

        def __enter__(self) -> Self:
            context = type(self).entered(self)
            context.__enter__()
            self._contexts.append(context)
            return self

        def __exit__(self, *exc: object) -> None:
            self._contexts.pop().__exit__(*exc)

        def wait_stream(self, stream: Any) -> None:
            self.wait_event(stream.record_event())

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def synchronize(self) -> None:
            recorder.add(Synchronize(why="stream", stream=self.number, where=recorder.where()))

        def query(self) -> bool:
            recorder.add(
                Synchronize(why="query of a stream", stream=self.number, where=recorder.where())
            )
            return True

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

    def _number(stream: Any) -> int:
        return recorder.stream if stream is None else int(stream.number)

    return Stream, Event
