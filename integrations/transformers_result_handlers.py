"""How results of continuous batching reach the handlers of requests, as of transformers 5.19. Only for models whose
attention is ours."""

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.utils import logging


logger = logging.get_logger(__name__)


class ResultRouter(OutputRouter):
    """transformers', in which each handler is called in its own event loop, one that raises keeps no result from
    others, and a request is cancelled whose event loop is closed: it would end the loop of all requests.

    Args:
        cancel: `cancel_request` of the manager.
    """

    def __init__(self, cancel):
        super().__init__()
        self._cancel = cancel

    def deliver(self, output) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs) -> None:
        by_loop: dict = {}
        with self._lock:
            for output in outputs:
                if (entry := self.result_handlers.get(output.request_id)) is None:
                    self.output_queue.put(output)
                else:
                    callback, loop = entry
                    by_loop.setdefault(loop, []).append((callback, output))
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call, loop, calls)
            except RuntimeError:  # the loop is closed
                for _, output in calls:
                    self._forget(output)

    def _forget(self, output) -> None:
        logger.warning(f"{output.request_id}: nobody waits for it any more, as the event loop of its handler is closed")
        with self._lock:
            self.result_handlers.pop(output.request_id, None)
        if not output.is_finished():
            self._cancel(output.request_id)


def _call(loop, calls) -> None:
    for callback, output in calls:
        try:
            callback(output)
        except Exception as error:
            message = f"the result handler of request {output.request_id} raised {error!r}"
            loop.call_exception_handler({"message": message, "exception": error})
