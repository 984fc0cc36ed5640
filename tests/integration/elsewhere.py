"""Producers in other processes."""

from contextlib import asynccontextmanager

from tests.world.node import Node

from .producing import producing


class Child(Node):
    """A process that hosts producers."""

    @asynccontextmanager
    async def producing(self, shape, *, there=producing, **settings):
        """Open a producer there, with the methods of ``Producer``."""
        producer = await self.open_another(there, shape, **settings)
        try:
            yield producer
        finally:
            if self.lives:
                self.resume()  # one that a failed test left stopped would not answer
                await producer.close()
