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
    "relay.published": "one chunk is committed to Kafka (info: count; debug: one line per record)",
    # worker
    "worker.ready": "the worker has its first assignment",
    "worker.delivered": "a delivery is done",
    "worker.retried": "an attempt failed; the next is due at `due_at`",
    "worker.dead": "a delivery is a dead letter",
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
    # local stack
    "local.started": "an embedded server answers",
    "local.stopped": "an embedded server has ended",
}
