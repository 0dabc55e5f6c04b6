-- name: stay
-- The topics are read while the transaction is idle, for minutes when they are long.
SELECT set_config('idle_in_transaction_session_timeout', '0', true), set_config('statement_timeout', '0', true),
       set_config('jit', 'off', true);

-- name: scene
-- What the comparison is made in: everything after this statement sees its snapshot. The months are those the table has.
SELECT clock_timestamp() AS now, f.in_recovery, f.system_identifier, f.database_oid, f.database_name,
       ARRAY(SELECT to_date(substring(c.relname FROM '_y([0-9]{4}m[0-9]{2})$'), 'YYYY"m"MM')
               FROM pg_inherits i
               JOIN pg_class c ON c.oid = i.inhrelid
              WHERE i.inhparent = 'public.event_log'::regclass
              ORDER BY 1) AS months
  FROM afluente.relay_facts() f;

-- name: rows
-- The rows of a stretch of time, in whatever order they lie. JSON leaves as bytes, as for the relay.
SELECT e.seq, e.id, e.organization_id, e.event_type, e.entity_kind, e.entity_id,
       convert_to(e.payload::text, 'UTF8') AS payload, convert_to(e.metadata::text, 'UTF8') AS metadata, e.created_at,
       e.tx_id::text::bigint AS tx_id
  FROM event_log e
 WHERE e.created_at >= %(since)s
   AND e.created_at < %(until)s
   AND (%(organization)s::uuid IS NULL OR e.organization_id = %(organization)s);
