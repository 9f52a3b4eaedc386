"""Mistakes in what keeps hostile or broken clients, routers and workers from doing harm: bounds and checks of what comes in."""

from __future__ import annotations

from tests.mutation import Mutation

_ROUTER = "tests/unit/router/"
_WORKERS = "tests/unit/workers/"
_SERVER = "tests/unit/protocol/test_server.py::"


def _count(check: str) -> Mutation:
    """A bound on a part of a request that is not looked at."""
    test = _ROUTER + "test_hostile_clients.py::test_what_is_more_than_configured_is_refused_by_name"
    return Mutation("router/api/generate.py", f"if {check}:", "if False:", test)


BOUNDS: dict[str, Mutation] = {
    "record-of-any-length": Mutation(
        "workers/decode/machine.py",
        "if (notice.num_tokens, notice.num_layers) != (num_tokens, layout.num_layers):",
        "if False:",
        _WORKERS + "test_hostile_frames.py::test_notices_of_a_hostile_peer_fill_no_lease_and_are_counted",
    ),
    "attempt-opened-twice": Mutation(
        "workers/decode/machine.py",
        "if frame.attempt_id in self._attempts or self._scheduler.get(frame.attempt_id) is not None:",
        "if False:",
        _WORKERS + "test_hostile_frames.py::test_no_part_of_a_frame_can_be_anything",
    ),
    "more-output-than-tokens": Mutation(
        "workers/decode/machine.py",
        "if not 0 <= frame.num_output_tokens < num_tokens or not 0 <",
        "if not 0 <",
        _WORKERS + "test_hostile_frames.py::test_no_part_of_a_frame_can_be_anything",
    ),
    "any-timeout": Mutation(
        "workers/decode/machine.py",
        "or not 0 < frame.timeout_s <= _LONGEST_TIMEOUT_S:",
        "or frame.timeout_s == 0:",
        _WORKERS + "test_hostile_frames.py::test_no_part_of_a_frame_can_be_anything",
    ),
    "bad-frames-skipped-by-fronts": Mutation(
        "workers/front_app.py",
        'return f"the router sent a bad frame: {error}"',
        "message, _ = await websocket.receive(), error; continue",
        "tests/unit/protocol/test_hostile_links.py::test_a_front_closes_a_link_at_its_first_bad_frame",
    ),
    "bad-frames-skipped-by-routers": Mutation(
        "pd_serve/protocol/client.py",
        'self.close(f"protocol error: {error}")',
        "str(error)",
        "tests/unit/protocol/test_hostile_links.py::test_a_router_closes_a_link_at_its_first_bad_frame",
    ),
    "short-records-unpacked": Mutation(
        "pd_serve/transport/ucx/messages.py",
        "if len(header) < _DATA.size:",
        "if False:",
        "tests/unit/transport/ucx/test_messages.py::test_rubbish_is_a_protocol_error_and_nothing_else",
    ),
    "errors-without-context": Mutation(
        "pd_serve/protocol/openai.py",
        'param = first.get("ctx", {}).get("param") or _path(first["loc"])',
        'param = first["ctx"]["param"]',
        _ROUTER + "test_openapi.py::test_every_answer_is_one_that_is_described",
    ),
    "bad-requests-are-our-fault": Mutation(
        "pd_serve/protocol/server.py",
        "self._refuse(self._refusal or 400)",
        "self._refuse(self._refusal or 503)",
        _SERVER + "test_whatever_bytes_come_the_answer_is_http_and_the_next_client_is_served",
    ),
    "any-body": Mutation(
        "router/admission.py", "if nbytes > max_nbytes:", "if False:", _ROUTER + "test_refusals.py::test_body_over_the_limit_is_413"
    ),
    "any-head": Mutation(
        "pd_serve/protocol/server.py",
        "if self._head_nbytes > self._limits.max_header_nbytes:",
        "if False:",
        _SERVER + "test_a_head_that_is_too_long_is_refused",
    ),
    "endless-head": Mutation(
        "pd_serve/protocol/server.py",
        "if self._unparsed_nbytes > self._limits.max_header_nbytes and not self._is_refused:",
        "if False:",
        _SERVER + "test_a_head_that_is_too_long_is_refused",
    ),
    "any-number-of-connections": Mutation(
        "pd_serve/protocol/server.py",
        "if len(self.connections) > self._limits.max_connections:",
        "if False:",
        _SERVER + "test_connections_above_the_limit_are_refused_and_those_below_go_on",
    ),
    "slow-senders-waited-for": Mutation(
        "pd_serve/protocol/server.py",
        "self._read_timer = self.loop.call_later(self._limits.read_timeout_s, self._give_up_reading)",
        "pass",
        _SERVER + "test_a_request_that_does_not_arrive_in_time_is_refused",
    ),
    "deaf-clients-waited-for": Mutation(
        "pd_serve/protocol/server.py",
        "self._stall_timer = self.loop.call_later(self._limits.stall_timeout_s, self.transport.abort)",
        "pass",
        _SERVER + "test_a_client_that_does_not_read_is_cut_and_holds_little_memory",
    ),
    "any-n": _count("request.n > limits.max_n"),
    "any-number-of-stops": _count("len(request.stop) > limits.max_stop_strings"),
    "stops-of-any-length": _count("any(len(stop) > limits.max_stop_string_length for stop in request.stop)"),
    "any-number-of-biases": _count("len(request.logit_bias) > limits.max_logit_bias"),
    "any-number-of-messages": _count("isinstance(request, ChatCompletionRequest) and len(request.messages) > limits.max_messages"),
    "millions-of-ids-parsed": Mutation(
        "router/api/glance.py",
        'limits.check_length(num_ids, "prompt")',
        "pass",
        _ROUTER + "test_glance.py::test_millions_of_parts_are_refused_in_no_time",
    ),
    "every-wrong-part-told": Mutation(
        "pd_serve/protocol/openai.py",
        "TokenIds = Annotated[tuple[TokenId, ...], Field(fail_fast=True)]",
        "TokenIds = tuple[TokenId, ...]",
        _ROUTER + "test_glance.py::test_lists_end_at_their_first_wrong_part",
    ),
    "text-of-any-length": Mutation(
        "router/admission.py",
        "if self.max_prompt_chars and num_chars > self.max_prompt_chars:",
        "if False:",
        _ROUTER + "test_hostile_clients.py::test_a_text_too_long_for_any_prompt_is_refused_before_it_is_tokenized",
    ),
    "chat-bounded-after-rendering": Mutation(
        "router/api/chat.py",
        'limits.check_text(num_chars, "messages")',
        "pass",
        _ROUTER + "test_hostile_clients.py::test_a_long_chat_is_not_even_rendered",
    ),
    "tokenizing-under-the-lock": Mutation(
        "router/tokenizer.py",
        "(encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)",
        "encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)",
        _ROUTER + "test_tokenizer.py::test_a_long_text_does_not_hold_up_the_event_loop",
    ),
}
