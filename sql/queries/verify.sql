-- name: begin
-- Everything of one reconciliation lives in one transaction with one snapshot, and goes with it. What the topics hold is
-- copied beside the tables, so that the comparing is done here, whatever the amount.
CREATE TEMPORARY TABLE verify_record (
    topic           text NOT NULL,
    partition       integer NOT NULL,
    record_offset   bigint NOT NULL,
    appended_at     timestamptz NOT NULL,
    record_key      text,
    seq             bigint,
    event_id        uuid,
    event_type      text,
    created_at      timestamptz
) ON COMMIT DROP;
CREATE TEMPORARY TABLE verify_relay_letter (
    partition       integer NOT NULL,
    record_offset   bigint NOT NULL,
    seq             bigint,
    event_id        uuid
) ON COMMIT DROP;
CREATE TEMPORARY TABLE verify_worker_record (
    worker          text NOT NULL,
    kind            text NOT NULL,
    topic           text NOT NULL,
    partition       integer NOT NULL,
    record_offset   bigint NOT NULL,
    event_id        uuid,
    target          text NOT NULL,
    generation      integer,
    attempt         integer
) ON COMMIT DROP;
CREATE TEMPORARY TABLE verify_committed (
    worker          text NOT NULL,
    topic           text NOT NULL,
    partition       integer NOT NULL,
    next_offset     bigint NOT NULL,
    PRIMARY KEY (worker, topic, partition)
) ON COMMIT DROP;

-- name: indexes
CREATE INDEX ON verify_record (seq);
CREATE INDEX ON verify_record (event_id);
CREATE INDEX ON verify_record (topic, partition, record_offset);
CREATE INDEX ON verify_relay_letter (seq);
CREATE INDEX ON verify_worker_record (worker, event_id);
CREATE INDEX ON verify_worker_record (worker, topic, partition, record_offset);
ANALYZE verify_record;
ANALYZE verify_relay_letter;
ANALYZE verify_worker_record;
ANALYZE verify_committed;

-- name: workers
SELECT DISTINCT w.worker FROM worker_event_types w
 UNION
SELECT DISTINCT d.worker FROM event_delivery d
 ORDER BY 1;

-- name: unpublished
-- Rows that no record and no dead letter of the relay stands for. Older ones than the topics keep may have had theirs.
SELECT e.seq
  FROM event_log e
 WHERE e.created_at >= %(kept_since)s
   AND NOT EXISTS (SELECT FROM verify_record r WHERE r.seq = e.seq)
   AND NOT EXISTS (SELECT FROM verify_relay_letter l WHERE l.seq = e.seq);

-- name: published_counts
SELECT (SELECT count(*) FROM event_log) AS rows,
       (SELECT count(*) FROM verify_record WHERE seq IS NOT NULL) AS records,
       (SELECT count(DISTINCT l.seq) FROM verify_relay_letter l
         WHERE NOT EXISTS (SELECT FROM verify_record r WHERE r.seq = l.seq)) AS relay_dead_letters,
       (SELECT count(*) FROM verify_record WHERE seq IS NULL) AS directly_produced,
       (SELECT count(*) FROM event_log e
         WHERE e.created_at < %(kept_since)s
           AND NOT EXISTS (SELECT FROM verify_record r WHERE r.seq = e.seq)
           AND NOT EXISTS (SELECT FROM verify_relay_letter l WHERE l.seq = e.seq)) AS expired;

-- name: missing
-- A committed row that was never published, though its topic still keeps what is as old.
SELECT e.id AS id, format('seq %%s, %%s, committed %%s', e.seq, e.event_type, e.created_at) AS detail
  FROM event_log e
 WHERE e.created_at >= %(kept_since)s
   AND NOT EXISTS (SELECT FROM verify_record r WHERE r.seq = e.seq)
   AND NOT EXISTS (SELECT FROM verify_relay_letter l WHERE l.seq = e.seq)
 ORDER BY e.seq;

-- name: duplicates
-- A row published more than once.
SELECT COALESCE(min(e.id::text), min(r.event_id::text)) AS id,
       format('seq %%s, %%s records: %%s', r.seq, count(*),
              string_agg(format('%%s[%%s]@%%s', r.topic, r.partition, r.record_offset), ', '
                         ORDER BY r.topic, r.partition, r.record_offset)) AS detail
  FROM verify_record r
  LEFT JOIN event_log e ON e.seq = r.seq
 WHERE r.seq IS NOT NULL
 GROUP BY r.seq
HAVING count(*) > 1
 ORDER BY r.seq;

-- name: unknown
-- A record that says it comes from a row which is not there. Months that were dropped are behind the floor; a row committed
-- since the snapshot is seen by the connection that asks again.
SELECT r.event_id AS id, r.seq,
       format('seq %%s, %%s[%%s]@%%s', r.seq, r.topic, r.partition, r.record_offset) AS detail
  FROM verify_record r
  LEFT JOIN event_log e ON e.seq = r.seq
 WHERE r.seq IS NOT NULL
   AND e.seq IS NULL
   AND r.created_at >= (SELECT m.floor FROM afluente.monthly_partitioned m WHERE m.table_name = 'event_log'::regclass)
 ORDER BY r.seq;

-- name: committed_since
SELECT e.seq FROM event_log e WHERE e.seq = ANY (%(seqs)s);

-- name: mismatches
-- A record that is not its row's: another id, type, time or organization.
SELECT e.id AS id,
       format('seq %%s, %%s[%%s]@%%s says id %%s, type %%s, key %%s', r.seq, r.topic, r.partition, r.record_offset,
              r.event_id, r.event_type, r.record_key) AS detail
  FROM verify_record r
  JOIN event_log e ON e.seq = r.seq
 WHERE r.event_id IS DISTINCT FROM e.id
    OR r.event_type IS DISTINCT FROM e.event_type
    OR r.created_at IS DISTINCT FROM e.created_at
    OR r.record_key IS DISTINCT FROM e.organization_id::text
 ORDER BY r.seq;

-- name: out_of_order
-- An event that is on Kafka before what caused it. Within a partition the offsets say so, and one organization's records of
-- one family are in one partition; across topics only the brokers' clocks can, which may differ by the tolerance.
SELECT e.id AS id,
       format('%%s[%%s]@%%s comes before its cause %%s, %%s[%%s]@%%s', r.topic, r.partition, r.record_offset,
              c.event_id, c.topic, c.partition, c.record_offset) AS detail
  FROM event_log e
  JOIN verify_record r ON r.seq = e.seq
  JOIN verify_record c ON c.event_id::text = e.metadata ->> 'causation_id'
 WHERE e.metadata ? 'causation_id'
   AND CASE WHEN c.topic = r.topic AND c.partition = r.partition THEN c.record_offset > r.record_offset
            ELSE c.appended_at > r.appended_at + %(tolerance)s END
 ORDER BY e.seq;

-- name: caused_pairs
SELECT count(*)
  FROM event_log e
  JOIN verify_record r ON r.seq = e.seq
  JOIN verify_record c ON c.event_id::text = e.metadata ->> 'causation_id'
 WHERE e.metadata ? 'causation_id';

-- name: delivery_counts
-- One worker: the events published for it, those with rows, those that are still to come, and the rows by their states.
WITH taken AS (
    SELECT DISTINCT ON (r.event_id) r.*
      FROM verify_record r
      JOIN worker_event_types w
        ON w.worker = %(worker)s
       AND (w.event_type = r.event_type OR (w.event_type = '*' AND r.event_type NOT LIKE 'webhook.%%'))
     WHERE r.event_id IS NOT NULL
     ORDER BY r.event_id, r.topic, r.partition, r.record_offset
), seen AS (
    SELECT t.event_id,
           EXISTS (SELECT FROM event_delivery d
                    WHERE d.event_created_at = t.created_at AND d.worker = %(worker)s AND d.event_id = t.event_id) AS has_rows
      FROM taken t
)
SELECT (SELECT count(*) FROM taken) AS published,
       (SELECT count(*) FROM seen WHERE has_rows) AS with_rows,
       (SELECT count(*) FROM seen WHERE NOT has_rows) AS without_rows,
       (SELECT count(*) FROM event_delivery d
         WHERE d.worker = %(worker)s AND EXISTS (SELECT FROM taken t WHERE t.event_id = d.event_id)) AS rows,
       (SELECT COALESCE(jsonb_object_agg(s.state, s.n), '{}')
          FROM (SELECT d.state, count(*) AS n
                  FROM event_delivery d
                 WHERE d.worker = %(worker)s AND EXISTS (SELECT FROM taken t WHERE t.event_id = d.event_id)
                 GROUP BY d.state) s) AS states,
       (SELECT count(*) FROM undecodable_record u WHERE u.worker = %(worker)s) AS undecodable;

-- name: undelivered
-- An event that the worker's group is past and that it has no row for: nothing will bring it back. Not one of an
-- organization that is parked there, nor one whose bytes could not be read, which is a dead letter by its place.
SELECT r.event_id AS id,
       format('%%s, %%s[%%s]@%%s is behind the committed offset %%s', r.event_type, r.topic, r.partition, r.record_offset,
              c.next_offset) AS detail
  FROM verify_record r
  JOIN verify_committed c
    ON c.worker = %(worker)s AND c.topic = r.topic AND c.partition = r.partition AND r.record_offset < c.next_offset
 WHERE EXISTS (SELECT FROM worker_event_types w
                WHERE w.worker = %(worker)s
                  AND (w.event_type = r.event_type OR (w.event_type = '*' AND r.event_type NOT LIKE 'webhook.%%')))
   AND r.event_id IS NOT NULL
   AND NOT EXISTS (SELECT FROM event_delivery d
                    WHERE d.event_created_at = r.created_at AND d.worker = %(worker)s AND d.event_id = r.event_id)
   AND NOT EXISTS (SELECT FROM verify_worker_record p
                    WHERE p.worker = %(worker)s AND p.kind = 'retry' AND p.event_id = r.event_id
                      AND NOT EXISTS (SELECT FROM verify_committed pc
                                       WHERE pc.worker = p.worker AND pc.topic = p.topic AND pc.partition = p.partition
                                         AND p.record_offset < pc.next_offset))
   AND NOT EXISTS (SELECT FROM worker_parked k
                    WHERE k.worker = %(worker)s AND k.topic = r.topic AND k.partition = r.partition
                      AND k.organization_id::text = r.record_key AND k.from_offset <= r.record_offset)
   AND NOT EXISTS (SELECT FROM undecodable_record u
                    WHERE u.worker = %(worker)s AND u.topic = r.topic AND u.partition = r.partition
                      AND u.record_offset = r.record_offset)
 ORDER BY r.topic, r.partition, r.record_offset;

-- name: unread
-- A record that is no event, which the worker's group is past without having kept its place.
SELECT format('%%s[%%s]@%%s', r.topic, r.partition, r.record_offset) AS id,
       'not readable as an event, and not among the worker''s undecodable records' AS detail
  FROM verify_record r
  JOIN verify_committed c
    ON c.worker = %(worker)s AND c.topic = r.topic AND c.partition = r.partition AND r.record_offset < c.next_offset
 WHERE r.event_id IS NULL
   AND NOT EXISTS (SELECT FROM worker_parked k
                    WHERE k.worker = %(worker)s AND k.topic = r.topic AND k.partition = r.partition
                      AND k.organization_id::text = r.record_key AND k.from_offset <= r.record_offset)
   AND NOT EXISTS (SELECT FROM undecodable_record u
                    WHERE u.worker = %(worker)s AND u.topic = r.topic AND u.partition = r.partition
                      AND u.record_offset = r.record_offset)
 ORDER BY r.topic, r.partition, r.record_offset;

-- name: stranded
-- A delivery that is not finished and that nothing will bring back: its bytes are not kept in Postgres, and neither its own
-- record nor one of its retry ones is still ahead of the group, or parked.
SELECT d.event_id AS id,
       format('%%s%%s, attempts %%s, generation %%s: no record is left that brings it back', d.state,
              CASE WHEN d.target = '' THEN '' ELSE ' for ' || d.target END, d.attempts, d.generation) AS detail
  FROM event_delivery d
 WHERE d.worker = %(worker)s
   AND d.state IN ('claimed', 'waiting')
   AND d.kept_value IS NULL
   AND NOT EXISTS (SELECT FROM verify_worker_record p
                    WHERE p.worker = d.worker AND p.kind = 'retry' AND p.event_id = d.event_id
                      AND NOT EXISTS (SELECT FROM verify_committed pc
                                       WHERE pc.worker = p.worker AND pc.topic = p.topic AND pc.partition = p.partition
                                         AND p.record_offset < pc.next_offset))
   AND EXISTS (SELECT FROM verify_record r
                 JOIN verify_committed c
                   ON c.worker = d.worker AND c.topic = r.topic AND c.partition = r.partition
                WHERE r.event_id = d.event_id AND r.record_offset < c.next_offset)
   AND NOT EXISTS (SELECT FROM verify_record r
                    WHERE r.event_id = d.event_id
                      AND (NOT EXISTS (SELECT FROM verify_committed c
                                        WHERE c.worker = d.worker AND c.topic = r.topic AND c.partition = r.partition
                                          AND r.record_offset < c.next_offset)
                           OR EXISTS (SELECT FROM worker_parked k
                                      WHERE k.worker = d.worker AND k.topic = r.topic AND k.partition = r.partition
                                        AND k.organization_id::text = r.record_key AND k.from_offset <= r.record_offset)))
 ORDER BY d.event_id, d.target;

-- name: letterless
-- A dead delivery without its record in the dead-letter topic. While a record of it is still ahead of the group it will get
-- one; letters older than their topic keeps are gone.
SELECT d.event_id AS id,
       format('dead%%s since %%s (%%s): no such record in the dead-letter topic',
              CASE WHEN d.target = '' THEN '' ELSE ' for ' || d.target END, d.finished_at, d.last_error) AS detail
  FROM event_delivery d
 WHERE d.worker = %(worker)s
   AND d.state = 'dead'
   AND d.finished_at >= %(letters_kept_since)s
   AND NOT EXISTS (SELECT FROM verify_worker_record l
                    WHERE l.worker = d.worker AND l.kind = 'dead-letter' AND l.event_id = d.event_id AND l.target = d.target
                      AND l.generation IS NOT DISTINCT FROM d.generation)
   AND NOT EXISTS (SELECT FROM verify_worker_record p
                    WHERE p.worker = d.worker AND p.kind = 'retry' AND p.event_id = d.event_id
                      AND NOT EXISTS (SELECT FROM verify_committed pc
                                       WHERE pc.worker = p.worker AND pc.topic = p.topic AND pc.partition = p.partition
                                         AND p.record_offset < pc.next_offset))
   AND NOT EXISTS (SELECT FROM verify_record r
                    WHERE r.event_id = d.event_id
                      AND (NOT EXISTS (SELECT FROM verify_committed c
                                        WHERE c.worker = d.worker AND c.topic = r.topic AND c.partition = r.partition
                                          AND r.record_offset < c.next_offset)
                           OR EXISTS (SELECT FROM worker_parked k
                                      WHERE k.worker = d.worker AND k.topic = r.topic AND k.partition = r.partition
                                        AND k.organization_id::text = r.record_key AND k.from_offset <= r.record_offset)))
 ORDER BY d.event_id, d.target;

-- name: stray_letters
-- A dead-letter record of an event that the worker has no row for. One that names no event was put there by somebody else,
-- or is a record that could not be read; those are counted by their places.
SELECT l.event_id AS id, l.partition, l.record_offset,
       format('%%s[%%s]@%%s is the dead letter of no delivery', l.topic, l.partition, l.record_offset) AS detail
  FROM verify_worker_record l
 WHERE l.worker = %(worker)s
   AND l.kind = 'dead-letter'
   AND l.event_id IS NOT NULL
   AND NOT EXISTS (SELECT FROM event_delivery d
                    WHERE d.worker = l.worker AND d.event_id = l.event_id AND d.target = l.target)
   AND NOT EXISTS (SELECT FROM undecodable_record u
                    WHERE u.worker = l.worker AND u.dead_partition = l.partition AND u.dead_offset = l.record_offset)
 ORDER BY l.partition, l.record_offset;

-- name: delivered_since
-- Of those, the ones whose delivery or place was committed since the snapshot.
SELECT s.partition, s.record_offset
  FROM jsonb_to_recordset(%(suspects)s::jsonb) AS s (event_id uuid, partition integer, record_offset bigint)
 WHERE EXISTS (SELECT FROM event_delivery d WHERE d.worker = %(worker)s AND d.event_id = s.event_id)
    OR EXISTS (SELECT FROM undecodable_record u
                WHERE u.worker = %(worker)s AND u.dead_partition = s.partition AND u.dead_offset = s.record_offset);

-- name: recount
-- The summaries of the live generation beside a recount: every contact event with a metric, less those whose record is at or
-- beyond the fence, is not published yet, or could not be folded and is kept as a dead letter.
CREATE TEMPORARY TABLE verify_summary ON COMMIT DROP AS
WITH live AS (
    SELECT g.generation FROM stream_generation g WHERE g.state = 'live'
), ahead AS (
    SELECT e.payload ->> 'contact_event_id' AS contact_event_id
      FROM event_log e
      LEFT JOIN verify_record r ON r.seq = e.seq
     WHERE e.event_type = 'contact_event.recorded'
       AND CASE WHEN r.seq IS NULL THEN e.created_at >= %(kept_since)s
                ELSE NOT EXISTS (SELECT FROM stream_offset o JOIN live USING (generation)
                                  WHERE o.topic = r.topic AND o.partition = r.partition
                                    AND r.record_offset < o.next_offset)
                  OR EXISTS (SELECT FROM stream_dead_letter x JOIN live USING (generation)
                              WHERE x.topic = r.topic AND x.partition = r.partition
                                AND x.record_offset = r.record_offset)
           END
), counted AS (
    SELECT c.*, COALESCE(c.currency, 'BRL') AS counted_in
      FROM contact_events c
     WHERE c.metric_name IS NOT NULL
       AND NOT EXISTS (SELECT FROM ahead a WHERE a.contact_event_id = c.id::text)
), totals AS (
    SELECT t.organization_id, t.contact_id, t.metric_name,
           jsonb_object_agg(t.counted_in, jsonb_build_array(trim_scale(t.total)::text, t.n)) AS totals
      FROM (SELECT c.organization_id, c.contact_id, c.metric_name, c.counted_in, sum(c.value) AS total, count(*) AS n
              FROM counted c
             WHERE c.value IS NOT NULL
             GROUP BY 1, 2, 3, 4) t
     GROUP BY 1, 2, 3
), expected AS (
    SELECT c.organization_id, c.contact_id, c.metric_name, count(*) AS event_count,
           min(c.occurred_at) AS first_event_at, max(c.occurred_at) AS last_event_at
      FROM counted c
     GROUP BY 1, 2, 3
), kept AS (
    SELECT s.organization_id, s.contact_id, s.metric_name, s.event_count, s.first_event_at, s.last_event_at,
           (SELECT jsonb_object_agg(y.currency, jsonb_build_array(trim_scale(y.total_value)::text, y.value_count))
              FROM contact_metrics_summary_currency y
             WHERE y.generation = s.generation AND y.organization_id = s.organization_id
               AND y.contact_id = s.contact_id AND y.metric_name = s.metric_name) AS totals
      FROM contact_metrics_summary s
      JOIN live USING (generation)
)
SELECT organization_id, contact_id, metric_name,
       x.event_count AS expected_count, x.first_event_at AS expected_first, x.last_event_at AS expected_last,
       t.totals AS expected_totals,
       k.event_count AS kept_count, k.first_event_at AS kept_first, k.last_event_at AS kept_last, k.totals AS kept_totals
  FROM expected x
  LEFT JOIN totals t USING (organization_id, contact_id, metric_name)
  FULL JOIN kept k USING (organization_id, contact_id, metric_name);

-- name: summary_counts
SELECT count(*) FILTER (WHERE kept_count IS NOT NULL) AS summaries,
       COALESCE(sum(kept_count), 0)::bigint AS counted,
       COALESCE(sum(expected_count), 0)::bigint AS recounted,
       (SELECT count(*) FROM stream_dead_letter x JOIN stream_generation g USING (generation)
         WHERE g.state = 'live') AS stream_dead_letters
  FROM verify_summary;

-- name: summary_differences
SELECT format('%%s/%%s/%%s', s.organization_id, s.contact_id, s.metric_name) AS id,
       CASE WHEN s.kept_count IS NULL THEN format('no summary; the recount has %%s events', s.expected_count)
            WHEN s.expected_count IS NULL THEN format('a summary of %%s events; the recount has none', s.kept_count)
            ELSE format('summary %%s; recount %%s',
                        jsonb_build_array(s.kept_count, s.kept_first, s.kept_last, s.kept_totals),
                        jsonb_build_array(s.expected_count, s.expected_first, s.expected_last, s.expected_totals))
       END AS detail
  FROM verify_summary s
 WHERE (s.kept_count, s.kept_first, s.kept_last, s.kept_totals)
       IS DISTINCT FROM (s.expected_count, s.expected_first, s.expected_last, s.expected_totals)
 ORDER BY s.organization_id, s.contact_id, s.metric_name;
