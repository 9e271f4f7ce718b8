"""vLLM's connector for hidden states on a machine without an accelerator; loaded by its server.

The stock one copies on a stream of its own into pinned memory. Neither exists on CPUs alone: the
engine dies at the first request. Here the rows are simply copied; everything else is vLLM's.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (  # type: ignore[import-not-found]
    example_hidden_states_connector as stock,
)


class _Ready:
    """Stands for a device's event: a copy on the CPU is over when it returns."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class CpuHiddenStatesConnector(stock.ExampleHiddenStatesConnector):  # type: ignore[misc]
    def _submit_async_write(self, pending: stock.PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)[:, None]
        slots = (blocks * self._block_size + torch.arange(self._block_size)).flatten()
        count = pending.token_ids.shape[0]
        tensors = {
            "hidden_states": stock.extract_from_kv_cache(self._kv_cache, slots, count).clone(),
            "token_ids": pending.token_ids.clone(),
        }
        ready, lock = _Ready(), self._lock_fds.pop(pending.req_id, None)
        future = self._executor.submit(self._write_tensors, tensors, ready, pending.filename, lock)
        self._req_copy_events[pending.req_id] = ready
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))
