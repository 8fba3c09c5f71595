"""Which test covers which fault that others had (PITFALLS, "Runtime"); a test that is gone is missed here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

COVERED: dict[str, tuple[str, ...]] = {
    "vllm 48853: a character cut across tokens": (
        "engine/test_detokenizer.py::test_a_character_cut_across_tokens_comes_whole",
        "engine/test_engine.py::test_whole_characters_are_streamed",
        "conformance/test_verified_engine.py::test_a_held_answer_is_the_answer",
    ),
    "vllm 3574: the beginning of a stop string leaked": (
        "engine/test_detokenizer.py::test_the_result_does_not_depend_on_the_cuts",
        "engine/test_detokenizer.py::test_a_stop_string_that_did_not_come_is_released_at_the_end",
        "conformance/test_client.py::test_stops_and_bias",
    ),
    "vllm 54947: a client that left kept the engine busy": (
        "conformance/test_client.py::test_a_client_that_leaves_gives_its_kv_back",
        "server/test_streaming.py::test_a_client_that_leaves_is_cancelled",
        "server/test_verified.py::test_a_client_that_leaves_while_it_is_verified",
        "conformance/test_verified_engine.py::test_a_client_that_leaves_while_it_is_generated",
    ),
    "llm-d-router 1389, vllm 53347: the tenant salt": (
        "engine/test_engine.py::test_scopes_do_not_share",
        "server/test_scope.py::test_the_body_has_no_say",
        "server/test_refusals.py::test_odd_chats",
    ),
    "vllm 7283, 7746: an empty prompt or max_tokens 0": (
        "server/test_refusals.py::test_odd_chats",
        "server/test_refusals.py::test_odd_completions",
        "engine/test_engine.py::test_what_can_not_run_is_refused_before_it_is_queued",
    ),
    "vllm 33418: wrong numbers beyond the context": (
        "server/test_refusals.py::test_context_length_counts",
        "engine/test_engine.py::test_too_long_a_request_is_refused_with_the_right_counts",
    ),
    "vllm 47312, 45346: a schema that failed to compile killed all": (
        "conformance/test_client.py::test_a_schema_that_does_not_compile_is_its_own_400",
        "conformance/test_forms.py::test_any_schema_of_an_answer",
        "engine/test_structured.py::test_a_form_that_becomes_too_much_fails_alone",
    ),
    "ai-gateway 2115: usage lost when a stream was cancelled": (
        "server/test_streaming.py::test_everything_is_counted_exactly_once",
        "server/test_streaming.py::test_a_client_that_leaves_is_cancelled",
    ),
    "apfel 100: a usage chunk sent unasked": (
        "server/test_streaming.py::test_no_usage_unless_asked_for",
        "conformance/test_shapes.py::test_recorded_streams",
    ),
    "NeMo-RL 2962: NaN log-probabilities": (
        "engine/test_sampler.py::test_logprobs_are_finite_where_a_token_is_impossible",
        "conformance/test_client.py::test_impossible_tokens_have_a_finite_logprob",
    ),
    "CVE-2026-114051: a dead loop that was healthy": (
        "engine/test_engine.py::test_health_asks_the_loop",
        "engine/test_engine.py::test_a_fault_of_the_engine_itself_ends_requests_but_not_the_loop",
        "conformance/test_fuzz.py::test_whatever_is_sent",
    ),
    "CVE-2026-93989: ids out of range corrupted others": (
        "conformance/test_client.py::test_ids_beyond_the_vocabulary_touch_nobody_else",
        "engine/test_engine.py::test_a_request_that_breaks_the_forward_fails_alone",
    ),
    "CVE-2026-55574: catastrophic backtracking": (
        "engine/test_structured.py::test_a_hostile_schema_costs_little",
        "engine/test_structured.py::test_compiling_lets_others_run",
        "server/test_contract.py::test_catastrophic_patterns_finish",
        "server/test_contract.py::test_schemas_that_blow_up_finish",
        "server/test_schema_shape.py::test_a_large_schema_is_soon_read",
        "server/test_turns.py::test_time_counts_from_the_beginning",
    ),
    "CVE-2025-62426, CVE-2026-115918: chat templates from the request": (
        "server/test_refusals.py::test_odd_chats",
    ),
    "CVE-2026-44222: special tokens typed by a user": (
        "engine/test_tokenizer.py::test_text_never_makes_a_control_token",
        "engine/test_tokenizer.py::test_no_mixture_of_pieces_makes_a_control_token",
        "engine/test_structured.py::test_whatever_is_drawn_fits",
    ),
    "CVE-2025-46570, GHSA-rm76-4mrf-v9r8: the prefix cache tells": (
        "engine/test_blocks.py::test_another_scope_finds_nothing",
        "engine/test_blocks.py::test_fields_of_a_key_can_not_be_shifted_into_one_another",
        "server/test_tools.py::test_answers_share_a_prompt_where_the_prefix_cache_is_off",
    ),
    "transformers 48296, 45323: not what generate gives": (
        "engine/test_engine.py::test_alone_and_together_the_answer_is_that_of_generate",
        "engine/test_oracle.py::test_batched_staggered_and_chunked_output_is_that_of_generate",
        "engine/test_logits.py::test_a_row_draws_the_same_in_any_company",
    ),
}


@pytest.mark.parametrize("fault", COVERED)
def test_a_fault_of_others_is_a_test_here(fault: str) -> None:
    for name in COVERED[fault]:
        path, _, function = name.partition("::")
        tree = ast.parse((HERE / path).read_text())
        found = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in found, name
