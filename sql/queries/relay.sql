-- Every probe goes over the months that are not sealed (`since`), and none over what is published. A window's rows are in
-- three disjoint places (xmax, xip: of s1):
--   seq <= t1, tx_id >= xmax         transactions that had not begun, or not ended, at s1          index (tx_id, seq)
--   seq <= t1, tx_id one of xip      those s1 lists as running, once they have ended               index (tx_id, seq)
--   seq >  t1                        all others, and ids given out again after a crash             index (seq)
-- What would let the planner walk along the index on seq from the very first row is written so that it cannot: `seq + 0`
-- in the first, where both ends of a range would make it look short, and in the second pairs in place of `tx_id = x`, which
-- only the index on both columns puts in order.
-- Where it says `scope`, source.py puts which organizations are meant, when it is not all of them.
-- Ids and JSON leave as text, which the reader takes as the bytes that it is: nobody makes a string, or a UUID, of it on
-- the way to the encoder. The columns are those of schemas.RawRow.

-- name: poll
-- One row with this statement's snapshot (event_type) and the highest seq there is (entity_kind), its own seq NULL; and the
-- window's first rows. Ids at or above the snapshot's xmax have not ended, so the first probe stops there.
SELECT NULL::bigint AS seq, NULL::text AS id, NULL::text AS organization_id,
       pg_current_snapshot()::text AS event_type,
       COALESCE((SELECT e.seq FROM event_log e WHERE e.created_at >= %(since)s::timestamptz ORDER BY e.seq DESC LIMIT 1), 0)::text AS entity_kind,
       NULL::text AS entity_id, NULL::text AS payload, NULL::text AS metadata, NULL::timestamptz AS created_at
UNION ALL
SELECT w.seq, w.id::text, w.organization_id::text, w.event_type, w.entity_kind, w.entity_id::text, w.payload::text,
       w.metadata::text, w.created_at
  FROM (SELECT u.*
          FROM ((SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
                   FROM event_log e
                  WHERE e.created_at >= %(since)s::timestamptz
                    AND e.tx_id >= %(xmax)s::xid8
                    AND e.tx_id < pg_snapshot_xmax(pg_current_snapshot())
                    AND e.seq <= %(t1)s
                  ORDER BY e.seq + 0
                  LIMIT %(rows)s)
                UNION ALL
                (SELECT o.*
                   FROM unnest(%(xip)s::xid8[]) AS ended (tx_id)
                  CROSS JOIN LATERAL (
                        SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
                          FROM event_log e
                         WHERE e.created_at >= %(since)s::timestamptz
                           AND (e.tx_id, e.seq) >= (ended.tx_id, 0::bigint)
                           AND (e.tx_id, e.seq) <= (ended.tx_id, %(t1)s)
                         ORDER BY e.tx_id, e.seq
                         LIMIT %(rows)s) o
                  WHERE pg_visible_in_snapshot(ended.tx_id, pg_current_snapshot()))
                UNION ALL
                (SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
                   FROM event_log e
                  WHERE e.created_at >= %(since)s::timestamptz
                    AND e.seq > %(t1)s
                  ORDER BY e.seq
                  LIMIT %(rows)s)) u
         ORDER BY u.seq
         LIMIT %(rows)s) w;

-- name: snapshot
-- Whether anything has happened since a poll that found nothing: a tenth of its price.
SELECT pg_current_snapshot()::text;

-- name: head
-- This statement's snapshot, and the highest seq there is: where a window may end.
SELECT pg_current_snapshot()::text,
       COALESCE((SELECT e.seq FROM event_log e WHERE e.created_at >= %(since)s::timestamptz ORDER BY e.seq DESC LIMIT 1), 0);

-- name: page
-- The next rows of an open window of which `last` is published. What s2 shows is committed, now and for ever.
SELECT w.seq, w.id::text, w.organization_id::text, w.event_type, w.entity_kind, w.entity_id::text, w.payload::text,
       w.metadata::text, w.created_at
  FROM (SELECT u.*
          FROM ((SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
                   FROM event_log e
                  WHERE e.created_at >= %(since)s::timestamptz
                    AND e.tx_id >= %(xmax)s::xid8
                    AND e.tx_id < pg_snapshot_xmax(%(s2)s::pg_snapshot)
                    AND e.seq + 0 > %(last)s
                    AND e.seq <= %(t1)s
                    AND pg_visible_in_snapshot(e.tx_id, %(s2)s::pg_snapshot)
                    /* scope */
                  ORDER BY e.seq + 0
                  LIMIT %(rows)s)
                UNION ALL
                (SELECT o.*
                   FROM unnest(%(xip)s::xid8[]) AS ended (tx_id)
                  CROSS JOIN LATERAL (
                        SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
                          FROM event_log e
                         WHERE e.created_at >= %(since)s::timestamptz
                           AND (e.tx_id, e.seq) > (ended.tx_id, %(last)s)
                           AND (e.tx_id, e.seq) <= (ended.tx_id, %(t1)s)
                           /* scope */
                         ORDER BY e.tx_id, e.seq
                         LIMIT %(rows)s) o
                  WHERE pg_visible_in_snapshot(ended.tx_id, %(s2)s::pg_snapshot))
                UNION ALL
                (SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id, e.payload, e.metadata, e.created_at
                   FROM event_log e
                  WHERE e.created_at >= %(since)s::timestamptz
                    AND e.seq > greatest(%(t1)s, %(last)s)
                    AND e.seq <= %(t2)s
                    AND pg_visible_in_snapshot(e.tx_id, %(s2)s::pg_snapshot)
                    /* scope */
                  ORDER BY e.seq
                  LIMIT %(rows)s)) u
         ORDER BY u.seq
         LIMIT %(rows)s) w;

-- name: tail
-- `page` once `last` has passed t1, which is nearly all of a backlog: one walk along seq, nothing to sort.
SELECT e.seq, e.id::text, e.organization_id::text, e.event_type, e.entity_kind, e.entity_id::text, e.payload::text,
       e.metadata::text, e.created_at
  FROM event_log e
 WHERE e.created_at >= %(since)s::timestamptz
   AND e.seq > %(last)s
   AND e.seq <= %(t2)s
   AND pg_visible_in_snapshot(e.tx_id, %(s2)s::pg_snapshot)
   /* scope */
 ORDER BY e.seq
 LIMIT %(rows)s;

-- name: lag
-- The committed rows that a position leaves unpublished, by organization, and when the oldest was written; of each of the
-- three places up to `rows`.
SELECT w.organization_id, count(*), min(w.created_at)
  FROM ((SELECT e.organization_id, e.created_at
           FROM event_log e
          WHERE e.created_at >= %(since)s::timestamptz
            AND e.tx_id >= %(xmax)s::xid8
            AND e.seq <= %(t1)s
            AND e.seq > %(last)s
            /* scope */
          LIMIT %(rows)s)
        UNION ALL
        (SELECT e.organization_id, e.created_at
           FROM event_log e
          WHERE e.created_at >= %(since)s::timestamptz
            AND e.tx_id = ANY (%(xip)s::xid8[])
            AND e.seq <= %(t1)s
            AND e.seq > %(last)s
            /* scope */
          LIMIT %(rows)s)
        UNION ALL
        (SELECT e.organization_id, e.created_at
           FROM event_log e
          WHERE e.created_at >= %(since)s::timestamptz
            AND e.seq > greatest(%(t1)s, %(last)s)
            /* scope */
          ORDER BY e.seq
          LIMIT %(rows)s)) w
 GROUP BY w.organization_id;

-- name: unsealed_since
-- Where the months begin that a position with this xmin(s1) and t1 still reads. A month sealed by another lane, or before
-- this lane began, is left out only when all its transactions had ended in s1. Months are sealed in order.
SELECT COALESCE(max(ends_at), '-infinity')::text
  FROM event_log_seal
 WHERE sealed_at IS NOT NULL
   AND boundary <= %(xmin)s::xid8
   AND COALESCE(last_seq, 0) <= %(t1)s;

-- name: facts
-- What the position is checked against.
SELECT in_recovery, system_identifier, timeline, database_oid, database_name, last_seq FROM afluente.relay_facts();

-- name: has
-- A row that was published is never gone while older ones are there: months leave the oldest first.
SELECT EXISTS (SELECT FROM event_log e WHERE e.seq = %(seq)s AND e.id = %(id)s::uuid)
       OR NOT EXISTS (SELECT FROM event_log e WHERE e.seq < %(seq)s);

-- name: release_due
SELECT release_due_deferred(%(rows)s);

-- name: seal
SELECT afluente.seal_event_log(%(s1)s::pg_snapshot, %(t1)s);

-- name: ensure_partitions
SELECT afluente.ensure_partitions((clock_timestamp() AT TIME ZONE 'UTC' + interval '3 months')::date);

-- name: lane
SELECT instance, owned_since, extract(epoch FROM clock_timestamp() - renewed_at)::float8 AS silent_s, takeovers,
       kafka_cluster_id
  FROM afluente.relay_lane
 WHERE name = %(name)s;

-- name: published_to
SELECT max(kafka_cluster_id) FROM afluente.relay_lane WHERE starts_with(name, %(prefix)s || 'relay-');

-- name: owners
-- The instances that own a lane of this prefix and have said so lately.
SELECT instance
  FROM afluente.relay_lane
 WHERE starts_with(name, %(prefix)s || 'relay-')
   AND instance IS NOT NULL
   AND renewed_at > clock_timestamp() - interval '8 seconds'
 ORDER BY name;

-- name: owned
-- Whether a relay runs on this database; a killed one seems to for as long as its lease lasts.
SELECT EXISTS (
           SELECT FROM afluente.relay_lane
            WHERE instance IS NOT NULL
              AND renewed_at > clock_timestamp() - interval '8 seconds'
       );

-- name: lane_for_update
SELECT instance, liveness_key, extract(epoch FROM clock_timestamp() - renewed_at)::float8 AS silent_s
  FROM afluente.relay_lane
 WHERE name = %(name)s
   FOR UPDATE;

-- name: add_lane
INSERT INTO afluente.relay_lane (name) VALUES (%(name)s) ON CONFLICT (name) DO NOTHING;

-- name: take_lane
UPDATE afluente.relay_lane
   SET instance = %(instance)s, liveness_key = %(liveness_key)s, renewed_at = clock_timestamp(),
       owned_since = clock_timestamp(), takeovers = takeovers + (instance IS NOT NULL)::integer
 WHERE name = %(name)s;

-- name: renew_lane
UPDATE afluente.relay_lane
   SET renewed_at = clock_timestamp()
 WHERE name = %(name)s
   AND instance = %(instance)s;

-- name: give_up_lane
UPDATE afluente.relay_lane
   SET instance = NULL, renewed_at = NULL
 WHERE name = %(name)s
   AND instance = %(instance)s;

-- name: mark_claimed
UPDATE afluente.relay_lane
   SET kafka_cluster_id = %(cluster_id)s, first_claimed_at = COALESCE(first_claimed_at, clock_timestamp())
 WHERE name = %(name)s
   AND kafka_cluster_id IS DISTINCT FROM %(cluster_id)s;
