"""Where each promise about the life of processes is tested, or what it waits for.

Each entry names tests as `folder/file.py::test`; a name that leads nowhere fails the build, and what is owed is printed
at the end of every run. Turns have their own table (`outcomes.py`), the environment too (`environment.py`).
"""

from __future__ import annotations

POINTS = "crash/test_processes_points.py::test_a_process_{}killed_here_ends_as_its_contract_says"
KILLS = "commands/test_kills.py::test_{}"
TOOLS = "processes_tools/test_crash.py::test_{}"
STEPS = "processes/test_function_steps.py::test_{}"
COMMANDS = "crash/test_commands.py::test_killed_here_a_{}"

PROCESSES: dict[str, tuple[str, ...]] = {
    "P1 asked for, not on disk": (
        POINTS.format(""),
        POINTS.format("really_"),
        "processes/test_service.py::test_asking_twice_starts_once_and_other_content_is_a_conflict",
        TOOLS.format("a_once_tool_killed_anywhere_runs_at_most_once_and_is_told_as_it_is"),
        TOOLS.format("killed_for_real_it_is_the_same"),
    ),
    "P2 on disk, not begun": (
        POINTS.format(""),
        POINTS.format("really_"),
        "stores/test_processes.py::test_work_that_is_bound_to_its_owner_and_not_begun_is_anybodys",
    ),
    "P3 begun, nothing done": (
        POINTS.format(""),
        POINTS.format("really_"),
        TOOLS.format("a_once_tool_killed_anywhere_runs_at_most_once_and_is_told_as_it_is"),
    ),
    "P4 command spawned, not written down": (
        COMMANDS.format("command_runs_once_and_its_session_hears_of_it_once"),
        KILLS.format("killed_again_while_it_begins_anew_a_command_runs_once"),
        KILLS.format("killed_at_every_step_a_command_runs_once_and_its_result_arrives"),
        KILLS.format("a_killed_host_whose_shim_is_killed_too_leaves_nothing_behind"),
        "commands/test_commands.py::test_a_killed_shim_is_lost_with_its_tree_ended_first",
    ),
    "P5 worker killed while its command runs": (
        COMMANDS.format("plugins_monitor_is_armed_once_and_tells_each_line_once"),
        KILLS.format("fifty_running_commands_are_adopted"),
        KILLS.format("a_host_that_is_killed_five_times_finds_its_command_each_time"),
        "commands/test_commands.py::test_what_a_deleted_session_owned_is_killed_by_the_next_runtime",
        "commands/test_commands.py::test_a_tool_that_is_run_again_finds_its_command",
    ),
    "P5 worker killed in a step of a durable function": (
        STEPS.format("a_step_that_declares_nothing_is_done_again_after_a_crash_and_counted"),
        STEPS.format("a_process_that_was_begun_before_the_default_changed_keeps_it_and_one_line_says_so"),
        STEPS.format("a_step_that_began_as_once_stays_so_though_its_code_declares_nothing_any_more"),
        STEPS.format("an_ask_step_that_a_crash_cut_off_waits_until_a_person_has_settled_it"),
        STEPS.format("an_ask_step_that_is_settled_as_rerun_and_cut_off_again_asks_again"),
        "processes/test_function_kills.py::test_killed_at_every_point_in_every_way_it_ends_as_if_nobody_had",
        "processes/test_function_kills.py::test_real_kill_around_a_write",
        "processes/test_function_kills.py::test_killed_again_while_a_person_settles_its_step_the_step_is_done_once",
    ),
    "P5 worker killed while it works": (
        "crash/test_processes_owners.py::test_a_killed_workers_processes_end_as_each_declared",
        "crash/test_processes_owners.py::test_work_that_is_cancelled_after_its_worker_died_is_told_as_unknown",
        "crash/test_processes_owners.py::test_a_sweep_takes_no_more_than_it_has_places_for_and_forgets_nothing",
        "crash/test_processes_races.py::test_two_thousand_open_processes_are_recovered_after_a_kill",
        "processes/test_worker.py::test_three_workers_that_die_on_a_process_as_their_only_suspect_leave_it_stuck",
        TOOLS.format("a_rerun_tool_killed_anywhere_ends_and_repeats_only_in_its_one_window"),
    ),
    "P6 command dies": (
        "commands/test_commands.py::test_an_exit_code_is_a_result_and_no_failure_of_the_process",
        "commands/test_commands.py::test_a_signal_from_outside_is_told_by_name_and_number",
        "commands/test_shim.py::test_signal_of_others_is_told_by_its_number",
    ),
    "P7 command ended, its end not written": (
        COMMANDS.format("command_runs_once_and_its_session_hears_of_it_once"),
        KILLS.format("killed_at_every_step_a_command_runs_once_and_its_result_arrives"),
        "commands/test_commands.py::test_what_ended_while_nobody_was_there_is_told_as_it_was",
    ),
    "P7 done, its end not written": (
        POINTS.format(""),
        POINTS.format("really_"),
        "crash/test_processes_points.py::test_a_reply_that_is_lost_changes_nothing",
        TOOLS.format("what_a_background_tool_came_to_passes_the_plugins_whoever_is_killed"),
    ),
    "P8 its end written, nobody told": (
        "crash/test_wakes.py::test_killed_anywhere_it_is_told_once_and_in_order",
        "crash/test_wakes.py::test_lost_reply_of_a_delivery_costs_nothing",
        "crash/test_wakes.py::test_really_killed_it_is_told_once_and_in_order",
        TOOLS.format("what_a_session_hears_passes_the_plugins_whoever_is_killed"),
    ),
    "P9 signals early, late, twice, out of order": (
        "processes/test_service.py::test_the_same_key_is_the_same_signal",
        "processes/test_service.py::test_the_dead_take_no_signal",
        "processes/test_function_waits.py::test_a_signal_that_came_before_the_function_began_is_not_lost",
        "processes/test_function_waits.py::test_signals_of_one_name_are_taken_in_the_order_in_which_they_came",
        "processes/test_function_waits.py::test_a_signal_is_taken_once_whatever_dies_in_between",
        TOOLS.format("a_signal_and_a_cancel_reach_their_process_once_whoever_is_killed"),
    ),
    "P10 cancel races completion": (
        "lifecycle/test_races.py::test_a_cancel_request_races_the_end_a_signal_and_a_takeover",
        "crash/test_processes_races.py::test_a_cancel_that_races_completion_leaves_one_end_that_both_see",
    ),
    "P11 whoever waits goes away": (
        "processes/test_service.py::test_a_cancelled_waiter_harms_nobody",
        "crash/test_processes_races.py::test_a_handle_is_as_good_in_another_process_and_whoever_waits_may_vanish",
        "processes_tools/test_model_tools.py::test_a_cancelled_turn_leaves_alone_what_another_started",
    ),
    "P12 handle copied elsewhere": (
        "crash/test_processes_races.py::test_a_handle_is_as_good_in_another_process_and_whoever_waits_may_vanish",
        "processes_tools/test_visible.py::test_another_session_cannot_use_a_handle_that_was_copied_to_it",
    ),
    "P13 parent ends or dies with children": (
        "crash/test_processes_owners.py::test_children_end_as_was_declared_though_the_worker_died_in_between",
        "stores/test_processes.py::test_children_that_are_to_end_with_their_parent_are_asked_to_in_the_same_write",
        "sessions/test_tasks_children.py::test_child_of_a_turn_ends_with_it",
        "sessions/test_tasks_children.py::test_child_that_comes_after_the_end_of_its_turn_is_asked_at_once",
    ),
    "P14 worker stopped past its lease": (
        "crash/test_processes_owners.py::test_a_stopped_worker_wakes_up_fenced_and_stops_what_is_no_longer_its_own",
        "crash/test_processes_owners.py::test_a_stopped_worker_whose_work_ends_as_it_wakes_cannot_say_so",
        "processes/test_worker.py::test_a_silent_worker_is_relieved_after_its_term_and_changes_nothing_then",
    ),
    "P15 two recover one row": (
        "crash/test_processes_races.py::test_two_workers_sweep_what_four_left_behind_and_each_process_runs_once",
        "stores/test_process_file.py::test_two_workers_take_ten_thousand_rows_each_exactly_once",
    ),
    "P16 started in the moment of a sweep": (
        "crash/test_processes_races.py::test_what_is_started_in_the_moment_of_a_sweep_is_not_adopted",
        "crash/test_processes_races.py::test_a_start_in_the_very_millisecond_of_a_sweep_is_not_adopted",
    ),
    "P17 pid used again, reboot, another host": (
        "commands/test_tree.py::test_pid_that_was_used_again_is_no_concern_of_ours",
        "commands/test_tree.py::test_number_of_a_leader_that_the_kernel_used_again_is_spared",
        "commands/test_tree.py::test_command_in_another_pid_namespace_is_watched_and_ended_through_its_folder",
        "commands/test_commands.py::test_after_another_boot_it_is_lost_and_nothing_is_killed",
        "commands/test_commands.py::test_a_command_of_another_host_is_left_alone_until_an_operator_abandons_it",
    ),
    "P18 output without end, binary, without newlines": (
        "commands/test_output.py::test_endless_output_passes_through_no_memory",
        "commands/test_output.py::test_binary_output_without_newline_is_kept_byte_by_byte",
        "commands/test_commands.py::test_over_its_limit_of_output_it_is_killed_with_the_limit_as_reason",
        "commands/test_commands.py::test_a_long_output_is_inline_with_head_and_tail_and_whole_as_an_artifact",
        "commands/test_commands.py::test_a_result_arrives_though_its_output_cannot_be_kept",
    ),
    "P20 prune races await and signal": (
        "crash/test_processes_races.py::test_prune_racing_everybody_gives_typed_answers_and_wakes_no_dead",
        "crash/test_processes_races.py::test_a_parent_whose_child_is_pruned_under_it_has_its_value_or_is_told",
        "processes/test_service.py::test_pruning_forgets_what_is_over_and_keeps_its_id_spent",
    ),
}

ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "E10 clock jumps": (
        "crash/test_processes_races.py::test_wall_clocks_that_jump_cost_no_ownership",
        "processes/test_function_waits.py::test_a_jump_of_the_wall_clock_neither_ends_a_parked_sleep_nor_prolongs_it",
        "crash/test_skew.py::test_processes_of_a_real_machine_behind_are_woken_once_by_one_ahead",
    ),
    "E11 SIGTERM": (
        "crash/test_processes_owners.py::test_a_worker_that_is_told_to_stop_ends_parks_or_gives_up_what_it_has",
    ),
    "E13 two workers, one process": (
        "crash/test_processes_races.py::test_two_workers_that_start_the_same_processes_run_each_once",
    ),
    "E18 blocked event loop": (
        "crash/test_processes_owners.py::test_a_blocked_event_loop_is_named_and_costs_no_ownership",
    ),
}

OWED = {
    "P11 over HTTP": "a client that goes away while it waits: comes with the server",
    "P19": "occurrences that were reserved and not started, missed ticks, clocks set back: comes with triggers",
}
"""What cannot be tested yet, and what it waits for. Printed at the end of every run."""
