-- name: living_owners
-- Lanes whose owner may be alive: its session holds its advisory lock, or (the lock of a session that has just been lost is
-- gone while its process lives on) it has renewed its lease within the time that a lease lasts.
SELECT l.name, l.instance, extract(epoch FROM clock_timestamp() - l.renewed_at)::float8 AS silent_s
  FROM afluente.relay_lane l
 WHERE l.instance IS NOT NULL
   AND (l.renewed_at > clock_timestamp() - make_interval(secs => %(expires_after_s)s)
        OR EXISTS (
               SELECT FROM pg_locks k
                WHERE k.locktype = 'advisory'
                  AND k.objsubid = 1
                  AND k.granted
                  AND k.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                  AND (k.classid::bigint << 32) + k.objid::bigint = l.liveness_key
           ))
 ORDER BY l.name;
