-- needs: 0005
-- Stores deliveries that were verified and routed, each with its parts and their events, in one statement: all of them, or
-- none when it fails. For each post the number of events it led to; NULL for a post of which nothing was stored, because
-- one of the channels it was judged by is not what it was (`versions`) any more.
--
-- posts:   [{"id", "organization_id", "channel_id", "channels", "source", "topic", "missing", "headers", "request_id",
--            "received_at"}], in their order; `channels`: those of its parts too; `missing`: parts without a connection.
-- bodies:  the bytes of each post.
-- parts:   [{"id", "post_id", "organization_id", "channel_id", "topic", "dedupe_key", "subject", "summary", "body"}]; body:
--          its own bytes in base64, '' for a copy of the post's, null when it reads the post's.
-- A part that is there already is left out; a post of which every part was is a duplicate, and keeps its hash only.
--
-- Waits no longer than 200 ms for whoever stores the same delivery at this moment (SQLSTATE 55P03): others wait behind it.
CREATE OR REPLACE FUNCTION afluente.receive_webhooks(
    posts       jsonb,
    bodies      bytea[],
    parts       jsonb,
    channel_ids uuid[],
    versions    text[]
) RETURNS TABLE (post_id uuid, events integer)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    _changed uuid[] := ARRAY(
        SELECT v.id
          FROM unnest(receive_webhooks.channel_ids, receive_webhooks.versions) v (id, version)
         WHERE afluente.channel_version(v.id) IS DISTINCT FROM v.version);
    _at      timestamptz := afluente.event_clock();
    _emitted numeric := extract(epoch FROM clock_timestamp());
BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);  -- 2xx means that it is stored
    END IF;
    RETURN QUERY
    WITH post AS MATERIALIZED (
        SELECT p.*
          FROM ROWS FROM (
                   jsonb_to_recordset(receive_webhooks.posts) AS (
                       id uuid, organization_id uuid, channel_id uuid, channels uuid[], source text, topic text,
                       missing integer, headers jsonb, request_id text, received_at timestamptz),
                   unnest(receive_webhooks.bodies))
               AS p (id, organization_id, channel_id, channels, source, topic, missing, headers, request_id,
                     received_at, raw_body)
         WHERE NOT p.channels && _changed
    ), part AS MATERIALIZED (
        SELECT c.id, c.post_id, c.organization_id, c.channel_id, c.topic, c.dedupe_key, c.subject, c.summary,
               CASE c.body WHEN '' THEN p.raw_body ELSE decode(c.body, 'base64') END AS raw_body,
               p.raw_body AS post_body, p.source, p.headers, p.request_id, p.received_at
          FROM jsonb_to_recordset(receive_webhooks.parts) AS c (
                   id uuid, post_id uuid, organization_id uuid, channel_id uuid, topic text, dedupe_key text,
                   subject text, summary jsonb, body text)
          JOIN post p
            ON p.id = c.post_id
    ), child AS (
        INSERT INTO public.webhook_events
               (id, parent_id, organization_id, channel_id, source, topic, verification, dedupe_key, status, subject,
                summary, headers, raw_body, body_sha256, body_bytes, received_at)
        SELECT c.id, c.post_id, c.organization_id, c.channel_id, c.source, c.topic, 'verified', c.dedupe_key, 'received',
               c.subject, c.summary, c.headers, c.raw_body, sha256(COALESCE(c.raw_body, c.post_body)),
               octet_length(COALESCE(c.raw_body, c.post_body)), c.received_at
          FROM part c
         ORDER BY c.organization_id, c.channel_id, c.dedupe_key  -- two that store the same deliveries do not cross
            ON CONFLICT (organization_id, channel_id, dedupe_key) WHERE parent_id IS NOT NULL DO NOTHING
        RETURNING id
    ), fresh AS MATERIALIZED (
        SELECT c.id, c.post_id, c.organization_id, c.source, c.topic, c.request_id
          FROM part c
          JOIN child
            ON child.id = c.id
    ), outcome AS MATERIALIZED (
        SELECT p.id, p.missing,
               (SELECT count(*) FROM part c WHERE c.post_id = p.id)::integer AS parts,
               (SELECT count(*) FROM fresh f WHERE f.post_id = p.id)::integer AS events
          FROM post p
    ), parent AS (
        INSERT INTO public.webhook_events
               (id, organization_id, channel_id, source, topic, verification, reason, status, headers, raw_body,
                body_sha256, body_bytes, received_at)
        SELECT p.id, p.organization_id, p.channel_id, p.source, p.topic, 'verified',
               CASE WHEN o.parts = 0 THEN 'no_connection'
                    WHEN o.missing > 0 THEN 'unrouted_parts:' || o.missing END,
               CASE WHEN o.parts = 0 THEN 'unrouted'
                    WHEN o.events = 0 AND o.missing = 0 THEN 'duplicate' ELSE 'routed' END,
               p.headers,
               CASE WHEN o.events > 0 OR o.missing > 0 OR o.parts = 0 THEN p.raw_body END,
               sha256(p.raw_body), octet_length(p.raw_body), p.received_at
          FROM post p
          JOIN outcome o
            ON o.id = p.id
    ), event AS (
        -- As emit_event_for would: the values are ours, and its organization is there, or the child would not be.
        INSERT INTO public.event_log
               (organization_id, event_type, entity_kind, entity_id, payload, metadata, created_at)
        SELECT f.organization_id, 'webhook.received', 'webhook_event', f.id,
               jsonb_build_object('webhook_event_id', f.id, 'source', f.source, 'topic', f.topic),
               jsonb_strip_nulls(jsonb_build_object('request_id', f.request_id, 'source', 'ingest',
                                                    'emitted_at', _emitted)),
               _at
          FROM fresh f
         ORDER BY f.id
    )
    SELECT o.id, o.events FROM outcome o;
END;
$$;
REVOKE ALL ON FUNCTION afluente.receive_webhooks(jsonb, bytea[], jsonb, uuid[], text[]) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.receive_webhooks(jsonb, bytea[], jsonb, uuid[], text[]) TO afluente_worker;
