"""Every log event, in one table: its name and what it says. Dashboards and tests rely on these names.

The same fields everywhere: topic, partition, offset, event_id, organization_id, worker, attempt, count, error.
"""

EVENTS: dict[str, str] = {
    # any process
    "library.log": "a library's own log line; `message` and `logger` say which",
    "process.stopping": "a stop signal arrived; work in hand is finished",
    "process.failed": "an error nobody expected ended the process",
    # relay
    "relay.ready": "the relay holds its lane and has read its position back",
    "relay.published": "records are committed to Kafka (`count` since the last line; --log-records: one line for each)",
    "relay.standing_by": "another instance owns the lane; this one waits for it to end",
    "relay.taking_over": "the lane's owner is gone, silent or pushed aside; `reason` says which",
    "relay.dead_lettered": "a row cannot be published as it is and went to relay.dead-letter",
    "relay.session_lost": "Kafka or Postgres failed; the relay begins anew from the position in Kafka",
    "relay.postgres_away": "the lease cannot be renewed; publishing goes on as long as it can",
    "relay.commit_taken_back": "Kafka lost a transaction it had confirmed; its rows are published again",
    "relay.partitions_made": "monthly partitions were made ahead",
    "relay.months_sealed": "months that are over and published are sealed",
    "relay.maintenance_failed": "partitions or seals could not be made; tried again in a few minutes",
    "relay.watch_failed": "debug: the cluster did not answer the look for topics made anew",
    "relay.stopped": "the relay has ended",
    # worker
    "worker.ready": "the worker has its first assignment",
    "worker.assigned": "the worker's partitions changed (`partitions`: how many it has now)",
    "worker.delivered": "a delivery is done",
    "worker.retried": "an attempt failed; the next is due at `next_attempt_at`",
    "worker.snoozed": "a delivery asked to come back at `next_attempt_at`; no attempt was used",
    "worker.dead": "a delivery is a dead letter",
    "worker.claim_taken_over": "a delivery that a dead process (`process`) had claimed runs here now",
    "worker.superseded": "this process was given up for dead; what it had run is recorded by another",
    "worker.handed_back": "a stop handed back what was claimed and not finished (`count`)",
    "worker.targets_failed": "the targets of an event could not be fixed; tried again",
    "worker.failed_hook_failed": "a worker's `failed` raised; the attempt is recorded without it",
    "worker.records_expired": "retention deleted records before they were read; replay the events to this worker",
    "worker.kafka_error": "the Kafka client reports an error it recovers from (one line a minute for each kind)",
    "worker.kafka_away": "a retry or dead-letter record could not be produced; tried again, its source uncommitted",
    "worker.record_refused": "the broker refuses a retry or dead-letter record as it is; it goes without `left_out`",
    "worker.unfit": "a batch failed for what is in a record; it is done in parts until that one is found",
    "worker.claim_stuck": "the event of a claim that a dead process left cannot be made a record; it stays claimed",
    "worker.commit_failed": "offsets could not be committed at the end; their records come again and are known",
    "worker.postgres_away": "Postgres is away; the same transaction is tried again",
    "worker.transaction_repeated": "Postgres ended a transaction for another's sake (deadlock, serialization); again",
    # stream
    "stream.ready": "the Faust app has its partitions",
    "stream.assigned": "partitions are claimed and read on from their fences",
    "stream.committed": "one fetch is folded into the summaries, offsets included",
    "stream.dead": "a record could not be folded; it is kept in stream_dead_letter",
    "stream.divided": "a fetch was refused by the database; it is being halved to find the record",
    "stream.display_failed": "the offsets shown in Kafka could not be committed; nothing depends on them",
    "stream.fenced": "another process has claimed the partitions; this one ends",
    "stream.gap": "records were deleted by retention before they were folded",
    "stream.look_failed": "the watchdog could not read the numbers, and will look again",
    "stream.retrying": "Kafka, Postgres or the registry is away; tried again",
    "stream.stopped": "the stream application has ended as asked",
    "stream.stuck": "records are waiting and nothing moves; the process ends",
    # web
    "web.ready": "the HTTP server accepts connections",
    "ingest.stored": "a webhook is stored, with one event for each organization it belongs to (`count`)",
    "ingest.refused": "a webhook was not taken; `reason` says why",
    "ingest.unavailable": "a webhook could not be stored; the sender was told to try again",
}
