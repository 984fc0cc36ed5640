"""Engines as in ``second_runner``, with vLLM's first model runner, whose calls of the connector are its own."""

from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.forward_context import set_forward_context
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin as Calls

from . import second_runner


class Worker(second_runner.Worker):
    """A rank, which does for each step what ``vllm/v1/worker/gpu_model_runner.py`` does, in the same order."""

    states_late = False  # without drafts, only the forward pass writes them

    def connect(self):
        self.connector.register_kv_caches(self.caches)
        self.connector.set_host_xfer_buffer_ops(copy_kv_blocks)

    def execute_model(self, scheduled):
        with self.active():
            self.connector.handle_preemptions(scheduled.kv_connector_metadata)
            self._prepare(scheduled)
            if not scheduled.total_num_scheduled_tokens:
                return Calls.kv_connector_no_forward(scheduled, self.config)
            drafts = self.config.speculative_config is not None
            with (
                set_forward_context(None, self.config),
                Calls.maybe_get_kv_connector_output(scheduled, defer_finalize=drafts) as transfers,
            ):
                rows = self._launch(scheduled)
            self._step = rows, transfers
            return None

    def _ended(self, transfers):
        if self.config.speculative_config is not None:
            with self.active():
                Calls.finalize_kv_connector()
        return transfers


class Executor(second_runner.Executor):
    """Runs ``Worker`` in this process."""

    worker_class = Worker
