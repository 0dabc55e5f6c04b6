-- needs: 0020
-- Puts a tag on a contact, in the caller's transaction and the session's organization, and records "Tag Added". The tag is
-- made if there is none of that name. False when the contact has it already. `properties` go along with the fact.
-- SQLSTATE: AF001 no organization, AF010 not a contact of it.
CREATE OR REPLACE FUNCTION add_tag(
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
    _contact_id      uuid := afluente.require_contact(_organization_id, add_tag.contact_id);
    _tag_id          uuid;
BEGIN
    LOOP
        SELECT t.id INTO _tag_id
          FROM public.tags t
         WHERE t.organization_id = _organization_id AND t.name = add_tag.tag
           FOR KEY SHARE;  -- deleted meanwhile: made again
        EXIT WHEN FOUND;
        INSERT INTO public.tags (organization_id, name)
        VALUES (_organization_id, add_tag.tag)
        ON CONFLICT (organization_id, name) DO NOTHING;
    END LOOP;
    INSERT INTO public.contact_tag_links (organization_id, contact_id, tag_id)
    VALUES (_organization_id, _contact_id, _tag_id)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- Without a name: a tag comes and goes, and the link above says whether this is a change.
    PERFORM public.record_contact_event(
        contact_id  => _contact_id,
        metric_name => 'Tag Added',
        source      => add_tag.source,
        source_type => 'INTERNAL',
        entity_type => 'tag',
        entity_id   => _tag_id::text,
        properties  => add_tag.properties || jsonb_build_object('tag', add_tag.tag, 'tag_id', _tag_id),
        metadata    => add_tag.metadata);
    RETURN true;
END
$$;
REVOKE ALL ON FUNCTION add_tag(uuid, text, text, jsonb, jsonb) FROM PUBLIC;
GRANT EXECUTE ON FUNCTION add_tag(uuid, text, text, jsonb, jsonb) TO afluente_app, afluente_worker, afluente_admin;
