"""What users of other outbox relays and change-capture tools reported, replayed on real servers.

Each story ends with a plain read_committed consumer that shares no code with the relay: every committed row once, no
row of a rolled-back transaction, each organization in an order the database could have committed in. What other tests
show already is named here and not repeated; `test_the_table.py` holds this table to what there is.

    S1   an id committed late; holes      tests/scenarios/test_late_commits_and_holes.py
                                          tests/producers/relay/test_source.py::test_savepoints_rolled_back_leave_holes_and_nothing_else
    S2   idle beside a busy table         tests/scenarios/test_idle_beside_a_busy_table.py
    S3   the mark dropped or put back     tests/scenarios/test_the_mark_in_the_database.py
                                          tests/producers/relay/test_identity.py::test_a_position_that_is_gone_is_not_taken_for_a_beginning
                                          tests/producers/relay/test_identity.py::test_a_sequence_put_back_is_refused
    S4   32 writers                       tests/scenarios/test_many_writers.py
    S5   one partition for everybody      tests/scenarios/test_one_partition_for_everybody.py
                                          tests/schemas/test_partitioner.py::test_partition_is_the_java_clients
                                          tests/schemas/test_partitioner.py::test_record_without_key_is_refused
                                          tests/schemas/test_producers_agree.py::test_librdkafka_with_our_settings_agrees
                                          tests/schemas/test_producers_agree.py::test_aiokafka_agrees
    S6   across the month's border        tests/scenarios/test_across_the_month.py
                                          tests/sql/test_event_log_months.py::test_a_month_is_sealed_when_it_is_over_and_published
    S7   timed out, or forgotten          tests/scenarios/test_fenced_without_a_rival.py
                                          tests/faults/test_relay_kills.py::test_a_transaction_timed_out_by_the_broker_is_no_rival
    S8   200,000 rows in one transaction  tests/scenarios/test_one_huge_transaction.py
    S9   rows updated and deleted         tests/producers/relay/test_service.py::test_an_update_or_delete_of_published_rows_publishes_nothing
    S10  moments                          tests/scenarios/test_moments.py
                                          tests/schemas/test_codec.py::test_moments_keep_their_microseconds_and_their_spelling
                                          tests/schemas/test_codec.py::test_naive_created_at_is_refused
    S11  shapes change while running      tests/scenarios/test_shapes_change_while_running.py
                                          tests/schemas/test_compatibility.py::test_breaking_change_is_found
                                          tests/schemas/test_evolution.py::test_compatible_growth_flows_without_a_restart_of_old_consumers
    S12  generic tools and a registry     tests/schemas/test_registry.py::test_bytes_are_those_of_the_confluent_serializer
                                          tests/schemas/test_registry.py::test_new_records_carry_the_registrys_ids_and_are_read_by_them
                                          tests/schemas/test_codec.py::test_framing_is_a_zero_byte_and_the_committed_id
    S13  restarts, and a backlog          tests/scenarios/test_a_backlog_and_new_rows.py
                                          tests/faults/test_relay_servers.py::test_the_broker_restarts_under_load_and_nothing_is_lost_or_twice
                                          tests/faults/test_relay_servers.py::test_postgres_restarts_under_load_and_nothing_is_lost_or_twice
    S14  a hot organization               tests/scenarios/test_a_hot_organization.py
"""  # noqa: E501 (ids are not to be broken)
