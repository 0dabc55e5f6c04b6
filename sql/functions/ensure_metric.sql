-- needs: 0006
-- The id of an organization's metric, made if it is not there. Safe in a race: of two transactions that bring the same
-- new name, the second waits for the first and takes its row.
CREATE OR REPLACE FUNCTION afluente.ensure_metric(organization_id uuid, metric_name text, source text)
RETURNS uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _category text := afluente.metric_category(ensure_metric.metric_name);
    _metric_id uuid;
BEGIN
    LOOP
        SELECT m.id INTO _metric_id
        FROM public.metrics m
        WHERE m.organization_id = ensure_metric.organization_id AND m.name = ensure_metric.metric_name;
        IF FOUND THEN
            RETURN _metric_id;
        END IF;

        INSERT INTO public.metrics (organization_id, name, display_name, category, source, is_system)
        VALUES (ensure_metric.organization_id, ensure_metric.metric_name, ensure_metric.metric_name, _category,
              ensure_metric.source, _category <> 'custom')
        ON CONFLICT ON CONSTRAINT metrics_organization_id_name_key DO NOTHING
        RETURNING id INTO _metric_id;
        IF FOUND THEN
            RETURN _metric_id;
        END IF;
        -- Another transaction has just committed it; the next look sees it.
    END LOOP;
END
$$;
REVOKE ALL ON FUNCTION afluente.ensure_metric(uuid, text, text) FROM PUBLIC;
