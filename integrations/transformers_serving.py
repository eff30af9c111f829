"""`transformers serve --continuous-batching`: each request is answered as it asks, and a client that leaves frees its
pages at once. transformers' server makes one manager with what the first request asks for. Only for models whose
attention is ours; but a request that makes no sense is answered with status 400 for all, where transformers gives 500.
"""

import asyncio
import copy
import functools
import threading
import time
import uuid
from contextvars import ContextVar

from transformers import GenerationConfig
from transformers.cli.serving import server, utils
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging
from transformers.utils.import_utils import is_serve_available

from hf_efficient.generation.stop_strings import CutText, StopStrings, cut
from hf_efficient.integrations import transformers_paged_formats as paged_formats
from hf_efficient.integrations import transformers_request_checks as request_checks
from hf_efficient.integrations import transformers_request_options as request_options
from hf_efficient.integrations.transformers_request_options import OF_SAMPLING, STOPS


logger = logging.get_logger(__name__)
FORGOTTEN_AFTER = 60  # seconds: no step takes longer, and after it nothing is delivered for a cancelled request
# In a generation config, what a request may set here, and what changes no token of continuous batching
_SERVED = {*OF_SAMPLING, STOPS, "max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id"}
_SERVED |= {"use_cache", "cache_implementation", "transformers_version"}
_OF_BODY = "_hf_efficient_of_body"  # attribute of a generation config: what it does not hold of its request, by name
_ALLOWED = {"n": [1], "best_of": [1], "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}]}
_ALLOWED |= {"logprobs": [False], "top_logprobs": [0], "echo": [False], "response_format": [{"type": "text"}]}
_ALLOWED |= {"tool_choice": ["auto", "none"], "functions": [[]], "function_call": ["auto", "none"], "include": [[]]}
_ALLOWED |= {"text": [{"format": {"type": "text"}}, {}], "previous_response_id": [], "background": [False]}
_ALLOWED |= {"audio": [], "modalities": [["text"]], "web_search_options": [], "conversation": []}
_MEDIA = {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"}
_RECEIVE: ContextVar = ContextVar("receive", default=None)  # of the request that is being answered
_ANSWERED: ContextVar = ContextVar("answered", default=False)  # whether the model has


def register() -> None:
    """Puts our methods in the place of the server's. Idempotent."""
    manager, handler = utils.CBGenerateManager, utils.BaseHandler
    if not hasattr(manager.init_cb, "_hf_efficient"):
        handler._build_generation_config = _noting_the_body(handler._build_generation_config)
        manager.init_cb = _for_all_requests(manager.init_cb)
        manager.generate_streaming = _streamed_as_asked(manager.generate_streaming)
        manager.generate_non_streaming = _answered_as_asked(manager.generate_non_streaming)
        utils.CBStreamer = _CutStreamer
        if is_serve_available():  # whose chats cannot be imported else
            from transformers.cli.serving.chat_completion import ChatCompletionHandler as chats
            from transformers.cli.serving.completion import CompletionHandler as completions
            from transformers.cli.serving.response import ResponseHandler as responses

            chats.handle_request = _with_checked_messages(chats.handle_request)
            for kind in (chats, completions, responses):
                kind.handle_request = _refusing_nonsense(kind.handle_request)
        server.build_server = _for_all_clients(server.build_server)


def _noting_the_body(original):
    """The generation config of a request, with what the request names besides: transformers samples only where the
    model's own config says so, and drops what it cannot do."""

    @functools.wraps(original)
    def _build_generation_config(self, body, *args, **kwargs):
        try:
            config = original(self, body, *args, **kwargs)
        except TypeError as error:
            raise ValueError(f"an option has a value of a wrong type: {error}") from error
        if not isinstance(body.get("suffix"), (str, type(None))):
            raise ValueError(f"suffix={body['suffix']!r}: must be a string")
        given = {name: body.get(name) for name in ("temperature", "top_p", *_ALLOWED)} | {"media": _media(body) or None}
        setattr(config, _OF_BODY, {name: value for name, value in given.items() if value is not None})
        return config

    return _build_generation_config


def _media(body: dict) -> list[str]:
    """The types of the parts of its messages that are no text: transformers leaves them out for a model of text."""
    items = body.get("messages") or body.get("input")
    items = items if isinstance(items, list) else []
    contents = [items, *(item.get("content") for item in items)]
    return sorted(_MEDIA & {part.get("type") for parts in contents if isinstance(parts, list) for part in parts})


def _for_all_requests(original):
    """transformers' `init_cb`, whose manager has the model's own generation config, not that of the first request, and
    the options of `hf-efficient serve`."""

    @functools.wraps(original)
    def init_cb(self, model, gen_config):
        config = self._cb_config or ContinuousBatchingConfig()
        if self._cb is None and request_options.becomes_ours(model, config.auto_switch_to_flash):
            self._cb_config = paged_formats.ContinuousBatchingConfig(**paged_formats.served_with)
            for name, value in vars(config).items():
                setattr(self._cb_config, name, value)
            self._cb_config.per_request_processors = True
            gen_config = copy.deepcopy(model.generation_config)
            gen_config.stop_strings = None
        is_new = self._cb is None
        original(self, model, gen_config)
        if is_new:
            threading.Thread(target=_end_with_process, args=(self._cb,), daemon=True).start()

    init_cb._hf_efficient = True
    return init_cb


def _end_with_process(manager) -> None:
    """Ends the thread of `manager` with the main thread, which a second Ctrl-C ends. It would wait for requests for
    ever, and the process for it."""
    threading.main_thread().join()
    if manager.is_running():
        manager.output_router.result_handlers.clear()  # their event loop is closed
        manager.stop(block=False, hard_stop=True)


def _streamed_as_asked(original):
    @functools.wraps(original)
    def generate_streaming(self, model, processor, inputs, gen_config, request_id, *args, **kwargs):
        if self._cb is None or not request_options.is_ours(self._cb.model):
            return original(self, model, processor, inputs, gen_config, request_id, *args, **kwargs)
        name, handlers = _unique(request_id), self._cb.output_router.result_handlers
        with _Refusals(), request_options.giving(_asked(self._cb.model, gen_config, processor)):
            # an answer may come before its handler, which transformers registers last: the loop calls this later
            handlers[name] = (lambda output: handlers[name][0](output)), asyncio.get_running_loop()
            try:
                queue, streamer = original(self, model, processor, inputs, gen_config, name, *args, **kwargs)
            except BaseException:
                del handlers[name]
                raise
        streamer.generation_config, streamer.prompt_tokens = gen_config, len(inputs["input_ids"])
        streamer.tokenizer = _tokenizer_of(processor)
        return queue, streamer

    return generate_streaming


def _answered_as_asked(original):
    @functools.wraps(original)
    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        arguments = self, model, processor, inputs, gen_config
        if self._cb is None or not request_options.is_ours(self._cb.model):
            return await original(*arguments, request_id)
        name = _unique(request_id)
        with _Refusals():
            options = _asked(self._cb.model, gen_config, processor)
            with request_options.giving(options):
                text, prompt_tokens, tokens = await _unless_gone(original(*arguments, name), self._cb, name)
        _ANSWERED.set(True)
        _tell_end(self._cb, gen_config, prompt_tokens, tokens)
        if STOPS in options:
            is_parsed = utils.get_response_template(processor, model) is not None  # with its special tokens
            tokens, begun = cut(tokens, options[STOPS], _tokenizer_of(processor), is_parsed)
            if begun is not None:
                text = processor.decode(tokens, skip_special_tokens=True) if is_parsed else begun
                _end_by_stop(gen_config)
        return text, prompt_tokens, tokens

    return generate_non_streaming


def _unique(request_id: str) -> str:
    """The id of a request in the manager. Clients choose the ones that they are answered with, and may repeat them."""
    return f"{request_id}#{uuid.uuid4().hex}"


def _asked(model, config, processor) -> dict:
    """The options of a request whose generation config the server has made, all of them: nothing is left to the
    manager's.

    Raises ValueError for what it asks for in vain.
    """
    of_body = getattr(config, _OF_BODY)
    for name, allowed in _ALLOWED.items():
        if name in of_body and of_body[name] not in allowed:
            shown = " or ".join(map(str, allowed)) or "none"
            raise ValueError(f"{name}={of_body[name]!r} is not supported in continuous batching: allowed is {shown}")
    if "media" in of_body:
        raise ValueError(f"a message holds {of_body['media'][0]}, and the model reads text only")
    neutral = GenerationConfig._get_default_generation_params()
    for name, value in vars(config).items():
        is_set = value or (name in neutral and value == 0)
        is_given = is_set and value != neutral.get(name) and value != getattr(model.generation_config, name, None)
        if is_given and name not in _SERVED and not name.startswith("_"):
            raise ValueError(f"{name} is not supported in continuous batching, and the request asks for it")
    asks_to_sample = "temperature" in of_body or "top_p" in of_body
    options = {"do_sample": config.temperature != 0 and bool(asks_to_sample or config.do_sample)}
    if "top_p" in of_body:
        request_options.check("top_p", config.top_p)
    if options["do_sample"]:
        options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        given = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        options |= {name: value for name, value in given.items() if value is not None}
    if config.stop_strings:
        options[STOPS] = StopStrings(config.stop_strings, _tokenizer_of(processor), of_answer=True)
    return options


class _Refusals:
    """A context in which a ValueError is the client's, and answered with status 400."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, ValueError):
            from fastapi import HTTPException

            raise HTTPException(400, str(error)) from error


class _CutText(CutText):
    """A `CutText` that keeps the tokens, also those whose text is cut off."""

    def __init__(self, stream, stops):
        super().__init__(stream, stops)
        self.tokens = []

    def step(self, tokenizer, token):
        self.tokens.append(token)
        return super().step(tokenizer, token)


class _CutStreamer(utils.CBStreamer):
    """transformers', whose text ends where a stop string begins, and which forgets a request that is cancelled.

    Attributes:
        generation_config, prompt_tokens: of the request.
        tokenizer: of the model.
    """

    generation_config = prompt_tokens = tokenizer = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._stops = request_options.given().get(STOPS)
        if self._stops is not None:
            self._decode_stream = _CutText(self._decode_stream, self._stops)

    def put(self, output) -> None:
        self._last = output.generated_tokens[-1:]
        super().put(output)

    def end(self) -> None:
        """As transformers', after the text that was held back. What was cut off does not count as usage."""
        _tell_end(self._cb, self.generation_config, self.prompt_tokens, self._last)
        if self._stops is not None:
            if text := self._decode_stream.rest():
                parts = [text]
                if self._parser is not None:
                    parts = utils.response_events_to_chunks(self._parser.feed(text))
                for part in parts:
                    self._queue.put_nowait(part)
            if self._decode_stream.is_cut:
                kept, _ = cut(self._decode_stream.tokens, self._stops, self.tokenizer, self._parser is not None)
                self.total_tokens = len(kept)
                _end_by_stop(self.generation_config)
        super().end()

    def cancel(self) -> None:
        _cancel(self._cb, self._request_id, self._loop)


def _end_by_stop(config) -> None:
    """The handlers say "length" where as many tokens came as `config` allows, also where a stop string ended them."""
    config.max_new_tokens = None


def _tell_end(manager, config, prompt_tokens: int, tokens: list[int]) -> None:
    """They say so, too, where as many came as pages or positions have room for, unless the last of them is an end."""
    end = manager.generation_config.eos_token_id if config.eos_token_id is None else config.eos_token_id
    if tokens and tokens[-1] in ([end] if isinstance(end, int) else end):
        return _end_by_stop(config)
    fits = request_checks.room(getattr(manager.batch_processor, "cache", None), prompt_tokens)
    if fits is not None:
        config.max_new_tokens = fits if config.max_new_tokens is None else min(config.max_new_tokens, fits)


def _tokenizer_of(processor):
    return getattr(processor, "tokenizer", processor)


def _cancel(manager, request_id: str, loop) -> None:
    """Cancels a request. What is still delivered for it goes nowhere, and its handler, which transformers keeps until
    a request is finished, is dropped."""
    router = manager.output_router
    with router._lock:
        router.result_handlers[request_id] = (lambda output: None), loop
    manager.cancel_request(request_id)
    loop.call_later(FORGOTTEN_AFTER, router.result_handlers.pop, request_id, None)


async def _unless_gone(answer, manager, request_id: str):
    """What `answer` returns. The request is cancelled where its client leaves before.

    Raises fastapi's HTTPException then, whose answer nobody reads.
    """
    receive = _RECEIVE.get()
    answered = asyncio.ensure_future(answer)
    tasks = [answered] if receive is None else [answered, asyncio.ensure_future(_disconnected(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        from fastapi import HTTPException

        raise HTTPException(499, "the client closed the connection")
    finally:
        if not answered.done() or answered.exception() is not None:
            _cancel(manager, request_id, asyncio.get_running_loop())
        for task in tasks:
            task.cancel()


async def _disconnected(receive) -> None:
    """Returns when the client is gone. Its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _with_checked_messages(original):
    """The `handle_request` of chats. Raises ValueError for messages that no chat template could read."""

    @functools.wraps(original)
    async def handle_request(self, body, request_id):
        body = {name: value for name, value in body.items() if value is not None or name != "chat_template_kwargs"}
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"messages={messages!r}: must be a list of at least one message")
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f"messages holds {message!r}: a message is an object with a role")
        # a client that sends an answer back has null for what it did not hold, such as tool_calls
        body["messages"] = [{name: value for name, value in each.items() if value is not None} for each in messages]
        return await original(self, body, request_id)

    return handle_request


def _refusing_nonsense(original):
    """A `handle_request` that raises ValueError for a body whose values have types that nothing reads. What fails once
    the model has answered is no fault of the body."""

    @functools.wraps(original)
    async def handle_request(self, body, request_id):
        _ANSWERED.set(False)
        try:
            return await original(self, body, request_id)
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            if _ANSWERED.get():
                raise
            logger.warning(f"refused: {error!r}", exc_info=True)
            raise ValueError(f"the body holds a value of a wrong type: {error!r}") from error

    return handle_request


def _for_all_clients(original):
    """transformers' `build_server`, which sees clients leave, and tells them what they asked wrongly. One that answers
    for a single model lists that, and not the models in the Hub's cache, which need not be there."""

    @functools.wraps(original)
    def build_server(model_manager, *args, **kwargs):
        import jinja2  # as chat templates need it

        if (only := model_manager.force_model) is not None:
            entry = {"id": only, "object": "model", "created": int(time.time()), "owned_by": ""}
            model_manager.get_gen_models = lambda: [entry]
        app = original(model_manager, *args, **kwargs)
        app.add_middleware(_Receiving)
        for error in (ValueError, jinja2.TemplateError):
            app.add_exception_handler(error, _refuse)
        return app

    return build_server


async def _refuse(request, error):
    from fastapi.responses import JSONResponse

    return JSONResponse({"detail": str(error)}, status_code=400)


class _Receiving:
    """Hands the connection of a request on to who answers it."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        _RECEIVE.set(receive)
        await self.app(scope, receive, send)


register()
