-- needs: 0020
-- Takes a tag from a contact, in the caller's transaction and the session's organization, and records "Tag Removed". False
-- when the contact does not have it. `properties` go along with the fact.
-- SQLSTATE: AF001 no organization, AF010 not a contact of it.
CREATE OR REPLACE FUNCTION remove_tag(
    contact_id uuid,
    tag        text,
    source     text DEFAULT 'crm',
    metadata   jsonb DEFAULT '{}',
    properties jsonb DEFAULT '{}'
)
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    _organization_id uuid := auth.organization_id();
    _contact_id      uuid := afluente.require_contact(_organization_id, remove_tag.contact_id);
    _tag_id          uuid;
BEGIN
    DELETE FROM public.contact_tag_links l
     USING public.tags t
     WHERE t.organization_id = _organization_id AND t.name = remove_tag.tag
       AND l.organization_id = t.organization_id AND l.tag_id = t.id AND l.contact_id = _contact_id
    RETURNING l.tag_id INTO _tag_id;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM public.record_contact_event(
        contact_id  => _contact_id,
        metric_name => 'Tag Removed',
        source      => remove_tag.source,
        source_type => 'INTERNAL',
        entity_type => 'tag',
        entity_id   => _tag_id::text,
        properties  => remove_tag.properties || jsonb_build_object('tag', remove_tag.tag, 'tag_id', _tag_id),
        metadata    => remove_tag.metadata);
    RETURN true;
END
$$;
REVOKE ALL ON FUNCTION remove_tag(uuid, text, text, jsonb, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION remove_tag(uuid, text, text, jsonb, jsonb) TO afluente_app, afluente_worker, afluente_admin;
