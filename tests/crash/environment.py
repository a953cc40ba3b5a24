"""Where each promise about the environment, about bad input and about ownership is tested, or what it waits for.

The crash matrix has its own table (`outcomes.py`). Each entry here names tests as `folder/file.py::test`; a name that
leads nowhere fails the build, and what is owed is printed at the end of every run.
"""

from __future__ import annotations

ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "E1 disk full": (
        "stores/test_sqlite_file.py::test_a_full_disk_is_typed_and_the_old_head_stays_until_space_returns",
        "stores/test_group_commit.py::test_a_full_disk_fails_what_does_not_fit_and_nothing_else",
        "engine/test_journal.py::test_a_full_disk_stalls_the_turn_until_it_has_room",
        "engine/test_journal.py::test_a_full_disk_stalls_a_commit_too",
        "runtime/test_trouble.py::test_a_runtime_can_be_left_while_the_disk_is_full",
    ),
    "E2 I/O error": (
        "stores/test_sqlite_file.py::test_files_that_may_not_grow_give_a_typed_error_and_lose_nothing",
        "stores/test_group_commit.py::test_a_commit_that_landed_after_all_is_read_back_and_not_applied_again",
        "stores/test_group_commit.py::test_the_writer_outlives_a_rollback_that_fails",
    ),
    "E3 power loss": (
        "crash/test_power.py::test_every_acknowledged_turn_survives_a_power_cut",
        "crash/test_turns.py::test_nothing_is_acknowledged_before_it_is_on_disk",
        "stores/test_blobs.py::test_a_blob_is_on_disk_before_its_name_is_and_its_name_before_anybody_hears_of_it",
        "stores/test_sqlite_file.py::test_every_connection_syncs_fully_and_never_checkpoints_by_itself",
    ),
    "E4 damaged or newer file": (
        "stores/test_sqlite_file.py::test_a_damaged_file_is_refused_or_served_whole",
        "stores/test_sqlite_file.py::test_a_cut_wal_is_refused_with_a_hint",
        "stores/test_sqlite_file.py::test_a_file_of_a_newer_perdure_is_refused",
        "stores/test_upgrade.py::test_an_upgrade_killed_at_any_statement_leaves_a_file_that_opens",
        "golden/test_golden.py::test_older_store_goes_on_with",
        "golden/test_golden.py::test_older_store_goes_on_after_an_upgrade_that_was_killed",
    ),
    "E5 locked file": (
        "runtime/test_trouble.py::test_whoever_does_not_let_go_of_the_lock_is_not_waited_for_in_silence",
        "runtime/test_trouble.py::test_all_who_wait_for_a_file_that_is_not_to_be_had_are_told_together",
        "runtime/test_trouble.py::test_a_host_that_holds_a_write_lock_delays_and_loses_nothing",
        "stores/test_sqlite_file.py::test_a_fresh_file_is_opened_by_many_at_once",
    ),
    "E6 SQLite before 3.51.3": (
        "stores/test_sqlite_file.py::test_nothing_is_written_while_somebody_else_holds_the_lock",
        "stores/test_sqlite_file.py::test_nothing_is_folded_back_while_somebody_else_holds_the_lock",
        "stores/test_sqlite_file.py::test_nobody_opens_the_file_while_somebody_else_holds_the_lock",
        "stores/test_closing.py::test_the_last_to_close_folds_nothing_back_while_somebody_else_holds_the_lock",
    ),
    "E4 copied file": (
        "crash/test_copies.py::test_a_killed_backup_leaves_no_copy_or_a_whole_one",
        "crash/test_copies.py::test_a_copy_is_recognised_though_the_first_to_open_it_was_killed",
        "crash/test_copies.py::test_a_killed_restore_never_lets_a_copy_go_on_under_the_id_of_its_original",
        "sessions/test_copies.py::test_a_copy_works_on_nothing_until_it_is_restored",
        "sessions/test_copies.py::test_a_call_under_way_in_the_original_goes_by_its_contract_in_the_restored_copy",
    ),
    "E9 cancelled await": (
        "crash/test_cancels.py::test_what_a_lost_caller_said_runs_once_and_at_once",
        "crash/test_cancels.py::test_a_turn_runs_though_nobody_asks_for_it_again",
        "crash/test_cancels.py::test_a_decision_whose_maker_goes_away_is_made_or_not_but_never_lies_about",
        "stores/test_group_commit.py::test_a_cancelled_await_cancels_nothing",
        "runtime/test_trouble.py::test_entering_and_leaving_may_be_cancelled_at_any_moment",
    ),
    "E10 clock jumps": (
        "runtime/test_clock.py::test_a_jump_costs_no_ownership",
        "runtime/test_clock.py::test_a_jump_neither_ends_nor_prolongs_a_deferred_call",
        "runtime/test_clock.py::test_a_jump_neither_hurries_nor_delays_a_retry_of_the_model",
        "engine/test_lease.py::test_a_silent_worker_is_judged_by_how_long_it_was_watched",
        "crash/test_skew.py::test_kill_on_a_machine_ahead_has_its_ruled_fate",
        "crash/test_skew.py::test_kill_on_a_machine_behind_has_its_ruled_fate",
        "crash/test_skew.py::test_real_kill_on_a_machine_ahead_has_its_ruled_fate",
        "crash/test_skew.py::test_a_deadline_comes_early_where_another_machine_is_ahead_and_once",
        "crash/test_skew.py::test_a_retry_that_a_dead_machine_had_put_off_is_made_once",
    ),
    "E11 SIGTERM": (
        "cli/test_run.py::test_the_terminate_signal_leaves_the_turn_open_for_later",
        "runtime/test_leaving.py::test_a_once_tool_cut_off_at_leaving_is_recorded_as_unknown",
        "runtime/test_leaving.py::test_draining_finishes_what_runs_and_starts_nothing_new",
        "soak/test_soak.py::test_random_kills_and_leavings_lose_nothing_and_repeat_only_what_may_be",
    ),
    "E12 no descriptors, no threads, read-only": (
        "runtime/test_forked.py::test_a_process_without_descriptors_says_so_and_goes_on_when_it_has_some",
        "runtime/test_hostile.py::test_a_tool_that_cannot_have_a_thread_fails_and_never_runs_later",
        "stores/test_sqlite_file.py::test_what_is_read_only_is_refused_typed_and_left_whole",
    ),
    "E13 two workers, one session": (
        "crash/test_shared.py::test_three_processes_speak_to_one_session_and_every_input_has_one_turn",
        "crash/test_ownership.py::test_stopped_owner_keeps_its_term_and_is_fenced_when_it_wakes",
        "crash/test_ownership.py::test_two_workers_race_and_each_session_runs_once",
        "soak/test_verbs.py::test_three_processes_keep_every_promise_under_kills_stops_and_leavings",
    ),
    "E14 slow reader": (
        "observe/test_feed.py::test_a_slow_reader_never_slows_a_turn",
        "observe/test_feed.py::test_a_reader_that_falls_behind_gets_a_gap_and_the_rest",
    ),
    "E15 provider fails": (
        "sessions/test_providers.py::test_what_the_provider_asks_for_is_honoured",
        "sessions/test_providers.py::test_four_attempts_and_then_it_is_given_up",
        "sessions/test_providers.py::test_a_crash_between_attempts_keeps_the_due_time_and_the_count",
        "providers/test_http.py::test_a_failure_says_what_happens_next",
        "providers/test_http.py::test_an_overloaded_server_is_asked_again_and_a_wrong_key_is_not",
        "providers/test_http.py::test_an_attempt_that_takes_too_long_is_made_again",
        "providers/test_http.py::test_nobody_there_is_worth_another_attempt",
        "providers/test_transport.py::test_silence_is_a_timeout_and_not_reading_is_one",
        "crash/test_wired.py::test_an_answer_cut_off_by_a_kill_is_asked_for_once_more_and_a_recorded_one_never",
    ),
    "E16 half a stream": (
        "sessions/test_providers.py::test_a_stream_that_breaks_off_takes_its_text_back",
        "sessions/test_providers.py::test_a_stream_that_only_ends_is_broken_too",
        "sessions/test_results.py::test_an_answer_that_was_cut_short_is_incomplete",
        "providers/test_reading.py::test_it_does_not_matter_where_a_stream_is_split",
        "providers/test_reading.py::test_a_stream_that_ends_early_is_never_an_answer",
        "providers/test_reading.py::test_a_damaged_stream_is_an_answer_or_a_typed_error",
        "providers/test_http.py::test_an_answer_cut_off_at_any_byte_is_broken_also_when_the_server_ends_it_cleanly",
        "providers/test_transport.py::test_a_response_that_is_cut_off_anywhere_is_an_error",
    ),
    "E17 bad tool calls": (
        "tools/test_dispatch.py::test_an_unknown_tool_is_told_with_what_there_is",
        "tools/test_dispatch.py::test_duplicate_and_empty_call_ids_are_made_unique",
        "tools/test_dispatch.py::test_ten_megabytes_of_arguments_are_refused_and_the_session_lives",
        "runtime/test_hostile.py::test_a_nonsensical_answer_is_a_failed_turn_and_the_session_goes_on_after_a_restart",
        "providers/test_http.py::test_half_a_call_is_told_to_the_model_and_the_session_goes_on",
    ),
    "E18 tools that raise, block, recurse": (
        "tools/test_dispatch.py::test_whatever_a_tool_raises_ends_its_call_only",
        "tools/test_dispatch.py::test_signals_of_the_interpreter_end_their_call_only",
        "tools/test_dispatch.py::test_endless_recursion_ends_its_call_only",
        "runtime/test_hostile.py::test_an_output_that_raises_when_it_is_looked_at_is_a_failed_call",
        "runtime/test_lifecycle.py::test_a_blocked_loop_is_named_while_renewals_go_on",
    ),
    "E19 odd values": (
        "tools/test_dispatch.py::test_values_are_normalised_once_and_alike_for_every_store",
        "model/test_codec.py::test_every_value_has_one_form_for_all_stores",
        "sessions/test_accepting.py::test_odd_characters_are_the_same_on_every_store",
    ),
    "E20 plugins": (
        "plugins/test_turns.py::test_broken_hook_that_a_turn_cannot_do_without_ends_it",
        "plugins/test_turns.py::test_broken_plain_hook_that_a_turn_cannot_do_without_ends_it",
        "plugins/test_turns.py::test_broken_hook_of_a_call_fails_that_call",
        "plugins/test_turns.py::test_broken_hook_that_a_turn_can_do_without_is_reported",
        "plugins/test_calls.py::test_a_hook_that_swallows_its_cancellation_is_left_behind",
        "plugins/test_state_in_turns.py::test_session_opens_without_a_plugin_that_cannot_read_its_state",
        "plugins/test_state_in_turns.py::test_required_plugin_that_cannot_read_its_state_stops_turns",
        "plugins/test_state_in_turns.py::test_snapshot_that_cannot_be_taken_is_reported_and_the_one_before_stays",
        "plugins/test_contract.py::test_every_hook_is_disturbed_in_every_way_it_can_be",
    ),
}

BAD_INPUT: dict[str, tuple[str, ...]] = {
    "unknown tool": ("tools/test_dispatch.py::test_an_unknown_tool_is_told_with_what_there_is",),
    "invalid arguments": (
        "tools/test_dispatch.py::test_arguments_that_do_not_fit_never_reach_the_tool",
        "tools/test_dispatch.py::test_arguments_that_are_no_object_never_reach_the_tool",
    ),
    "duplicate call ids": ("tools/test_dispatch.py::test_duplicate_and_empty_call_ids_are_made_unique",),
    "10 MB arguments": ("tools/test_dispatch.py::test_ten_megabytes_of_arguments_are_refused_and_the_session_lives",),
    "lone surrogates, NUL": (
        "sessions/test_accepting.py::test_odd_characters_are_the_same_on_every_store",
        "sessions/test_providers.py::test_odd_characters_from_a_model_are_stored_alike",
    ),
    "NaN": ("tools/test_dispatch.py::test_values_are_normalised_once_and_alike_for_every_store",),
    "deep nesting": (
        "model/test_codec.py::test_nesting_is_accepted_up_to_its_limit",
        "model/test_codec.py::test_values_without_a_floor_are_refused",
    ),
    "empty input": ("sessions/test_accepting.py::test_an_empty_input_is_refused",),
    "enormous input": ("sessions/test_accepting.py::test_an_enormous_input_is_refused_with_its_size",),
    "unknown session ids": (
        "sessions/test_results.py::test_asking_for_unknown_turns",
        "sessions/test_cancelling.py::test_cancel_of_what_does_not_exist",
        "sessions/test_directory.py::test_unknown_calls_are_refused_with_advice",
    ),
    "reused keys": (
        "sessions/test_accepting.py::test_the_same_key_with_other_content_is_a_conflict_and_changes_nothing",
        "sessions/test_accepting.py::test_fifty_callers_with_different_content_get_one_turn_and_conflicts",
    ),
    "a model that never stops": (
        "sessions/test_results.py::test_a_model_that_never_stops_gets_a_last_word_and_no_more",
    ),
    "a stream that breaks off": ("sessions/test_providers.py::test_a_stream_that_breaks_off_takes_its_text_back",),
    "plugins that conflict": (
        "plugins/test_bad_input.py::test_conflict_names_both_says_what_to_do_and_registers_nothing",
        "plugins/test_bad_input.py::test_plugin_that_cannot_be_registered_is_named",
    ),
    "a directive at the wrong seam": (
        "plugins/test_turns_directives.py::test_directive_that_means_nothing_at_its_seam_is_a_fault",
        "plugins/test_bad_input.py::test_wrong_directive_names_its_plugin_and_those_that_are_right",
    ),
    "operations called wrongly": (
        "plugins/test_bad_input.py::test_call_of_an_operation_that_makes_no_sense_is_refused",
        "cli/test_operations.py::test_call_that_cannot_be_made_is_explained",
    ),
    "snapshots that do not decode": (
        "plugins/test_bad_input.py::test_snapshot_that_does_not_decode_is_an_issue_that_names_its_plugin_and_what_to_do",
    ),
    "options that make no sense": (
        "plugins/test_options.py::test_options_that_make_no_sense_are_refused_at_once",
        "plugins/test_options.py::test_child_with_options_that_make_no_sense_is_an_issue_of_the_turn",
    ),
    "a session of another agent": (
        "sessions/test_directory.py::test_a_session_belongs_to_its_agent",
        "sessions/test_directory.py::test_two_handles_that_race_for_a_new_session_with_different_agents",
    ),
}

OWNERSHIP: dict[str, tuple[str, ...]] = {
    "a forked child is refused": (
        "runtime/test_lifecycle.py::test_a_forked_child_is_refused",
        "stores/test_sqlite_file.py::test_a_forked_child_refuses_its_parents_store_and_cannot_harm_it",
        "runtime/test_forked.py::test_a_forked_child_may_not_open_the_file_that_its_parent_has_open",
        "runtime/test_forked.py::test_a_forked_child_that_ends_leaves_the_transaction_of_its_parent_alone",
    ),
    "a host may peek": ("stores/test_sqlite_file.py::test_a_host_that_peeks_into_the_file_costs_no_acknowledged_turn",),
    "use from another loop is a typed error": ("runtime/test_lifecycle.py::test_a_runtime_belongs_to_its_event_loop",),
    "enter and exit in different tasks": (
        "runtime/test_lifecycle.py::test_entering_and_leaving_may_happen_in_different_tasks",
    ),
    "term and renewal": ("engine/test_lease.py::test_a_tighter_term_is_refused",),
    "free lock: takeover at once": (
        "crash/test_ownership.py::test_killed_owner_is_relieved_at_once",
        "crash/test_ownership.py::test_killed_owner_is_relieved_by_the_next_look_of_a_runtime_that_was_open_beside_it",
    ),
    "held lock: only after the term": (
        "crash/test_ownership.py::test_stopped_owner_keeps_its_term_and_is_fenced_when_it_wakes",
        "runtime/test_clock.py::test_a_silent_owner_is_relieved_only_after_its_term",
    ),
    "expiry permits, a claim fences": ("engine/test_lease.py::test_expiry_permits_a_claim_and_only_a_claim_fences",),
    "the owner makes sure before a body": (
        "engine/test_lease.py::test_a_relieved_worker_finds_out_when_it_makes_sure",
        "engine/test_lease.py::test_a_term_begins_when_a_worker_speaks_and_not_when_it_hears_of_it",
        "runtime/test_relieved.py::test_a_relieved_owner_runs_no_body",
        "runtime/test_clock.py::test_an_hour_of_sleep_does_not_cost_a_turn",
    ),
    "three takeovers": ("crash/test_ownership.py::test_turn_that_really_killed_five_workers_is_stuck_with_its_reason",),
    "claims only what it can run": (
        "sessions/test_directory.py::test_a_runtime_without_agents_runs_nothing",
        "sessions/test_directory.py::test_without_recovery_the_work_of_others_is_left_alone",
    ),
    "another process's write is noticed": (
        "crash/test_ownership.py::test_answer_from_another_process_is_noticed",
        "runtime/test_lifecycle.py::test_a_turn_is_steered_from_another_runtime",
    ),
    "a fault parks one scope": (
        "runtime/test_lifecycle.py::test_a_fault_of_a_definition_parks_one_session_and_names_it",
        "engine/test_supervisor.py::test_a_fault_ends_its_task_only_and_is_written_down",
    ),
    "acknowledged means in this file": (
        "runtime/test_trouble.py::test_nothing_is_acknowledged_into_a_file_that_is_not_there_any_more",
        "runtime/test_trouble.py::test_a_host_may_change_its_folder",
    ),
}

OWED = {
    "E7 Postgres connection lost": "unknown commits read back by operation id: comes with the Postgres store",
    "E8 Postgres crash and failover": "comes with the Postgres store",
}
