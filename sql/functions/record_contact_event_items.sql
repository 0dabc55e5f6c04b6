-- needs: 0020
-- The body of record_contact_events, on items that are typed already (an import stages them with COPY).
--
-- afluente.contact_event_item has no defaults: source_type is EXTERNAL, contact_source is source, currency BRL when there is
-- a value, times now, properties none; a contact event type and a metric that name the same facts are both set. Without
-- `all_outcomes` only the items are told that were not recorded, or made a contact.
CREATE OR REPLACE FUNCTION afluente.record_contact_event_items(
    items           afluente.contact_event_item[],
    create_contacts boolean DEFAULT false,
    metadata        jsonb DEFAULT '{}',
    all_outcomes    boolean DEFAULT true
)
RETURNS TABLE (n integer, contact_event_id uuid, outcome text, reason text, contact_created boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    _organization_id uuid := auth.organization_id();
    _person          record;
    _made            record;
    _created         integer[] := '{}';
    _metadata        jsonb := record_contact_event_items.metadata
                              || jsonb_build_object('emitted_at', extract(epoch FROM clock_timestamp()));
    _now             timestamptz := afluente.event_clock();
    _now_text        text := to_char(_now AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"');
    _ids             uuid[];
    _outcomes        text[];
    _reasons         text[];
BEGIN
    IF _organization_id IS NULL THEN
        RAISE EXCEPTION 'no organization: contact events belong to one' USING ERRCODE = 'AF001',
            HINT = 'Set app.organization_id for the transaction (workers: act for the organization of the events).';
    END IF;
    -- As emit_event does: an event that was confirmed is not lost by a crash.
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;

    -- 1. People who are not there yet, or not by all that names them here, one by one: they are few beside the events, and
    -- each is a race to be won.
    IF create_contacts THEN
        FOR _person IN
            SELECT DISTINCT ON (i.phone, i.email, i.contact_external_id, s.contact_source)
                   i.n, i.phone, i.phone_as_received, i.email, i.contact_external_id, s.contact_source, i.name, i.source,
                   COALESCE(i.received_at, _now) AS received_at
              FROM unnest(items) i, LATERAL (SELECT COALESCE(i.contact_source, i.source) AS contact_source) s
             WHERE i.contact_id IS NULL
               AND COALESCE(i.phone, i.email, i.contact_external_id) IS NOT NULL
               AND COALESCE(i.event_type, i.metric_name) IS NOT NULL
               AND (   (i.phone IS NOT NULL AND NOT EXISTS (
                            SELECT FROM public.contact_identities k
                             WHERE k.organization_id = _organization_id AND k.kind = 'phone' AND k.source = ''
                               AND k.value = i.phone))
                    OR (i.email IS NOT NULL AND NOT EXISTS (
                            SELECT FROM public.contact_identities k
                             WHERE k.organization_id = _organization_id AND k.kind = 'email' AND k.source = ''
                               AND k.value = i.email))
                    OR (i.contact_external_id IS NOT NULL AND NOT EXISTS (
                            SELECT FROM public.contact_identities k
                             WHERE k.organization_id = _organization_id AND k.kind = 'external'
                               AND k.source = s.contact_source AND k.value = i.contact_external_id)))
             ORDER BY i.phone, i.email, i.contact_external_id, s.contact_source, i.n
        LOOP
            SELECT m.contact_id, m.created INTO _made
              FROM afluente.find_or_make_contact(
                  _organization_id,
                  jsonb_path_query_array(
                      jsonb_build_array(
                          jsonb_build_object('kind', 'phone', 'value', _person.phone, 'as_received', _person.phone_as_received),
                          jsonb_build_object('kind', 'email', 'value', _person.email),
                          jsonb_build_object('kind', 'external', 'source', _person.contact_source,
                                             'value', _person.contact_external_id)),
                      '$[*] ? (@.value != null)'),
                  _person.name, _person.source) m;
            CONTINUE WHEN NOT _made.created;
            _created := _created || _person.n;
            PERFORM public.emit_event_for(
                _organization_id, 'contact.created', 'contact', _made.contact_id,
                jsonb_build_object('phone', _person.phone, 'name', _person.name, 'source', _person.source),
                record_contact_event_items.metadata);
            PERFORM public.record_contact_event(
                contact_id        => _made.contact_id,
                metric_name       => 'Contact Created',
                source            => _person.source,
                source_type       => 'INTERNAL',
                external_event_id => 'contact_created:' || _made.contact_id,
                entity_type       => 'contact',
                entity_id         => _made.contact_id::text,
                occurred_at       => _person.received_at,
                metadata          => record_contact_event_items.metadata);
        END LOOP;
    END IF;

    -- 2. Metrics, in one order for all.
    PERFORM afluente.ensure_metric(_organization_id, m.metric_name, m.source)
       FROM (SELECT COALESCE(i.metric_name, afluente.metric_of(i.event_type)) AS metric_name, min(i.source) AS source
               FROM unnest(items) i
              WHERE COALESCE(i.metric_name, afluente.metric_of(i.event_type)) IS NOT NULL
              GROUP BY 1
              ORDER BY 1) m;

    -- 3. The facts, in the order of their names, so that two calls with facts in common wait for each other instead of
    -- locking up; then their events, in the order given.
    WITH metric AS MATERIALIZED (
        SELECT m.id, m.name, m.category FROM public.metrics m WHERE m.organization_id = _organization_id
    ), item AS MATERIALIZED (
        SELECT i.*, uuidv7() AS id, m.id AS metric_id, COALESCE(c.merged_into, c.id) AS survivor,
               COALESCE(i.event_type, afluente.contact_event_type_of(i.metric_name)) AS fact_type,
               COALESCE(i.metric_name, afluente.metric_of(i.event_type)) AS fact_metric,
               COALESCE(i.unique_event_id,
                        i.source || ':' || COALESCE(i.entity_type, 'event') || ':' || i.external_event_id) AS fact_name,
               CASE
                   WHEN COALESCE(i.event_type, i.metric_name) IS NULL THEN 'no_type'
                   WHEN COALESCE(i.contact_id::text, i.phone, i.email, i.contact_external_id) IS NULL THEN 'no_contact'
                   WHEN c.id IS NULL THEN 'unknown_contact'
                   -- beyond what an event can carry, and what every client can read
                   WHEN NOT (i.occurred_at >= '0001-01-02 00:00+00' AND i.occurred_at < '9999-12-31 00:00+00')
                       THEN 'bad_time'
                   -- JSON text is at most six times as long as jsonb, and 200 levels of it are not shorter than this.
                   WHEN pg_column_size(i.properties) > 1500 AND (
                       (pg_column_size(i.properties) > 40000 AND octet_length(i.properties::text) > 258048)
                       OR jsonb_path_exists(i.properties, 'strict $.**{198}')) THEN 'too_large'
               END AS why
          FROM unnest(items) WITH ORDINALITY i
          LEFT JOIN metric m ON m.name = COALESCE(i.metric_name, afluente.metric_of(i.event_type))
          LEFT JOIN LATERAL (
              SELECT COALESCE(
                  i.contact_id,
                  (SELECT k.contact_id FROM public.contact_identities k
                    WHERE k.organization_id = _organization_id AND k.kind = 'phone' AND k.source = '' AND k.value = i.phone),
                  (SELECT k.contact_id FROM public.contact_identities k
                    WHERE k.organization_id = _organization_id AND k.kind = 'email' AND k.source = '' AND k.value = i.email),
                  (SELECT k.contact_id FROM public.contact_identities k
                    WHERE k.organization_id = _organization_id AND k.kind = 'external'
                      AND k.source = COALESCE(i.contact_source, i.source) AND k.value = i.contact_external_id)) AS id
              OFFSET 0  -- once for each item, not once for each use
          ) named ON true
          LEFT JOIN public.contacts c ON c.organization_id = _organization_id AND c.id = named.id
    ), inserted AS (
        INSERT INTO public.contact_events (
            id, organization_id, contact_id, source_type, source, event_type, metric_id, metric_name, object_id,
            object_id_ref, entity_type, entity_id, properties, raw_payload, value, currency, external_event_id,
            unique_event_id, integration_id, occurred_at, received_at)
        SELECT i.id, _organization_id, i.survivor, COALESCE(i.source_type, 'EXTERNAL'), i.source, i.fact_type, i.metric_id,
               i.fact_metric, i.object_id, i.object_id_ref, i.entity_type, i.entity_id, COALESCE(i.properties, '{}'),
               i.raw_payload, i.value, COALESCE(i.currency, CASE WHEN i.value IS NOT NULL THEN 'BRL' END),
               i.external_event_id, i.fact_name, i.integration_id, COALESCE(i.occurred_at, _now),
               COALESCE(i.received_at, _now)
          FROM item i
         WHERE i.why IS NULL
         ORDER BY i.source COLLATE "C", i.external_event_id COLLATE "C", i.fact_name COLLATE "C", i.ordinality
        ON CONFLICT DO NOTHING
        RETURNING contact_events.*
    ), emitted AS (
        INSERT INTO public.event_log (organization_id, event_type, entity_kind, entity_id, payload, metadata, created_at)
        SELECT _organization_id, 'contact_event.recorded', 'contact', e.contact_id,
               jsonb_build_object(
                   'contact_event_id', e.id,
                   'contact_id', e.contact_id,
                   'contact_event_type', e.event_type,
                   'metric_name', e.metric_name,
                   'category', m.category,
                   'source_type', e.source_type,
                   'source', e.source,
                   'external_event_id', e.external_event_id,
                   'unique_event_id', e.unique_event_id,
                   'object_id', e.object_id,
                   'object_id_ref', e.object_id_ref,
                   'entity_type', e.entity_type,
                   'entity_id', e.entity_id,
                   'value', e.value::text,
                   'currency', e.currency,
                   'occurred_at', to_char(e.occurred_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
                   'received_at', CASE e.received_at WHEN _now THEN _now_text ELSE
                       to_char(e.received_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"') END,
                   'properties', e.properties),
               _metadata, _now
          FROM inserted e
          LEFT JOIN metric m ON m.id = e.metric_id
         ORDER BY e.id
    )
    SELECT array_agg(i.id ORDER BY i.ordinality),
           array_agg(CASE WHEN i.why IS NOT NULL THEN 'rejected'
                          WHEN i.id IN (SELECT e.id FROM inserted e) THEN 'recorded'
                          ELSE 'duplicate' END ORDER BY i.ordinality),
           array_agg(i.why ORDER BY i.ordinality)
      INTO _ids, _outcomes, _reasons
      FROM item i;

    IF NOT all_outcomes AND _created = '{}' AND NOT _outcomes && '{duplicate,rejected}' THEN
        RETURN;
    END IF;

    -- 4. What became of each. The rows that stood in the way of a duplicate are seen from here on only.
    RETURN QUERY
    SELECT i.n,
           CASE o.outcome
               WHEN 'recorded' THEN o.id
               WHEN 'duplicate' THEN (
                   SELECT e.id
                     FROM public.contact_events e
                    WHERE e.organization_id = _organization_id
                      AND ((e.source = i.source AND e.external_event_id = i.external_event_id)
                           OR e.unique_event_id = COALESCE(
                               i.unique_event_id,
                               i.source || ':' || COALESCE(i.entity_type, 'event') || ':' || i.external_event_id))
                    ORDER BY e.created_at
                    LIMIT 1)
           END,
           o.outcome, o.reason, i.n = ANY (_created)
      FROM unnest(items) WITH ORDINALITY i
      JOIN unnest(_ids, _outcomes, _reasons) WITH ORDINALITY o (id, outcome, reason, ordinality) USING (ordinality)
     WHERE all_outcomes OR o.outcome <> 'recorded' OR i.n = ANY (_created)
     ORDER BY i.ordinality;
END
$$;
REVOKE ALL ON FUNCTION afluente.record_contact_event_items(afluente.contact_event_item[], boolean, jsonb, boolean) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.record_contact_event_items(afluente.contact_event_item[], boolean, jsonb, boolean)
    TO afluente_app, afluente_worker, afluente_admin;
