"""Model of an object store with conditional writes, and the clients of obstore that speak to it.

The real `ObjectStore` of zarr and the real store of this package run on it: only the functions of
``obstore`` are others. Each request waits until the scheduler lets it arrive. What then happens is
another choice:

=================  ==============================================================================
``done``           The server performs the request, and the client gets the reply.
``cut``            The reply to a read has too few bytes; its headers tell the true size.
``failed``         The request never arrives; the client gets an error.
``reply lost``     The request takes effect; the client gets an error.
``repeated``       It takes effect, a proxy sends it again, and the client gets the refusal of that.
``refused``        The server refuses a write with a condition though the condition holds (409).
``late``           The client gets an error, and the request takes effect at any later time.
``killed``         The process of the client ends before the request arrives.
=================  ==============================================================================

ETags are those of S3, a digest of the bytes: a state that comes back has its old ETag. Pauses
take no time.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from hashlib import md5
from typing import Any, cast

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    NotModifiedError,
    PreconditionError,
)
from zarr.core.sync import loop as loop_of_zarr
from zarr.storage import ObjectStore

from tests.simulation.scheduler import Chooser, Step

__all__ = ["READ_FAULTS", "WRITE_FAULTS", "Client", "Killed", "Loop", "Server", "installed"]

READ_FAULTS = ("cut", "failed")
WRITE_FAULTS = ("failed", "reply lost", "repeated", "refused")


class Killed(BaseException):
    """The process has ended: no handler for errors catches it."""


class Loop:
    """Event loop that runs until nothing is ready. A pause takes no time.

    It has what tasks and futures ask of a loop.
    """

    def __init__(self) -> None:
        self._ready: deque[tuple[Any, Sequence[Any], Context]] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._now = 0.0
        self._n_timers = 0

    def run(self) -> None:
        """Run all callbacks, those of timers, too."""
        ready = self._ready
        while True:
            while ready:
                callback, args, context = ready.popleft()
                context.run(callback, *args)
            if not self._timers:
                return
            self._now, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                timer._run()

    def time(self) -> float:
        return self._now

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)  # type: ignore[arg-type]

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self, **options)  # type: ignore[arg-type]

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> None:
        """Run a callback soon. A handle of it would cost more than the call, and none is used."""
        self._ready.append((callback, args, copy_context() if context is None else context))

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)  # type: ignore[arg-type]
        self._n_timers += 1
        heapq.heappush(self._timers, (when, self._n_timers, timer))
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        """It is not run when its time comes."""

    def call_exception_handler(self, context: Mapping[str, Any]) -> None:
        """A killed process tells nothing."""


class Client:
    """An obstore client of one process."""

    def __init__(self, server: Server, name: str) -> None:
        self.server = server
        self.name = name
        self.is_dead = False
        self.n_requests = 0


Client.__module__ = "obstore.simulated"  # zarr asks for it


@dataclass(frozen=True, slots=True)
class Object:
    """A stored object."""

    data: bytes
    attributes: Mapping[str, str]
    etag: str

    def meta(self, path: str) -> dict[str, Any]:
        return {
            "path": path,
            "last_modified": None,
            "size": len(self.data),
            "e_tag": self.etag,
            "version": None,
        }


@dataclass(slots=True)
class Reply:
    """Reply to a GET."""

    meta: dict[str, Any]
    attributes: Mapping[str, str]
    data: bytes

    async def bytes_async(self) -> bytes:
        return self.data


@dataclass(slots=True, eq=False)
class _Request:
    client: Client
    steps: list[Step]
    """Its arrival, then the faults that may come instead."""
    perform: Callable[[], Any]
    reply: asyncio.Future[Any] | None
    """``None``: the client waits no more."""


@dataclass(slots=True)
class Server:
    """Objects, and the requests that are on their way to them.

    Requests for other keys than those `scheduled` are replied to immediately: metadata.
    """

    chooser: Chooser
    scheduled: Collection[str] = ()
    read_faults: Sequence[str] = READ_FAULTS
    write_faults: Sequence[str] = WRITE_FAULTS
    n_faults: int = 0
    """Faults that may still come."""
    n_kills: int = 0
    objects: dict[str, Object] = field(default_factory=dict)
    pending: list[_Request] = field(default_factory=list)
    schedule: list[tuple[int, Step]] = field(default_factory=list)
    """Choices that were made."""
    strangers: list[tuple[str, str, Callable[[], None]]] = field(default_factory=list)
    """What another program does to an object at some time, or never: name, key, call."""

    def put(self, key: str, data: bytes, attributes: Mapping[str, str] = {}) -> None:
        etag = f'"{md5(data, usedforsecurity=False).hexdigest()}"'
        self.objects[key] = Object(data, attributes, etag)

    async def request(
        self,
        client: Client,
        name: str,
        key: str,
        perform: Callable[[], Any],
        faults: Sequence[str],
        *,
        is_read: bool,
    ) -> Any:
        if client.is_dead:
            raise Killed
        if key not in self.scheduled:
            return perform()
        client.n_requests += 1
        at = client.name, client.n_requests, name, key, is_read
        steps = [Step(*at, False, "done")]
        if self.n_faults:
            steps += [Step(*at, True, fault) for fault in faults]
        reply = asyncio.get_running_loop().create_future()
        self.pending.append(_Request(client, steps, perform, reply))
        try:
            return await reply
        finally:
            del reply  # or an error in it and this frame keep each other

    def run(self, loop: Loop) -> None:
        """Let requests arrive until no client waits."""
        loop.run()
        while any(request.reply is not None for request in self.pending):
            steps, takers = self._steps()
            position = self.chooser.choose(steps)
            step, taker = steps[position], takers[position]
            self.schedule.append((position, step))
            if isinstance(taker, int):
                self.strangers.pop(taker)[2]()
            elif step.outcome == "killed":
                self._kill(step.client)
            else:
                self._arrive(taker, step.outcome if step.is_fault else "done")
            loop.run()

    def _steps(self) -> tuple[list[Step], list[Any]]:
        """Return the steps that can be taken, and the request, or the stranger, of each."""
        requests = self.pending
        if len(requests) > 1:
            requests = sorted(requests, key=lambda request: request.steps[0])
        steps = [request.steps[0] for request in requests]
        takers: list[Any] = list(requests)
        if self.n_faults:
            for request in requests:
                steps += request.steps[1:]
                takers += [request] * (len(request.steps) - 1)
        if self.n_kills:
            names = dict.fromkeys(r.client.name for r in requests if r.reply is not None)
            steps += [Step(name, 0, "", "", False, True, "killed") for name in names]
            takers += [None] * len(names)
        for i, (name, key, _) in enumerate(self.strangers):
            steps.append(Step("stranger", i, name, key, False, True))
            takers.append(i)
        return steps, takers

    def _arrive(self, request: _Request, outcome: str) -> None:
        reply = request.reply
        self.n_faults -= outcome != "done"
        result: Any = None
        error: Exception | None = None
        if outcome in ("done", "cut", "reply lost", "repeated"):
            try:
                result = request.perform()
            except Exception as raised:
                error = raised.with_traceback(None)  # without this frame, and all that called it
        if outcome == "cut" and result is not None:
            result.data = result.data[: len(result.data) // 2]
        if outcome == "repeated" and error is None:
            error = PreconditionError("the object is another one: the request came twice")
        if outcome == "refused":
            error = PreconditionError("another write of the object is under way")
        if outcome in ("failed", "reply lost", "late"):
            error = GenericError("connection reset by peer")
        if outcome == "late":
            request.reply = None
            request.steps = [request.steps[0]._replace(outcome="arrives late")]
        else:
            self.pending.remove(request)
        if reply is None or reply.done():
            return
        if error is not None:
            reply.set_exception(error)
        else:
            reply.set_result(result)

    def break_off(self, loop: Loop) -> None:
        """End the clients that wait, in the middle of a run."""
        for name in {request.client.name for request in self.pending}:
            self._kill(name)
        loop.run()

    def _kill(self, name: str) -> None:
        self.n_kills -= 1
        mine = [r for r in self.pending if r.client.name == name and r.reply is not None]
        self.pending = [r for r in self.pending if r not in mine]
        for request in mine:
            request.client.is_dead = True
            if request.reply is not None and not request.reply.done():
                request.reply.set_exception(Killed())


# ------------------------------------------------------------------ functions of obstore


async def get_async(client: Client, path: str, *, options: Any = None) -> Reply:
    server = client.server

    def perform() -> Reply:
        found = _found(server, path)
        asked = options or {}
        if asked.get("if_none_match") == found.etag:
            raise NotModifiedError("not modified")
        data = found.data
        match asked.get("range"):
            case (start, stop):
                if start >= len(data):
                    raise GenericError("the range starts behind the end")
                data = data[start:stop]
            case {"suffix": nbytes}:
                data = data[-nbytes:] if nbytes else b""
            case {"offset": start}:
                data = data[start:]
        return Reply(found.meta(path), found.attributes, data)

    return await server.request(  # type: ignore[no-any-return]
        client, f"GET {options or ''}", path, perform, server.read_faults, is_read=True
    )


async def head_async(client: Client, path: str) -> dict[str, Any]:
    server = client.server

    def perform() -> dict[str, Any]:
        return _found(server, path).meta(path)

    faults = [fault for fault in server.read_faults if fault != "cut"]
    return await server.request(  # type: ignore[no-any-return]
        client, "HEAD", path, perform, faults, is_read=True
    )


async def put_async(
    client: Client,
    path: str,
    data: Any,
    *,
    mode: Any = None,
    use_multipart: bool = False,
    attributes: Mapping[str, str] = {},
) -> dict[str, Any]:
    server, stored = client.server, bytes(data)

    def perform() -> dict[str, Any]:
        found = server.objects.get(path)
        if mode == "create" and found is not None:
            raise AlreadyExistsError("there is an object")
        if isinstance(mode, dict):
            if found is None:
                raise FileNotFoundError("there is no object")
            if found.etag.strip('"') != mode["e_tag"].strip('"'):
                raise PreconditionError("the object is another one")
        server.put(path, stored, attributes)
        return {"e_tag": server.objects[path].etag, "version": None}

    has_condition = mode is not None
    faults = [f for f in server.write_faults if has_condition or f in ("failed", "reply lost")]
    condition = mode["e_tag"].strip('"') if isinstance(mode, dict) else mode
    name = f"PUT if {condition}" if has_condition else "PUT"
    return await server.request(  # type: ignore[no-any-return]
        client, name, path, perform, faults, is_read=False
    )


async def delete_async(client: Client, path: str | Sequence[str]) -> None:
    server = client.server
    for key in [path] if isinstance(path, str) else path:
        await server.request(
            client,
            "DELETE",
            key,
            lambda key=key: server.objects.pop(key, None),  # type: ignore[misc]
            ("failed", "reply lost"),
            is_read=False,
        )


def _found(server: Server, path: str) -> Object:
    found = server.objects.get(path)
    if found is None:
        raise FileNotFoundError(path)
    return found


async def _listed(client: Client, prefix: str | None = None) -> AsyncIterator[list[dict[str, Any]]]:
    """``list``, in one page and one moment."""
    objects = client.server.objects.items()
    yield [each.meta(key) for key, each in sorted(objects) if key.startswith(prefix or "")]


@contextmanager
def installed(loop: Loop) -> Iterator[None]:
    """Let zarr and this package speak to the model."""
    calls: dict[str, Any] = {
        call.__name__: call for call in (get_async, head_async, put_async, delete_async)
    }
    calls["list"] = _listed
    before, uniform = {name: getattr(obstore, name) for name in calls}, random.uniform
    running, of_zarr = asyncio._get_running_loop(), loop_of_zarr[0]
    vars(obstore).update(calls)  # mock.patch would take a tenth of a short run
    random.uniform = lambda a, b: b
    asyncio._set_running_loop(loop)  # type: ignore[arg-type]
    loop_of_zarr[0] = cast(asyncio.AbstractEventLoop, loop)
    try:
        yield
    finally:
        loop_of_zarr[0] = of_zarr
        asyncio._set_running_loop(running)
        vars(obstore).update(before)
        random.uniform = uniform


def object_store(client: Client) -> ObjectStore[Any]:
    """The client as a zarr store."""
    return ObjectStore(client)
