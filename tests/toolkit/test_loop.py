"""The event loop."""

from __future__ import annotations

import os

from shoal_toolkit.system.loop import READ, Loop


def test_an_event_of_a_closed_descriptor_is_not_passed_to_the_next_with_its_number() -> None:
    """Both descriptors are ready in one poll. The first callback replaces the other one."""
    loop = Loop()
    pipes = [os.pipe() for _ in range(2)]
    called: list[str] = []
    replaced: list[int] = []

    def replace(own: int) -> None:
        called.append("first")
        loop.unwatch(own, READ)
        other = next(read for read, _ in pipes if read != own)
        loop.unwatch(other, READ)
        os.close(other)
        read, write = os.pipe()  # has the number of the closed one
        replaced.extend((read, write))
        assert read == other
        loop.watch(read, READ, lambda: called.append("second"))

    try:
        for read, write in pipes:
            loop.watch(read, READ, lambda read=read: replace(read))  # type: ignore[misc]
            os.write(write, b".")
        loop.step()
        assert called == ["first"]
        os.write(replaced[1], b".")
        loop.step()
        assert called == ["first", "second"]
    finally:
        loop.close()
        for descriptor in {*replaced, *(end for pipe in pipes for end in pipe)}:
            os.close(descriptor)
