"""What users of other worker runtimes, clients and job queues complain of, replayed on real servers.

The numbers are those of the list that these workers were designed from; its gaps are there too. What other tests show
already is named here and not repeated; `test_the_table.py` holds this table to what there is.

    C1   committed past a failure         tests/consumers/complaints/test_commits.py::test_the_mark_waits_for_the_record_that_fails_until_its_retry_record_is_there
                                          tests/faults/test_worker_points.py::test_killed_at_every_point_nothing_is_only_in_memory
    C2   wrong commits at gaps            tests/consumers/complaints/test_commits.py::test_the_mark_follows_what_was_handed_out_and_not_offsets_by_counting
                                          tests/consumers/runtime/test_service.py::test_each_event_is_handled_once_and_lag_reaches_zero
                                          tests/consumers/runtime/test_offsets.py::test_everything_below_the_mark_is_finished_and_the_first_above_is_not
    C4   duplicates after a rebalance     tests/faults/test_worker_chaos.py::test_members_die_freeze_and_come_and_every_delivery_has_one_effect
                                          tests/faults/test_worker_kills.py::test_members_join_and_leave_and_no_call_is_made_twice
    C6   kept and no longer fetched       tests/consumers/complaints/test_full_and_rebalanced.py
                                          tests/consumers/runtime/test_health.py::test_a_partition_that_is_no_longer_fetched_is_found
    C7   max.poll.interval exceeded       tests/consumers/complaints/test_slow_handlers.py
                                          tests/consumers/runtime/test_service.py::test_a_call_over_its_timeout_is_an_attempt
    C8   a retry blocks the partition     tests/consumers/runtime/test_service.py::test_one_bad_event_in_500_leaves_499_committed
                                          tests/consumers/complaints/test_commits.py::test_the_mark_waits_for_the_record_that_fails_until_its_retry_record_is_there
    C9   order broken by retry topics     tests/consumers/runtime/test_service.py::test_with_ordering_by_key_later_events_wait_behind_a_failing_one
                                          tests/consumers/runtime/test_deliveries.py::test_with_ordering_those_blocked_together_go_on_in_their_order
                                          tests/consumers/runtime/test_deliveries.py::test_with_ordering_a_delivery_that_a_stop_handed_back_is_still_in_front_of_its_key
                                          tests/faults/test_worker_chaos.py::test_members_die_freeze_and_come_and_every_delivery_has_one_effect
    C10  retry topics explode             tests/consumers/complaints/test_one_consumer.py
    C11  a tier read in log order         tests/consumers/complaints/test_a_burst_in_a_tier.py
                                          tests/consumers/runtime/test_service.py::test_a_burst_of_failures_comes_back_in_due_order_and_never_early
                                          tests/consumers/runtime/test_retry.py::test_a_burst_in_one_tier_is_spread_over_the_jitter
    C12  headers grow                     tests/consumers/runtime/test_records.py::test_headers_after_the_eighth_attempt_have_the_names_of_the_first_and_bounded_sizes
                                          tests/consumers/runtime/test_strangers.py::test_a_record_at_its_topics_limit_is_buried_whole_where_the_topics_are_as_declared
                                          tests/consumers/runtime/test_strangers.py::test_a_delivery_whose_retry_record_no_topic_takes_is_dead_and_can_be_retried
    C13  poison pills loop                tests/consumers/runtime/test_service.py::test_poison_on_every_topic_is_a_dead_letter_with_its_bytes_and_stops_nothing
                                          tests/consumers/runtime/test_service.py::test_headers_nobody_can_read_are_a_dead_letter_where_they_are_needed_and_odd_ones_are_passed_on
    C14  no dead letter can be written    tests/consumers/runtime/test_service.py::test_a_dead_letter_that_cannot_be_written_holds_its_offset_and_nothing_else
    C15  replays loop, or replay twice    tests/consumers/dead_letters/test_dlq.py::test_a_retry_reaches_only_the_worker_and_target_that_failed
                                          tests/consumers/dead_letters/test_dlq.py::test_a_kill_between_copy_and_close_loses_nothing_and_doubles_nothing
                                          tests/consumers/dead_letters/test_bulk.py::test_a_bulk_run_is_ended_between_two_batches_and_goes_on_when_run_again
    C16  one bad record retries all       tests/consumers/runtime/test_service.py::test_one_bad_event_in_500_leaves_499_committed
                                          tests/consumers/runtime/test_strangers.py::test_a_constraint_that_fails_at_the_commit_is_an_attempt_of_the_one_that_broke_it
    C18  memory behind slow handlers      tests/consumers/complaints/test_memory.py
                                          tests/consumers/runtime/test_service.py::test_what_is_in_hand_is_bounded_and_goes_on_when_the_slow_ones_do
    C19  lost with a cancelled call       tests/consumers/complaints/test_cancelled.py
    C20  close hangs, SIGTERM ignored     tests/faults/test_worker_servers.py::test_sigterm_ends_a_worker_whatever_is_away
                                          tests/consumers/runtime/test_process.py::test_sigterm_when_idle_ends_at_once_with_0
                                          tests/consumers/runtime/test_process.py::test_sigterm_finishes_what_runs
                                          tests/consumers/runtime/test_process.py::test_what_does_not_finish_is_handed_back_without_an_attempt
                                          tests/consumers/runtime/test_process.py::test_a_stop_is_heard_while_postgres_is_away
    C22  bugs of the KIP-848 clients      tests/faults/test_worker_chaos.py::test_rolling_restarts_leave_no_long_silence
                                          tests/consumers/runtime/test_health.py::test_old_clients_are_refused_for_the_new_protocol
    C23  a job outlives its lease         tests/faults/test_worker_kills.py::test_a_frozen_process_is_taken_over_and_its_late_outcome_refused
                                          tests/faults/test_worker_frozen.py::test_what_a_frozen_process_had_in_hand_is_done_by_others_while_it_stands_still
                                          tests/consumers/runtime/test_service.py::test_a_zombies_outcome_is_not_recorded
    C25  one tenant starves the rest      tests/consumers/runtime/test_rates.py::test_one_at_its_limit_holds_no_place_and_another_on_its_partition_flows
                                          tests/consumers/runtime/test_rates.py::test_with_10_000_of_one_ahead_anothers_10_are_done_within_seconds
                                          tests/consumers/runtime/test_parking.py::test_another_passes_a_surplus_which_comes_after_in_its_order
    C26  serial queues broken by batches  tests/consumers/complaints/test_one_key.py
                                          tests/consumers/runtime/test_lanes.py::test_a_key_runs_one_at_a_time_and_in_order_and_nothing_is_lost
"""  # noqa: E501 (ids are not to be broken)
