"""The asyncio shell: one worker is the runtime of one rank of an engine."""
