"""The alphabet: the events that each part of a transfer stands for.

The plan and the rewritten graphs are both spelled in it, so an offload, release, reload or ready means one thing. Each
wait comes right before the work that needs it: that is why the loss of any one shows (law 6).
"""

from __future__ import annotations

from graphoffload.ordering.events import COMPUTE, D2H, H2D, QUEUE, Event


def device(storage: str) -> str:
    """Name the device memory of `storage` as forward made it."""
    return f"device:{storage}"


def host(storage: str) -> str:
    """Name the slot of `storage`."""
    return f"host:{storage}"


def reload(storage: str) -> str:
    """Name the device memory that `storage` comes back to."""
    return f"reload:{storage}"


def offload_events(storage: str) -> tuple[Event, ...]:
    """Copy to the host: from the present state of the source, into a slot that earlier work no longer uses."""
    label = f"offload {storage}"
    return (
        Event(COMPUTE, "run", label, allocs=(host(storage),)),
        Event(COMPUTE, "record", label, token=f"offload:{storage}"),
        # The copy must not start before the source has been computed, nor before the slot's last owner has let go.
        Event(D2H, "wait", label, token=f"offload:{storage}"),
        Event(D2H, "run", label, reads=(device(storage),), writes=(host(storage),)),
        Event(D2H, "record", label, token=f"d2h:{storage}"),
    )


def release_events(storage: str, *, source: str, wait: bool) -> tuple[Event, ...]:
    """Free the device memory of `source`, normally `storage` itself, once the copy of `storage` has ended.

    With `wait` the compute stream waits. Without, the in-flight queue takes the reference over and drops it at some
    later moment: no sooner than the copy has ended, and at any time after that as far as compute can tell.
    """
    label = f"release {storage}"
    copied = f"d2h:{storage}"
    freed = (device(source),)
    if wait:
        # The memory goes to whoever allocates next on the compute stream: the copy out of it must have ended.
        return Event(COMPUTE, "wait", label, token=copied), Event(COMPUTE, "run", label, frees=freed)
    return (
        Event(COMPUTE, "run", label, reads=freed),
        Event(COMPUTE, "record", label, token=f"release:{storage}"),
        # The queue must not drop what compute has yet to read, nor what the copy has yet to read.
        Event(QUEUE, "wait", label, token=f"release:{storage}"),
        Event(QUEUE, "wait", label, token=copied),
        Event(QUEUE, "run", label, frees=freed),
    )


def reload_events(storage: str) -> tuple[Event, ...]:
    """Copy back, into memory allocated on the compute stream."""
    label = f"reload {storage}"
    return (
        Event(COMPUTE, "run", label, allocs=(reload(storage),)),
        Event(COMPUTE, "record", label, token=f"reload:{storage}"),
        # The memory was somebody else's on the compute stream until now: that work must have ended.
        Event(H2D, "wait", label, token=f"reload:{storage}"),
        # The slot is whole only once its own copy out has ended (implied if the release waited; else not).
        Event(H2D, "wait", label, token=f"d2h:{storage}"),
        Event(H2D, "run", label, reads=(host(storage),), writes=(reload(storage),)),
        Event(H2D, "record", label, token=f"h2d:{storage}"),
    )


def ready_events(storage: str, *, slot: str) -> tuple[Event, ...]:
    """Let compute read the reloaded `storage`, and give back the slot of `slot`, normally `storage` itself."""
    label = f"ready {storage}"
    return (
        # Compute reads the memory next, and the slot's next owner starts after compute: the copy back must have ended.
        Event(COMPUTE, "wait", label, token=f"h2d:{storage}"),
        Event(COMPUTE, "run", label, frees=(host(slot),)),
    )
