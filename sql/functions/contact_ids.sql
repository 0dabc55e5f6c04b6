-- needs: 0005
-- All ids under which things of one person may be recorded: the contact that stays, then those merged into it. Given any
-- of them. contact_events keep the id they were recorded with (append-only), so whoever reads a person's events asks for
-- contact_id = ANY (afluente.contact_ids(organization_id, contact_id)), which uses the indexes that one id uses.
--
-- Merges keep `merged_into` one step deep. Runs as its caller, under the caller's row-level security.
CREATE OR REPLACE FUNCTION afluente.contact_ids(organization_id uuid, contact_id uuid) RETURNS uuid[]
LANGUAGE sql STABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT array_agg(f.id ORDER BY f.merged_into NULLS FIRST, f.id)
      FROM public.contacts c
      JOIN public.contacts f
        ON f.organization_id = c.organization_id
       AND (f.id = COALESCE(c.merged_into, c.id) OR f.merged_into = COALESCE(c.merged_into, c.id))
     WHERE c.organization_id = contact_ids.organization_id
       AND c.id = contact_ids.contact_id
$$;
REVOKE ALL ON FUNCTION afluente.contact_ids(uuid, uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.contact_ids(uuid, uuid) TO afluente_app, afluente_worker, afluente_admin;
