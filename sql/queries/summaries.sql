-- name: live_generation
-- The generation people read, and the stream application writes.
SELECT generation
FROM stream_generation
WHERE state = 'live';

-- name: claim
-- Make the partitions ours and learn where to go on, and in which topic of that name. Whoever claimed them before can no
-- longer write.
INSERT INTO stream_offset AS o (generation, topic, partition, topic_id, claimed_by)
SELECT %(generation)s, p.topic, p.partition, p.topic_id, %(owner)s
FROM json_to_recordset(%(partitions)s::json) AS p (topic text, partition integer, topic_id text)
ORDER BY p.topic, p.partition
ON CONFLICT (generation, topic, partition) DO UPDATE
    SET claimed_by = EXCLUDED.claimed_by,
        claimed_at = clock_timestamp()
RETURNING o.topic, o.partition, o.next_offset, o.topic_id;

-- name: lock_fences
-- The fences of the partitions in hand, locked in one order for all processes. A partition that somebody else claimed
-- meanwhile is missing from the answer.
SELECT o.topic, o.partition, o.next_offset
FROM json_to_recordset(%(partitions)s::json) AS p (topic text, partition integer)
JOIN stream_offset AS o ON o.generation = %(generation)s AND o.topic = p.topic AND o.partition = p.partition
WHERE o.claimed_by = %(owner)s
ORDER BY o.topic, o.partition
FOR UPDATE OF o;

-- name: see
-- Take note of contact events; the answer says how many are new, and which when not all are.
WITH fresh AS (
    INSERT INTO stream_seen_event (generation, organization_id, contact_event_id)
    SELECT %(generation)s, f.organization_id, f.contact_event_id
    FROM json_to_recordset(%(facts)s::json) AS f (organization_id uuid, contact_event_id uuid)
    ORDER BY f.organization_id, f.contact_event_id
    ON CONFLICT DO NOTHING
    RETURNING organization_id, contact_event_id
)
SELECT
    count(*),
    CASE WHEN count(*) < %(expected)s THEN array_agg(organization_id::text || contact_event_id::text) END
FROM fresh;

-- name: apply
-- Add the increments, keep the dead letters, move the fences: all of a fetch. Summaries are taken in key order, so that
-- two processes with contacts in common wait for each other instead of locking up. The answer is the number of fences
-- moved; fewer than asked for means that somebody else moved one, and the transaction must not be committed.
WITH items AS (
    SELECT *
    FROM json_to_recordset(%(increments)s::json) AS i (
        organization_id uuid, contact_id uuid, metric_name text,
        event_count bigint, first_event_at timestamptz, last_event_at timestamptz, totals json
    )
), summaries AS (
    INSERT INTO contact_metrics_summary AS s
        (generation, organization_id, contact_id, metric_name, event_count, first_event_at, last_event_at)
    SELECT %(generation)s, i.organization_id, i.contact_id, i.metric_name, i.event_count, i.first_event_at, i.last_event_at
    FROM items AS i
    ORDER BY i.organization_id, i.contact_id, i.metric_name
    ON CONFLICT (generation, organization_id, contact_id, metric_name) DO UPDATE
        SET event_count = s.event_count + EXCLUDED.event_count,
            first_event_at = least(s.first_event_at, EXCLUDED.first_event_at),
            last_event_at = greatest(s.last_event_at, EXCLUDED.last_event_at),
            updated_at = clock_timestamp()
), totals AS (
    INSERT INTO contact_metrics_summary_currency AS c
        (generation, organization_id, contact_id, metric_name, currency, total_value, value_count)
    SELECT %(generation)s, i.organization_id, i.contact_id, i.metric_name, t.currency, t.total_value, t.value_count
    FROM items AS i
    CROSS JOIN json_to_recordset(i.totals) AS t (currency text, total_value numeric, value_count bigint)
    ORDER BY i.organization_id, i.contact_id, i.metric_name, t.currency
    ON CONFLICT (generation, organization_id, contact_id, metric_name, currency) DO UPDATE
        SET total_value = c.total_value + EXCLUDED.total_value,
            value_count = c.value_count + EXCLUDED.value_count,
            updated_at = clock_timestamp()
), dead_letters AS (
    INSERT INTO stream_dead_letter
        (generation, topic, partition, record_offset, organization_id, record_key, record_value, record_headers,
         error_class, reason)
    SELECT
        %(generation)s, d.topic, d.partition, d.record_offset, d.organization_id,
        decode(d.record_key, 'hex'), decode(d.record_value, 'hex'), d.record_headers, d.error_class, d.reason
    FROM json_to_recordset(%(dead_letters)s::json) AS d (
        topic text, partition integer, record_offset bigint, organization_id uuid,
        record_key text, record_value text, record_headers jsonb, error_class text, reason text
    )
    ON CONFLICT (generation, topic, partition, record_offset) DO NOTHING
), fences AS (
    UPDATE stream_offset AS o
    SET next_offset = f.next_offset,
        updated_at = clock_timestamp()
    FROM json_to_recordset(%(fences)s::json) AS f (
        topic text, partition integer, expected bigint, next_offset bigint
    )
    WHERE o.generation = %(generation)s
        AND o.topic = f.topic
        AND o.partition = f.partition
        AND o.next_offset = f.expected
        AND o.claimed_by = %(owner)s
    RETURNING 1
)
SELECT count(*) FROM fences;

-- name: fences
-- How far each partition has been folded, at the live generation.
SELECT o.generation, o.topic, o.partition, o.next_offset, o.claimed_by, o.updated_at
FROM stream_offset AS o
JOIN stream_generation AS g ON g.generation = o.generation
WHERE g.state = 'live'
ORDER BY o.topic, o.partition;

-- name: totals
-- What the live generation holds: summaries, events counted, dead letters.
SELECT
    g.generation,
    (SELECT count(*) FROM contact_metrics_summary AS s WHERE s.generation = g.generation) AS summaries,
    (SELECT coalesce(sum(s.event_count), 0)::bigint FROM contact_metrics_summary AS s WHERE s.generation = g.generation)
        AS events,
    (SELECT count(*) FROM stream_dead_letter AS d WHERE d.generation = g.generation) AS dead_letters
FROM stream_generation AS g
WHERE g.state = 'live';

-- name: dead_letters
-- Records that could not be folded at the live generation, newest first.
SELECT d.id, d.topic, d.partition, d.record_offset, d.organization_id, d.error_class, d.reason,
       octet_length(d.record_value) AS bytes, d.recorded_at
FROM stream_dead_letter AS d
JOIN stream_generation AS g ON g.generation = d.generation
WHERE g.state = 'live'
ORDER BY d.recorded_at DESC, d.id DESC
LIMIT %(limit)s;
