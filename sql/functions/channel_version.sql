-- needs: 0005
-- Changes whenever the channel or one of its secrets does: a receiver that holds both in memory gives the version it holds
-- with every delivery, and what is no longer so is not stored. Made of the rows' transaction ids, so that nobody who writes
-- them has to think of it. NULL for a channel that is not there.
CREATE OR REPLACE FUNCTION afluente.channel_version(channel_id uuid) RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT concat_ws('.', c.xmin::text,
                     (SELECT string_agg(s.slot || ':' || s.xmin::text, '.' ORDER BY s.purpose, s.slot)
                        FROM public.channel_secrets s
                       WHERE s.channel_id = c.id))
      FROM public.channels c
     WHERE c.id = channel_version.channel_id
$$;
REVOKE ALL ON FUNCTION afluente.channel_version(uuid) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION afluente.channel_version(uuid) TO afluente_worker;
